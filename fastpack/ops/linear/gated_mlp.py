"""A whole gated MLP, with its norm and its residual, as one autograd Function.

Definition:

    n = norm(x)                                      or x, where no norm is given
    h = activation(gate(n)) * up(n)
    y = down(h)                                      (+ x)

with ``gate``, ``up`` and ``down`` as in :mod:`fastpack.ops.linear.projections`. What is cheap to compute again is not
kept: n and h come back in the backward from x, gate(n) and up(n), whose gradients take their memory unless the graph is
retained: who keeps what a saved-tensors hook was shown will find gradients there afterwards.

Shape suffixes: T tokens, H hidden size, I size inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once, is_last_pass
from fastpack.ops.implementation import Implementation
from fastpack.ops.kinds import ActivationKind
from fastpack.ops.linear.lora_glu import Factors, updated_backward, updated_forward
from fastpack.ops.linear.lora_matmul import expand_forward, factors
from fastpack.ops.linear.parts import Norm, Projection, Settings, tensors_of
from fastpack.ops.linear.projections import (
    backward_to_input,
    backward_to_weights,
    group_forward,
    keep_weights,
    needs_input_again,
    normalise,
    normalise_backward,
)
from fastpack.ops.row_count import RowCount


class Kept(Protocol):
    """Where gate and up may wait between a checkpointed forward and the backward that runs it again."""

    def save(self, made: Sequence[Tensor], x: Tensor) -> None:
        """In the first forward: products of ``x [T, H]``, which nobody changes before :meth:`load`."""

    def load(self) -> list[Tensor] | None:
        """When it runs again: the same products, in memory of the caller's own; None where they have to be made."""


def gated_mlp(
    x: Tensor,
    inner: Sequence[Projection],
    down: Projection,
    activation: ActivationKind,
    *,
    norm: Norm | None = None,
    residual: bool = False,
    need_output: bool = True,
    kept: Kept | None = None,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """``[T, H]`` to ``[T, H]``.

    Args:
        x: ``[T, H]``; in the projections' dtype where it is added as the residual.
        inner: gate and up, or the one projection to both, ``[2 I, H]`` (Phi 3).
        residual: add x to the result.
        need_output: False where checkpointing runs this again for its backward alone: the product with ``down`` is
            left out, and the result holds nothing.
        kept: where gate and up may wait for it meanwhile.
        row_count: how many of the T tokens count; see :func:`fastpack.ops.linear.projections.project`.
    """
    settings = (Settings.of(inner, implementation, row_count), Settings.of([down], implementation, row_count))
    weight = None if norm is None else norm.weight
    return _GatedMlp.apply(
        *settings, norm, activation, (residual, need_output, kept), x, weight,
        *tensors_of([*inner, down]),
    )  # fmt: skip


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inner: Settings,
        down: Settings,
        norm: Norm | None,
        activation: ActivationKind,
        wanted: tuple[bool, bool, Kept | None],
        x: Tensor,
        norm_weight: Tensor | None,
        *flat: Tensor | None,
    ) -> Tensor:
        keep: dict[str, Tensor] = {"x": x}
        residual, need_output, kept = wanted
        with torch.autocast(x.device.type, enabled=False):
            n = normalise(x, norm, inner, keep)
            updates = expand_forward(n, inner, flat[:-4], keep, prefix="inner ")
            found = None if kept is None else kept.load()
            if found is None:
                made = group_forward(n, inner, flat[:-4], keep, updates={}, prefix="inner ")
                if kept is not None:
                    kept.save(made, n)
            else:
                made = found
                keep_weights(inner, flat[:-4], keep, prefix="inner ")
            gate, up = _two(made)
            h = updated_forward(
                gate,
                up,
                activation,
                *_halved(updates, len(made)),
                row_count=inner.row_count,
                implementation=inner.implementation,
            )
            if need_output:
                (y,) = group_forward(h, down, flat[-4:], keep, residual=x if residual else None, prefix="down ")
            else:
                expand_forward(h, down, flat[-4:], keep, prefix="down ")
                keep_weights(down, flat[-4:], keep, prefix="down ")
                y = torch.empty_like(x, dtype=down.dtype)
        keep.update(zip(("made0", "made1"), made, strict=False))
        ctx.settings, ctx.norm, ctx.activation, ctx.residual = (inner, down), norm, activation, residual
        ctx.names, ctx.x_dtype = tuple(keep), x.dtype
        ctx.save_for_backward(*keep.values())
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        kept = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        inner, down = ctx.settings
        needs = ctx.needs_input_grad
        needs_inner, needs_down = needs[7:-4], needs[-4:]
        need_x = needs[5] or needs[6]
        need_inside = need_x or any(needs_inner)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: what is read last goes first
        made = [kept.pop(name) for name in ("made0", "made1") if name in kept]
        gate, up = _two(made)
        with torch.autocast(grad.device.type, enabled=False):
            of_down = [grad.to(down.dtype)]
            fuses = down.uniform and bool(down.owners)
            dh, low = backward_to_input(of_down, down, kept, need_input=need_inside, updates=not fuses, prefix="down ")
            updates = _halved(factors(inner, kept, prefix="inner "), len(made))
            of_h = (low, kept["down a"]) if fuses and low is not None else None
            h: Tensor | None = None
            inside: list[Tensor] = []
            if dh is not None:
                # a retained graph may come back for what was saved; otherwise the gradients take its place
                inside = made if is_last_pass() else [torch.empty_like(tensor) for tensor in made]
                h = updated_backward(
                    dh,
                    gate,
                    up,
                    ctx.activation,
                    *updates,
                    of_h,
                    out=_two(inside),
                    recompute=needs_input_again(needs_down),
                    row_count=inner.row_count,
                    implementation=inner.implementation,
                )
            elif needs_input_again(needs_down):
                count = inner.row_count
                h = updated_forward(
                    gate, up, ctx.activation, *updates, row_count=count, implementation=inner.implementation
                )
            del made, gate, up
            down_weights = backward_to_weights(of_down, low, h, down, kept, needs_down, prefix="down ")
            h = dh = None
            if not need_inside:
                return (None,) * 7 + (*[None] * len(needs_inner), *down_weights)
            dn, low = backward_to_input(inside, inner, kept, need_input=need_x, prefix="inner ")
            again = needs_input_again(needs_inner)
            passed_on = grad if ctx.residual else None
            n, dx, dnorm = normalise_backward(dn, ctx.norm, inner, kept, passed_on, needs[6], again=again)
            inner_weights = backward_to_weights(inside, low, n, inner, kept, needs_inner, prefix="inner ")
        if dx is not None and dx.dtype != ctx.x_dtype:
            dx = dx.to(ctx.x_dtype)
        return (None,) * 5 + (dx, dnorm, *inner_weights, *down_weights)


def _two(made: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """gate and up, from two tensors or the halves of one."""
    if len(made) == 2:
        return made[0], made[1]
    gate, up = made[0].chunk(2, -1)
    return gate, up


def _halved(updates: dict[int, tuple[Tensor, Tensor]], count: int) -> tuple[Factors, Factors]:
    """The updates of gate and up, from those of two projections or of the one to both."""
    if count == 2:
        return updates.get(0), updates.get(1)
    if not updates:
        return None, None
    thin, wide = updates[0]
    gate, up = wide.chunk(2, -1)
    return (thin, gate), (thin, up)
