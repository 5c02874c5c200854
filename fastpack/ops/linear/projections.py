"""Linear projections that share an input, with LoRA, as one autograd Function.

Definition, for each projection i of a group (Hu et al., "LoRA", arXiv:2106.09685, eq. 3; rsLoRA, arXiv:2312.03732,
changes only the scale):

    n   = norm(x)                                             or x without a norm
    y_i = n W_i^T + bias_i + scale_i dropout_i(n) A_i^T B_i^T      (+ residual)

Compared with calling the modules one by one, this saves:

- float32 copies of activations: A and B are cast to the activations' dtype instead;
- matmuls: one serves all A at once;
- additions: the low-rank update is written first, and the base matmul accumulates on top of it;
- memory for the normalised input, which the backward computes again.

A 4-bit weight is dequantised once in the forward and once in the backward, into memory that is freed after its matmul
(Dettmers et al., "QLoRA", arXiv:2305.14314, eq. 5).

Shape suffixes: T tokens, H size of the input, O of an output, R rank of LoRA.

In all functions ``flat`` is the list that :func:`fastpack.ops.linear.operands.tensors_of` returns, and ``saved`` holds
the tensors that the backward needs, by name. ``prefix`` is put before those names, for Functions with several groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.dequantize import dequantize
from fastpack.ops.implementation import Implementation, use_triton
from fastpack.ops.linear.lora_matmul import (
    expand_backward,
    expand_forward,
    expand_updates,
    shrink_backward,
    update_gradients,
)
from fastpack.ops.linear.operands import Norm, Projection, ProjectionSettings, tensors_of
from fastpack.ops.linear.row_limited_mm import go_together, serves, sum_of_matmuls, sums_of_matmuls
from fastpack.ops.norm import rms_norm_apply, rms_norm_backward, rms_norm_forward
from fastpack.ops.row_count import TERMS, MatmulSum, RowCount


def project(
    x: Tensor,
    projections: Sequence[Projection],
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Apply a group of projections to one input.

    Args:
        x: ``[T, H]``.
        projections: the projections, all of one dtype; their A and B may have another.
        norm: the norm that is applied to x first, or None.
        residual: ``[T, O]`` in the projection's dtype, added to the output of a single projection, or None.
        row_count: how many of the first tokens are real, if only the device knows; None if all are. The others (bucket
            padding) may hold any finite values, as may their outputs, but their outputs' gradients must be zero.
        implementation: which implementation of the norm, LoRA's matmuls and the dequantisation to run; ``auto`` runs
            each kernel that :func:`use_triton` allows and that supports the tensors.

    Returns:
        The outputs ``[T, O_i]``, and x again. Pass this x to everything else that reads x (the residual stream), so
        that its gradient is added inside the norm's backward.

    Example:
        >>> from fastpack.ops.linear.operands import Lora
        >>> x, weight = torch.randn(5, 8), torch.randn(16, 8)
        >>> lora = Lora(torch.randn(4, 8), torch.zeros(16, 4), scale=2.0)
        >>> (y,), x = project(x, [Projection(weight, torch.float32, lora=lora)])
        >>> y.shape
        torch.Size([5, 16])
    """
    results: tuple[Tensor, ...] = _Project.apply(
        ProjectionSettings.of(projections, implementation, row_count), norm, x, residual,
        None if norm is None else norm.weight, *tensors_of(projections),
    )  # fmt: skip
    return results[:-1], results[-1]


class _Project(torch.autograd.Function):
    """The autograd Function of :func:`project`.

    It saves x, not norm(x). A, B and weights are saved in the dtype of the matmuls, 4-bit weights packed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        settings: ProjectionSettings,
        norm: Norm | None,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        saved: dict[str, Tensor] = {"x": x}
        with torch.autocast(x.device.type, enabled=False):
            n = normalise(x, norm, settings, saved)
            outputs = group_forward(n, settings, flat, saved, residual=residual)
        ctx.settings, ctx.norm, ctx.x_dtype, ctx.names = settings, norm, x.dtype, tuple(saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved.values())
        return (*outputs, x.view_as(x))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        needs = ctx.needs_input_grad
        output_grads, x_grad = grads[:-1], grads[-1]
        with torch.autocast(saved["x"].device.type, enabled=False):
            dtype = ctx.settings.dtype
            cast_grads = [None if grad is None else grad.to(dtype) for grad in output_grads]
            dn, low = backward_to_input(cast_grads, ctx.settings, saved, need_input=needs[2] or needs[4])
            need_n = needs_input_again(needs[5:])
            n, dx, dnorm = normalise_backward(dn, ctx.norm, ctx.settings, saved, x_grad, needs[4], need_n=need_n)
            weights = backward_to_weights(cast_grads, low, n, ctx.settings, saved, needs[5:])
        if dx is not None and dx.dtype != ctx.x_dtype:
            dx = dx.to(ctx.x_dtype)
        return None, None, dx, output_grads[0] if needs[3] else None, dnorm, *weights


def normalise(x: Tensor, norm: Norm | None, settings: ProjectionSettings, saved: dict[str, Tensor]) -> Tensor:
    """Return norm(x) in the group's dtype, and add what its backward needs to ``saved``, which holds x already."""
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
    saved["rstd"], saved["norm_weight"] = rstd, norm.weight
    return n.to(settings.dtype)


