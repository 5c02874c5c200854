"""Linear projections that share an input, with LoRA, as one autograd Function.

Definition, for each projection i of a group (Hu et al., "LoRA", arXiv:2106.09685, eq. 3; rsLoRA, arXiv:2312.03732,
changes the scale alone):

    n   = norm(x)                                             or x, where no norm is given
    y_i = n W_i^T + bias_i + scale_i dropout_i(n) A_i^T B_i^T      (+ residual)

Against modules called one by one this saves: float32 copies of activations (A and B are brought to the activations'
dtype instead), one product with all A at once, additions (the low-rank update is written first and the base product
accumulates on top of it), and the normalised input, which is computed anew in the backward. A 4-bit weight is
dequantised once each way, into memory that is free again after its product (Dettmers et al., "QLoRA",
arXiv:2305.14314, eq. 5).

Shape suffixes: T tokens, H size of the input, O of an output, R rank of LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.dequantize import dequantize
from fastpack.ops.implementation import Implementation, use_triton
from fastpack.ops.linear.lora_matmul import expand_backward, expand_forward, expanded, shrink_backward, update_gradients
from fastpack.ops.linear.parts import Norm, Projection, Settings, tensors_of
from fastpack.ops.linear.row_limited_mm import go_together, serves, sum_of_products, sums_of_products
from fastpack.ops.norm import rms_norm_apply, rms_norm_backward, rms_norm_forward
from fastpack.ops.row_count import TERMS, RowCount, Sum


def project(
    x: Tensor,
    projections: Sequence[Projection],
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> tuple[tuple[Tensor, ...], Tensor]:
    """A group of projections of one input.

    Args:
        x: ``[T, H]``.
        projections: all of one dtype; a LoRA's A and B may have another.
        norm: applied to x first.
        residual: ``[T, O]`` in the projection's dtype, added to the output; for a single projection.
        row_count: how many of the T tokens count, where the device alone knows; others may hold anything finite, and
            so may what comes of them, but their outputs' gradients have to be zero.
        implementation: of the norm, the casts, LoRA's thin products and what makes 4-bit weights dense.

    Returns:
        The outputs ``[T, O_i]``, and x again: use this one for what else reads x (the residual stream), so that its
        gradient is added inside the norm's backward.
    """
    made: tuple[Tensor, ...] = _Project.apply(
        Settings.of(projections, implementation, row_count), norm, x, residual,
        None if norm is None else norm.weight, *tensors_of(projections),
    )  # fmt: skip
    return made[:-1], made[-1]


class _Project(torch.autograd.Function):
    """Saves x, not norm(x); A, B and weights in the dtype they were used in; 4-bit weights packed."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        norm: Norm | None,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        keep: dict[str, Tensor] = {"x": x}
        with torch.autocast(x.device.type, enabled=False):
            n = normalise(x, norm, settings, keep)
            outputs = group_forward(n, settings, flat, keep, residual=residual)
        ctx.settings, ctx.norm, ctx.x_dtype, ctx.names = settings, norm, x.dtype, tuple(keep)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*keep.values())
        return (*outputs, x.view_as(x))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        kept = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        needs = ctx.needs_input_grad
        outputs, passed_on = grads[:-1], grads[-1]
        with torch.autocast(kept["x"].device.type, enabled=False):
            dtype = ctx.settings.dtype
            of_outputs = [None if grad is None else grad.to(dtype) for grad in outputs]
            dn, low = backward_to_input(of_outputs, ctx.settings, kept, need_input=needs[2] or needs[4])
            again = needs_input_again(needs[5:])
            n, dx, dnorm = normalise_backward(dn, ctx.norm, ctx.settings, kept, passed_on, needs[4], again=again)
            weights = backward_to_weights(of_outputs, low, n, ctx.settings, kept, needs[5:])
        if dx is not None and dx.dtype != ctx.x_dtype:
            dx = dx.to(ctx.x_dtype)
        return None, None, dx, outputs[0] if needs[3] else None, dnorm, *weights


