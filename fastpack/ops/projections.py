"""Linear projections that share an input, with LoRA, as one autograd Function.

Definition, for each projection i of a group (Hu et al., "LoRA", arXiv:2106.09685, eq. 3; rsLoRA, arXiv:2312.03732,
changes the scale alone):

    n   = norm(x)                                             or x, where no norm is given
    y_i = n W_i^T + bias_i + scale_i dropout_i(n) A_i^T B_i^T      (+ residual)

Against modules called one by one this saves: float32 copies of activations (A and B are brought to the activations'
dtype instead), one product with all A at once, additions (the low-rank update is written first and the base product
accumulates on top of it), and the normalised input, which is computed anew in the backward. A 4-bit weight is
dequantised once each way, into a buffer that all layers share (Dettmers et al., "QLoRA", arXiv:2305.14314, eq. 5).

Shape suffixes: T tokens, H size of the input, O of an output, R rank of LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.implementation import Implementation
from fastpack.ops.norm import Rounding, rms_norm_apply, rms_norm_backward, rms_norm_forward


@dataclass(frozen=True, eq=False)
class Lora:
    """A low-rank update: a ``[R, H]``, b ``[O, R]``, in any float dtype; dropout is a probability."""

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0


@dataclass(frozen=True, eq=False)
class Projection:
    """What a linear layer computes with.

    Attributes:
        weight: ``[O, H]``, or bitsandbytes' packed 4-bit weight where there is a ``quant_state``.
        bias: ``[O]`` or None.
        dtype: what the product is computed in.
    """

    weight: Tensor
    dtype: torch.dtype
    bias: Tensor | None = None
    lora: Lora | None = None
    quant_state: Any = None


@dataclass(frozen=True, eq=False)
class Norm:
    """A root-mean-square norm before a group; see :func:`fastpack.ops.norm.rms_norm`."""

    weight: Tensor
    eps: float
    rounding: Rounding = "before"
    unit_offset: bool = False


@dataclass
class Workspace:
    """The buffer into which 4-bit weights are dequantised, shared by all layers of a model, one after the other."""

    buffers: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def get(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory, valid until the next call. A captured graph gets memory of its own."""
        count = 1
        for size in shape:
            count *= size
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.empty(*shape, dtype=dtype, device=device)
        found = self.buffers.get((dtype, device))
        if found is None or found.numel() < count:
            found = self.buffers[dtype, device] = torch.empty(count, dtype=dtype, device=device)
        return found[:count].view(*shape)

    def __getstate__(self) -> dict[str, Any]:
        return {"buffers": {}}  # a copy or a pickle of a model needs no copy of scratch memory

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        return Workspace()


@dataclass(frozen=True, eq=False)
class Settings:
    """What a group of projections has beside tensors; one entry of each tuple for each projection.

    ``loras`` holds ``(scale, dropout)``, or None for a projection without an update.
    """

    dtype: torch.dtype
    loras: tuple[tuple[float, float] | None, ...]
    quant_states: tuple[Any, ...]
    workspace: Workspace

    @classmethod
    def of(cls, projections: Sequence[Projection], workspace: Workspace) -> Settings:
        """Those of a group, all of which compute in the same dtype."""
        return cls(
            projections[0].dtype,
            tuple(None if p.lora is None else (p.lora.scale, p.lora.dropout) for p in projections),
            tuple(p.quant_state for p in projections),
            workspace,
        )

    @property
    def uniform(self) -> bool:
        """True where one product with all A at once serves every update of the group."""
        return not any(lora and lora[1] for lora in self.loras)

    @property
    def owners(self) -> list[int]:
        """Which projections have an update."""
        return [i for i, lora in enumerate(self.loras) if lora is not None]

    def scale(self, i: int) -> float:
        """Of projection i's update."""
        lora = self.loras[i]
        assert lora is not None
        return lora[0]