def normalise_backward(
    dn: Tensor | None,
    norm: Norm | None,
    settings: ProjectionSettings,
    saved: dict[str, Tensor],
    x_grad: Tensor | None,
    need_weight: bool,
    *,
    need_n: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the result of :func:`normalise` again, and the gradients of x and of the norm's weight.

    Args:
        dn: the gradient of norm(x), or None; it may be overwritten.
        norm: the norm, or None.
        settings: the group's settings.
        saved: the tensors that :func:`normalise` saved.
        x_grad: the gradient that reaches x on paths around the norm, or None.
        need_weight: False if the norm's weight is frozen.
        need_n: False if norm(x) isn't needed.

    Returns:
        norm(x), the gradient of x, and the gradient of the norm's weight, each None if it isn't needed.
    """
    x = saved["x"]
    if norm is None:
        if dn is not None:
            x_grad = dn if x_grad is None else x_grad + dn
        return x.to(settings.dtype) if need_n else None, x_grad, None
    weight, rstd = saved["norm_weight"], saved["rstd"]
    options: dict[str, Any] = {
        "rounding": norm.rounding,
        "unit_offset": norm.unit_offset,
        "row_count": settings.row_count,
        "implementation": settings.implementation,
    }
    if dn is None:
        return rms_norm_apply(x, weight, rstd, **options).to(settings.dtype) if need_n else None, x_grad, None
    normed: Tensor | None = None
    if need_n:
        dtype = norm.result_dtype(x)
        normed = dn if dn.dtype == dtype and dn.is_contiguous() else torch.empty(dn.shape, dtype=dtype, device=x.device)
    dx, dweight = rms_norm_backward(
        dn.to(x.dtype), x, weight, rstd, grad_summed=x_grad, need_weight=need_weight, normed=normed, **options
    )
    return None if normed is None else normed.to(settings.dtype), dx, dweight


def group_forward(
    n: Tensor,
    settings: ProjectionSettings,
    flat: Sequence[Tensor | None],
    saved: dict[str, Tensor],
    *,
    residual: Tensor | None = None,
    updates: dict[int, tuple[Tensor, Tensor]] | None = None,
    prefix: str = "",
) -> list[Tensor]:
    """Compute the outputs of a group, and add what its backward needs to ``saved``.

    Args:
        n: ``[T, H]``, the group's input in its dtype.
        settings: the group's settings.
        flat: the group's tensors, as :func:`tensors_of` returns them.
        saved: the tensors for the backward, by name.
        residual: ``[T, O]``, added to the output of a single projection; not overwritten.
        updates: the factors of the low-rank updates to add; by default :func:`expand_forward` computes them. Empty if
            the caller adds the updates.
        prefix: what to put before the names in ``saved``.

    Returns:
        ``[T, O_i]`` for each projection.
    """
    if updates is None:
        updates = expand_forward(n, settings, flat, saved, prefix=prefix)
    # selective checkpointing keeps the results of operations, so nothing may then be added to them in place
    in_place = not torch._C._len_torch_dispatch_stack()
    count = settings.row_count
    row_limited: set[int] = set()
    if count is not None:
        for i, weight in enumerate(flat[0::4]):
            assert weight is not None
            if _is_row_limited(settings, n, [(i, weight)], 0, (residual, *_row_major_factors(updates, i))):
                row_limited.add(i)
        # One launch computes all outputs, unless each is wide enough to fill its own launch, where one-term tiles
        # overlap.
        if residual is None and len(row_limited) < len(settings.loras):
            joint = _outputs_in_one_launch(n, settings, flat, saved, updates, count, prefix)
            if joint:
                return joint
    outputs: list[Tensor] = []
    separate = {i: update for i, update in updates.items() if i not in row_limited}
    sums = expand_updates(separate, [residual] * len(settings.loras), settings)
    for i in range(len(settings.loras)):
        weight, bias = flat[4 * i : 4 * i + 2]
        assert weight is not None
        dense = _dense(weight, settings, i)
        saved[f"{prefix}w{i}"] = dense if settings.quant_states[i] is None else weight
        if count is not None and i in row_limited:
            matmuls = _sum_of(n, dense, None if bias is None else bias.to(settings.dtype), updates.get(i))
            outputs.append(sum_of_matmuls(matmuls.terms, count, base=residual, bias=matmuls.bias))
            del dense, matmuls  # before the next weight is dequantised
            continue
        y, owned = sums.pop(i, residual), in_place and i in updates
        if bias is not None:
            cast_bias = bias.to(settings.dtype)
            y, owned = (cast_bias, False) if y is None else (y.add_(cast_bias) if owned else y + cast_bias, in_place)
        if y is None:
            outputs.append(torch.mm(n, dense.t()))
        elif owned:
            outputs.append(y.addmm_(n, dense.t()))
        else:
            outputs.append(torch.addmm(y, n, dense.t()))
        del dense
    return outputs


def _outputs_in_one_launch(
    n: Tensor,
    settings: ProjectionSettings,
    flat: Sequence[Tensor | None],
    saved: dict[str, Tensor],
    updates: dict[int, tuple[Tensor, Tensor]],
    count: RowCount,
    prefix: str,
) -> list[Tensor]:
    """Compute the outputs as :func:`group_forward` does, in one launch; return none if one launch can't.

    It can't for 4-bit weights, whose dense copies must not exist at the same time.
    """
    if any(state is not None for state in settings.quant_states):
        return []
    weights = [weight for weight in flat[0::4] if weight is not None]
    others = [factor for i in updates for factor in _row_major_factors(updates, i)]
    if not _is_row_limited(settings, n, list(enumerate(weights)), 0, others):
        return []
    uncast = enumerate(zip(weights, flat[1::4], strict=True))
    if not go_together([_sum_of(n, weight, bias, updates.get(i)) for i, (weight, bias) in uncast]):
        return []
    sums: list[MatmulSum] = []
    for i, (weight, bias) in enumerate(zip(weights, flat[1::4], strict=True)):
        dense = saved[f"{prefix}w{i}"] = _dense(weight, settings, i)
        sums.append(_sum_of(n, dense, None if bias is None else bias.to(settings.dtype), updates.get(i)))
    return sums_of_matmuls(sums, count)


def _sum_of(n: Tensor, weight: Tensor, bias: Tensor | None, update: tuple[Tensor, Tensor] | None) -> MatmulSum:
    """Return the sum that makes one output: the update first, then the base matmul."""
    return MatmulSum([*([] if update is None else [update]), (n, weight.t())], bias)


def _row_major_factors(updates: dict[int, tuple[Tensor, Tensor]], i: int) -> list[Tensor]:
    """Return both factors of an update, in the layout whose rows have stride 1, or none without an update."""
    if i not in updates:
        return []
    low, transposed_b = updates[i]
    return [low, transposed_b.t()]


def _is_row_limited(
    settings: ProjectionSettings,
    x: Tensor,
    weights: Sequence[tuple[int, Tensor]],
    side: Literal[0, 1],
    others: Sequence[Tensor | None],
) -> bool:
    """Return whether the kernel that skips bucket padding runs for the matmuls of ``x`` with these weights.

    Args:
        settings: the group's settings.
        x: ``[T, ...]``, the first factor.
        weights: the index and the weight ``[O, H]`` of each projection.
        side: the dimension of the weights that becomes the result's columns: 0 for an output of each weight, 1 for one
            sum over all weights.
        others: all other factors and addends.
    """
    shapes = [weight.shape if (state := settings.quant_states[i]) is None else state.shape for i, weight in weights]
    columns = [shape[0] for shape in shapes] if side == 0 else [shapes[0][1]]
    # the other weights are dequantised or cast into new memory, which is aligned
    uncast = [w for i, w in weights if settings.quant_states[i] is None and w.dtype == settings.dtype]
    return serves(settings.implementation, settings.row_count, x, columns, (*uncast, *others))


def save_weights(
    settings: ProjectionSettings, flat: Sequence[Tensor | None], saved: dict[str, Tensor], *, prefix: str = ""
) -> None:
    """Add the weights to ``saved`` as :func:`group_forward` does, without the matmuls."""
    for i, state in enumerate(settings.quant_states):
        weight = flat[4 * i]
        assert weight is not None
        saved[f"{prefix}w{i}"] = weight if state is not None else _dense(weight, settings, i)


def backward_to_input(
    grads: Sequence[Tensor | None],
    settings: ProjectionSettings,
    saved: dict[str, Tensor],
    *,
    need_input: bool,
    updates: bool = True,
    prefix: str = "",
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradient of a group's input from the gradients of its outputs.

    Args:
        grads: ``[T, O_i]`` in the group's dtype, or None, for each output.
        settings: the group's settings.
        saved: the tensors that the forward saved.
        need_input: False if the input needs no gradient.
        updates: False if the caller adds the LoRA updates' share of the input's gradient.
        prefix: what the forward put before the names in ``saved``.

    Returns:
        The gradient ``[T, H]``, or None if it isn't needed, and the result of
        :func:`fastpack.ops.linear.lora_matmul.shrink_backward`.
    """
    low = shrink_backward(grads, settings, saved, prefix=prefix)
    if not need_input:
        return None, low
    present = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
    count = settings.row_count if present else None
    if count is not None:
        first, *others = (grad for _, grad in present)
        weights = [(i, saved[f"{prefix}w{i}"]) for i, _ in present]
        if not _is_row_limited(settings, first, weights, 1, (*others, low, saved.get(f"{prefix}a"))):
            count = None
    terms: list[tuple[Tensor, Tensor]] = []
    dn: Tensor | None = None
    if low is not None and updates:
        if count is not None and settings.uniform:
            terms.append((low, saved[f"{prefix}a"]))
        else:
            dn = expand_backward(low, settings, saved, prefix=prefix)
    for i, grad in present:
        dense = _dense(saved[f"{prefix}w{i}"], settings, i)
        if count is None:
            dn = torch.mm(grad, dense) if dn is None else dn.addmm_(grad, dense)
            del dense  # before the next weight is dequantised
            continue
        terms.append((grad, dense))
        del dense
        # dense copies of 4-bit weights must not exist at the same time
        if i == present[-1][0] or len(terms) == TERMS or settings.quant_states[i] is not None:
            dn = sum_of_matmuls(terms, count, base=dn, out=dn)
            terms = []
    return dn, low


def backward_to_weights(
    grads: Sequence[Tensor | None],
    low: Tensor | None,
    n: Tensor | None,
    settings: ProjectionSettings,
    saved: dict[str, Tensor],
    needs: Sequence[bool],
    *,
    prefix: str = "",
) -> list[Tensor | None]:
    """Compute the gradients of a group's tensors.

    Args:
        grads: ``[T, O_i]`` in the group's dtype, or None, for each output.
        low: the second result of :func:`backward_to_input`.
        n: the group's input ``[T, H]``; it may be None if :func:`needs_input_again` returns False.
        settings: the group's settings.
        saved: the tensors that the forward saved.
        needs: for each of the group's tensors, whether it needs a gradient.
        prefix: what the forward put before the names in ``saved``.

    Returns:
        A gradient or None for each tensor, in the order of :func:`tensors_of`.
    """
    gradients: list[Tensor | None] = [None] * len(needs)
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        if needs[4 * i]:
            assert n is not None
            gradients[4 * i] = torch.mm(grad.t(), n)
    bias_grads = {4 * i + 1: grad for i, grad in enumerate(grads) if grad is not None and needs[4 * i + 1]}
    for place, gradient in zip(bias_grads, _sums_over_tokens([*bias_grads.values()], settings), strict=True):
        gradients[place] = gradient
    update_gradients(grads, low, n, settings, saved, needs, gradients, prefix=prefix)
    return gradients


def _sums_over_tokens(grads: Sequence[Tensor], settings: ProjectionSettings) -> list[Tensor]:
    if not grads or not use_triton(settings.implementation, grads[0]):
        return [grad.sum(0) for grad in grads]
    from fastpack.ops.kernels.row_sums import sum_rows

    return sum_rows(grads, [grad.dtype for grad in grads])


def needs_input_again(needs: Sequence[bool]) -> bool:
    """Return whether the backward needs the group's input: whether a weight or an A is trained."""
    return any(needs[0::4]) or any(needs[2::4])


def _dense(weight: Tensor, settings: ProjectionSettings, i: int) -> Tensor:
    state = settings.quant_states[i]
    if state is None:
        return weight.to(settings.dtype)
    # the allocator reuses this memory in every layer; a buffer of our own would stay allocated during the loss too
    return dequantize(weight, state, settings.dtype, settings.implementation)