def normalise(x: Tensor, norm: Norm | None, settings: Settings, keep: dict[str, Tensor]) -> Tensor:
    """norm(x) in the group's dtype; what its backward needs goes into ``keep`` (x is there already)."""
    if norm is None:
        return x.to(settings.dtype)
    n, rstd = rms_norm_forward(
        x,
        norm.weight,
        norm.eps,
        rounding=norm.rounding,
        unit_offset=norm.unit_offset,
        row_count=settings.row_count,
        implementation=settings.implementation,
    )
    keep["rstd"], keep["norm_weight"] = rstd, norm.weight
    return n.to(settings.dtype)


def normalise_backward(
    dn: Tensor | None,
    norm: Norm | None,
    settings: Settings,
    kept: dict[str, Tensor],
    passed_on: Tensor | None,
    need_weight: bool,
    *,
    again: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What :func:`normalise` made, where it is wanted ``again``, and the gradients of x and of the norm's weight.

    Args:
        dn: its gradient, which the caller gives up, or None.
        passed_on: what reaches x past the norm.
    """
    x = kept["x"]
    if norm is None:
        if dn is not None:
            passed_on = dn if passed_on is None else passed_on + dn
        return x.to(settings.dtype) if again else None, passed_on, None
    weight, rstd = kept["norm_weight"], kept["rstd"]
    how: dict[str, Any] = {
        "rounding": norm.rounding,
        "unit_offset": norm.unit_offset,
        "row_count": settings.row_count,
        "implementation": settings.implementation,
    }
    if dn is None:
        return rms_norm_apply(x, weight, rstd, **how).to(settings.dtype) if again else None, passed_on, None
    normed: Tensor | None = None
    if again:
        dtype = norm.result_dtype(x)
        normed = dn if dn.dtype == dtype and dn.is_contiguous() else torch.empty(dn.shape, dtype=dtype, device=x.device)
    dx, dweight = rms_norm_backward(
        dn.to(x.dtype), x, weight, rstd, grad_summed=passed_on, need_weight=need_weight, normed=normed, **how
    )
    return None if normed is None else normed.to(settings.dtype), dx, dweight


def group_forward(
    n: Tensor,
    settings: Settings,
    flat: Sequence[Tensor | None],
    keep: dict[str, Tensor],
    *,
    residual: Tensor | None = None,
    updates: dict[int, tuple[Tensor, Tensor]] | None = None,
    prefix: str = "",
) -> list[Tensor]:
    """The outputs of a group on ``n [T, H]``; what its backward needs goes into ``keep``.

    Args:
        flat: as :func:`tensors_of` makes it.
        residual: ``[T, O]``, added to the one output; not overwritten.
        updates: low-rank updates to add, if not those of :func:`expand_forward`: none, where the caller adds them.
        prefix: set before the names in ``keep``, for Functions that hold several groups.
    """
    if updates is None:
        updates = expand_forward(n, settings, flat, keep, prefix=prefix)
    # selective checkpointing keeps results of operations as they come: then nothing is added in place
    in_place = not torch._C._len_torch_dispatch_stack()
    count = settings.row_count
    short: set[int] = set()
    if count is not None:
        for i, weight in enumerate(flat[0::4]):
            assert weight is not None
            if _leaves_out(settings, n, [(i, weight)], 0, (residual, *_as_they_lie(updates, i))):
                short.add(i)
        # those that are wide enough alone fill their rounds, and with one term each they run on from tile to tile
        if residual is None and len(short) < len(settings.loras):
            together = _outputs_together(n, settings, flat, keep, updates, count, prefix)
            if together:
                return together
    outputs: list[Tensor] = []
    alone = {i: update for i, update in updates.items() if i not in short}
    ready = expanded(alone, [residual] * len(settings.loras), settings)
    for i in range(len(settings.loras)):
        weight, bias = flat[4 * i : 4 * i + 2]
        assert weight is not None
        dense = _dense(weight, settings, i)
        keep[f"{prefix}w{i}"] = dense if settings.quant_states[i] is None else weight
        if count is not None and i in short:
            one = _sum_of(n, dense, None if bias is None else bias.to(settings.dtype), updates.get(i))
            outputs.append(sum_of_products(one.terms, count, base=residual, bias=one.bias))
            del dense, one  # before the next one is made
            continue
        y, owned = ready.pop(i, residual), in_place and i in updates
        if bias is not None:
            added = bias.to(settings.dtype)
            y, owned = (added, False) if y is None else (y.add_(added) if owned else y + added, in_place)
        if y is None:
            outputs.append(torch.mm(n, dense.t()))
        elif owned:
            outputs.append(y.addmm_(n, dense.t()))
        else:
            outputs.append(torch.addmm(y, n, dense.t()))
        del dense
    return outputs


def _outputs_together(
    n: Tensor,
    settings: Settings,
    flat: Sequence[Tensor | None],
    keep: dict[str, Tensor],
    updates: dict[int, tuple[Tensor, Tensor]],
    count: RowCount,
    prefix: str,
) -> list[Tensor]:
    """As :func:`group_forward` in one launch; none, where there is no such launch.

    Dense copies of 4-bit weights are not held together.
    """
    if any(state is not None for state in settings.quant_states):
        return []
    weights = [weight for weight in flat[0::4] if weight is not None]
    others = [t for i in updates for t in _as_they_lie(updates, i)]
    if not _leaves_out(settings, n, list(enumerate(weights)), 0, others):
        return []
    as_they_are = enumerate(zip(weights, flat[1::4], strict=True))
    if not go_together([_sum_of(n, weight, bias, updates.get(i)) for i, (weight, bias) in as_they_are]):
        return []
    sums: list[Sum] = []
    for i, (weight, bias) in enumerate(zip(weights, flat[1::4], strict=True)):
        dense = keep[f"{prefix}w{i}"] = _dense(weight, settings, i)
        sums.append(_sum_of(n, dense, None if bias is None else bias.to(settings.dtype), updates.get(i)))
    return sums_of_products(sums, count)


def _sum_of(n: Tensor, weight: Tensor, bias: Tensor | None, update: tuple[Tensor, Tensor] | None) -> Sum:
    """One output: its update first, then the base product."""
    return Sum([*([] if update is None else [update]), (n, weight.t())], bias)


def _as_they_lie(updates: dict[int, tuple[Tensor, Tensor]], i: int) -> list[Tensor]:
    """Both factors of an update, if there is one, with rows of stride 1."""
    if i not in updates:
        return []
    thin, wide = updates[i]
    return [thin, wide.t()]


def _leaves_out(
    settings: Settings,
    x: Tensor,
    weights: Sequence[tuple[int, Tensor]],
    side: Literal[0, 1],
    others: Sequence[Tensor | None],
) -> bool:
    """Whether x's products with weights, by projection, leave out the rows of ``x [T, ...]`` that don't count.

    Args:
        side: of weights ``[O, H]``: 0 for outputs of their own, 1 for one sum of all, which has the columns of any.
        others: other factors, and what is added.
    """
    shapes = [weight.shape if (state := settings.quant_states[i]) is None else state.shape for i, weight in weights]
    columns = [shape[0] for shape in shapes] if side == 0 else [shapes[0][1]]
    # others are made dense, or cast, into memory of their own
    ready = [w for i, w in weights if settings.quant_states[i] is None and w.dtype == settings.dtype]
    return serves(settings.implementation, settings.row_count, x, columns, (*ready, *others))


def keep_weights(
    settings: Settings, flat: Sequence[Tensor | None], keep: dict[str, Tensor], *, prefix: str = ""
) -> None:
    """What :func:`group_forward` keeps of the weights, without a product."""
    for i, state in enumerate(settings.quant_states):
        weight = flat[4 * i]
        assert weight is not None
        keep[f"{prefix}w{i}"] = weight if state is not None else _dense(weight, settings, i)


def backward_to_input(
    grads: Sequence[Tensor | None],
    settings: Settings,
    kept: dict[str, Tensor],
    *,
    need_input: bool,
    updates: bool = True,
    prefix: str = "",
) -> tuple[Tensor | None, Tensor | None]:
    """From the gradients of a group's outputs, in ``settings.dtype`` or None, to that of its input ``n [T, H]``.

    Args:
        updates: whether the updates' share is added to the input's gradient; else the caller does it.

    Returns:
        It (None where it is not needed), and what :func:`fastpack.ops.kernels.lora.shrink_backward` gives.
    """
    low = shrink_backward(grads, settings, kept, prefix=prefix)
    if not need_input:
        return None, low
    present = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
    count = settings.row_count if present else None
    if count is not None:
        first, *others = (grad for _, grad in present)
        weights = [(i, kept[f"{prefix}w{i}"]) for i, _ in present]
        if not _leaves_out(settings, first, weights, 1, (*others, low, kept.get(f"{prefix}a"))):
            count = None
    terms: list[tuple[Tensor, Tensor]] = []
    dn: Tensor | None = None
    if low is not None and updates:
        if count is not None and settings.uniform:
            terms.append((low, kept[f"{prefix}a"]))
        else:
            dn = expand_backward(low, settings, kept, prefix=prefix)
    for i, grad in present:
        dense = _dense(kept[f"{prefix}w{i}"], settings, i)
        if count is None:
            dn = torch.mm(grad, dense) if dn is None else dn.addmm_(grad, dense)
            del dense  # before the next one is made
            continue
        terms.append((grad, dense))
        del dense
        # dense copies of 4-bit weights are not held together
        if i == present[-1][0] or len(terms) == TERMS or settings.quant_states[i] is not None:
            dn = sum_of_products(terms, count, base=dn, out=dn)
            terms = []
    return dn, low


def backward_to_weights(
    grads: Sequence[Tensor | None],
    low: Tensor | None,
    n: Tensor | None,
    settings: Settings,
    kept: dict[str, Tensor],
    needs: Sequence[bool],
    *,
    prefix: str = "",
) -> list[Tensor | None]:
    """Gradients of a group's tensors, flat as :func:`tensors_of` makes them, None for what needs none.

    Args:
        low: what :func:`backward_to_input` returned.
        n: the group's input ``[T, H]``; None where :func:`needs_input_again` says that nobody reads it.
    """
    made: list[Tensor | None] = [None] * len(needs)
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        if needs[4 * i]:
            assert n is not None
            made[4 * i] = torch.mm(grad.t(), n)
    of_biases = {4 * i + 1: grad for i, grad in enumerate(grads) if grad is not None and needs[4 * i + 1]}
    for place, gradient in zip(of_biases, _sums_over_tokens([*of_biases.values()], settings), strict=True):
        made[place] = gradient
    update_gradients(grads, low, n, settings, kept, needs, made, prefix=prefix)
    return made


def _sums_over_tokens(grads: Sequence[Tensor], settings: Settings) -> list[Tensor]:
    if not grads or not use_triton(settings.implementation, grads[0]):
        return [grad.sum(0) for grad in grads]
    from fastpack.ops.kernels.row_sums import sum_rows

    return sum_rows(grads, [grad.dtype for grad in grads])


def needs_input_again(needs: Sequence[bool]) -> bool:
    """True where a weight or an A is trained."""
    return any(needs[0::4]) or any(needs[2::4])


def _dense(weight: Tensor, settings: Settings, i: int) -> Tensor:
    state = settings.quant_states[i]
    if state is None:
        return weight.to(settings.dtype)
    # the allocator gives every layer the same memory again; a buffer of our own would be held through the loss too
    return dequantize(weight, state, settings.dtype, settings.implementation)