def tensors_of(projections: Sequence[Projection]) -> list[Tensor | None]:
    """weight, bias, A and B of each projection, flat: what a Function is given and returns gradients for."""
    flat: list[Tensor | None] = []
    for p in projections:
        flat += [p.weight, p.bias, None if p.lora is None else p.lora.a, None if p.lora is None else p.lora.b]
    return flat


def project(
    x: Tensor,
    projections: Sequence[Projection],
    workspace: Workspace,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    implementation: Implementation = "auto",
) -> tuple[tuple[Tensor, ...], Tensor]:
    """A group of projections of one input.

    Args:
        x: ``[T, H]``.
        projections: all of one dtype; a LoRA's A and B may have another.
        workspace: where 4-bit weights are dequantised.
        norm: applied to x first.
        residual: ``[T, O]`` in the projection's dtype, added to the output; for a single projection.
        implementation: of the norm.

    Returns:
        The outputs ``[T, O_i]``, and x again: use this one for what else reads x (the residual stream), so that its
        gradient is added inside the norm's backward.
    """
    made: tuple[Tensor, ...] = _Project.apply(
        Settings.of(projections, workspace), norm, implementation, x, residual,
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
        implementation: Implementation,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        keep: dict[str, Tensor] = {"x": x}
        with torch.autocast(x.device.type, enabled=False):
            n = normalise(x, norm, settings.dtype, keep, implementation)
            outputs = group_forward(n, settings, flat, keep, residual=residual)
        ctx.settings, ctx.norm, ctx.implementation = settings, norm, implementation
        ctx.x_dtype, ctx.names = x.dtype, tuple(keep)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*keep.values())
        return (*outputs, x.view_as(x))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        kept = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        needs = ctx.needs_input_grad
        outputs, passed_on = grads[:-1], grads[-1]
        with torch.autocast(kept["x"].device.type, enabled=False):
            dtype = ctx.settings.dtype
            of_outputs = [None if grad is None else grad.to(dtype) for grad in outputs]
            dn, low = backward_to_input(of_outputs, ctx.settings, kept, need_input=needs[3] or needs[5])
            n = normalised_again(ctx.norm, dtype, kept, ctx.implementation) if needs_input_again(needs[6:]) else None
            weights = backward_to_weights(of_outputs, low, n, ctx.settings, kept, needs[6:])
            dx, dnorm = normalise_backward(dn, ctx.norm, kept, passed_on, needs[5], ctx.implementation)
        if dx is not None and dx.dtype != ctx.x_dtype:
            dx = dx.to(ctx.x_dtype)
        return None, None, None, dx, outputs[0] if needs[4] else None, dnorm, *weights


def normalise(
    x: Tensor, norm: Norm | None, dtype: torch.dtype, keep: dict[str, Tensor], implementation: Implementation
) -> Tensor:
    """norm(x) in ``dtype``; what its backward needs goes into ``keep`` (x is there already)."""
    if norm is None:
        return x.to(dtype)
    n, _, rstd = rms_norm_forward(
        x, norm.weight, norm.eps, rounding=norm.rounding, unit_offset=norm.unit_offset, implementation=implementation
    )
    keep["rstd"], keep["norm_weight"] = rstd, norm.weight
    return n.to(dtype)


def normalised_again(
    norm: Norm | None, dtype: torch.dtype, kept: dict[str, Tensor], implementation: Implementation
) -> Tensor:
    """The same from what was kept."""
    if norm is None:
        return kept["x"].to(dtype)
    n = rms_norm_apply(
        kept["x"],
        kept["norm_weight"],
        kept["rstd"],
        rounding=norm.rounding,
        unit_offset=norm.unit_offset,
        implementation=implementation,
    )
    return n.to(dtype)


def normalise_backward(
    dn: Tensor | None,
    norm: Norm | None,
    kept: dict[str, Tensor],
    passed_on: Tensor | None,
    need_weight: bool,
    implementation: Implementation,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the norm's weight; ``passed_on`` reaches x past the norm."""
    if dn is None:
        return passed_on, None
    if norm is None:
        return (dn if passed_on is None else passed_on + dn), None
    return rms_norm_backward(
        dn.to(kept["x"].dtype),
        kept["x"],
        kept["norm_weight"],
        kept["rstd"],
        rounding=norm.rounding,
        unit_offset=norm.unit_offset,
        grad_summed=passed_on,
        need_weight=need_weight,
        implementation=implementation,
    )


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
    outputs: list[Tensor] = []
    for i in range(len(settings.loras)):
        weight, bias = flat[4 * i : 4 * i + 2]
        assert weight is not None
        y = residual
        owned = False
        if i in updates:
            y = torch.mm(*updates[i]) if y is None else torch.addmm(y, *updates[i])
            owned = True
        dense = _dense(weight, settings, i)
        if settings.quant_states[i] is None:
            keep[f"{prefix}w{i}"] = dense
        else:
            keep[f"{prefix}w{i}"] = weight
        if bias is not None:
            added = bias.to(settings.dtype)
            y, owned = (added, False) if y is None else (y.add_(added) if owned else y + added, True)
        if y is None:
            outputs.append(torch.mm(n, dense.t()))
        elif owned:
            outputs.append(y.addmm_(n, dense.t()))
        else:
            outputs.append(torch.addmm(y, n, dense.t()))
    return outputs


def expand_forward(
    n: Tensor, settings: Settings, flat: Sequence[Tensor | None], keep: dict[str, Tensor], *, prefix: str = ""
) -> dict[int, tuple[Tensor, Tensor]]:
    """The two factors of each projection's update: ``scale_i dropout_i(n) A_i^T [T, R_i]`` and ``B_i^T [R_i, O_i]``."""
    owners = settings.owners
    if not owners:
        return {}
    scaled = torch._foreach_mul([flat[4 * i + 2] for i in owners], [settings.scale(i) for i in owners])  # type: ignore[misc]
    ranks = [len(a) for a in scaled]
    stacked = keep[f"{prefix}a"] = (torch.cat(scaled) if len(scaled) > 1 else scaled[0]).to(settings.dtype)
    if settings.uniform:
        together = torch.mm(n, stacked.t())
    else:
        together = torch.empty(len(n), sum(ranks), dtype=n.dtype, device=n.device)
        for i, a, t in zip(owners, stacked.split(ranks), together.split(ranks, 1), strict=True):
            dropout = settings.loras[i][1]  # type: ignore[index]
            dropped = n
            if dropout:
                dropped, keep[f"{prefix}mask{i}"] = torch.native_dropout(n, dropout, True)
            torch.mm(dropped, a.t(), out=t)
    keep[f"{prefix}t"] = together
    for i in owners:
        b = flat[4 * i + 3]
        assert b is not None
        keep[f"{prefix}b{i}"] = b.to(settings.dtype)
    return factors(settings, keep, prefix=prefix)


def factors(settings: Settings, kept: dict[str, Tensor], *, prefix: str = "") -> dict[int, tuple[Tensor, Tensor]]:
    """What :func:`expand_forward` returned, from what it kept."""
    if not settings.owners:
        return {}
    wide = [kept[f"{prefix}b{i}"] for i in settings.owners]
    thin = kept[f"{prefix}t"].split([b.shape[1] for b in wide], 1)
    return {i: (t, b.t()) for i, t, b in zip(settings.owners, thin, wide, strict=True)}


def backward_to_input(
    grads: Sequence[Tensor | None],
    settings: Settings,
    kept: dict[str, Tensor],
    *,
    need_input: bool,
    weights: bool = True,
    updates: bool = True,
    prefix: str = "",
) -> tuple[Tensor | None, Tensor | None]:
    """From the gradients of a group's outputs, in ``settings.dtype`` or None, to that of its input ``n [T, H]``.

    Args:
        weights: whether the base products belong to the group; else the low-rank updates alone do.
        updates: whether the updates' share is added to the input's gradient; else the caller does it.

    Returns:
        It (None where it is not needed), and those of the low-rank activations side by side, ``[T, sum of R]``, which
        :func:`backward_to_weights` needs (None without LoRA).
    """
    dn: Tensor | None = None
    low: Tensor | None = None
    owners = settings.owners
    if owners:
        ranks = [kept[f"{prefix}b{i}"].shape[1] for i in owners]
        low = torch.empty_like(kept[f"{prefix}t"])
        for i, part in zip(owners, low.split(ranks, 1), strict=True):
            grad = grads[i]
            if grad is None:
                part.zero_()
            else:
                torch.mm(grad, kept[f"{prefix}b{i}"], out=part)
        if need_input and updates:
            dn = _expand(low, ranks, settings, kept, prefix)
    if need_input and weights:
        for i, grad in enumerate(grads):
            if grad is not None:
                dense = _dense(kept[f"{prefix}w{i}"], settings, i)
                dn = torch.mm(grad, dense) if dn is None else dn.addmm_(grad, dense)
    return dn, low


def _expand(low: Tensor, ranks: list[int], settings: Settings, kept: dict[str, Tensor], prefix: str) -> Tensor:
    """The update's share of the input's gradient, ``[T, H]``."""
    stacked = kept[f"{prefix}a"]
    if settings.uniform:
        return torch.mm(low, stacked)
    total: Tensor | None = None
    for i, part, a in zip(settings.owners, low.split(ranks, 1), stacked.split(ranks), strict=True):
        share = torch.mm(part, a)
        _dropped(share, settings, i, kept, prefix)
        total = share if total is None else total.add_(share)
    assert total is not None
    return total


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
        if needs[4 * i + 1]:
            made[4 * i + 1] = grad.sum(0)
    owners = settings.owners
    if not owners:
        return made
    assert low is not None
    ranks = [kept[f"{prefix}b{i}"].shape[1] for i in owners]
    for i, t in zip(owners, kept[f"{prefix}t"].split(ranks, 1), strict=True):
        grad = grads[i]
        if needs[4 * i + 3] and grad is not None:
            made[4 * i + 3] = _mm_float32(grad.t(), t)
    trained = [i for i in owners if needs[4 * i + 2]]
    if not trained:
        return made
    assert n is not None
    if settings.uniform:
        gradients = list(_mm_float32(low.t(), n).split(ranks))
    else:
        gradients = []
        for i, part in zip(owners, low.split(ranks, 1), strict=True):
            gradients.append(_mm_float32(part.t(), _dropped(n.clone(), settings, i, kept, prefix)))
    scaled = torch._foreach_mul(gradients, [settings.scale(i) for i in owners])
    for i, gradient in zip(owners, scaled, strict=True):
        made[4 * i + 2] = gradient if i in trained else None
    return made


def needs_input_again(needs: Sequence[bool]) -> bool:
    """True where a weight or an A is trained."""
    return any(needs[0::4]) or any(needs[2::4])


def _dropped(x: Tensor, settings: Settings, i: int, kept: dict[str, Tensor], prefix: str) -> Tensor:
    """``x`` with projection i's dropout applied again, in place."""
    mask = kept.get(f"{prefix}mask{i}")
    if mask is None:
        return x
    dropout = settings.loras[i][1]  # type: ignore[index]
    return x.mul_(mask).mul_(1 / (1 - dropout) if dropout < 1 else 0.0)


def _mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32: a sum over tokens, whose rounding the optimizer would see."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


def _dense(weight: Tensor, settings: Settings, i: int) -> Tensor:
    state = settings.quant_states[i]
    if state is None:
        return weight.to(settings.dtype)
    from bitsandbytes.functional import dequantize_4bit

    if state.dtype != settings.dtype or not weight.is_cuda:  # on a CPU bitsandbytes takes no buffer
        return dequantize_4bit(weight, state).to(settings.dtype)
    return dequantize_4bit(weight, state, out=settings.workspace.get(state.shape, state.dtype, weight.device))
