"""A gated MLP with its norm and its residual, as one autograd Function.

Definition:

    n = norm(x)                                      or x without a norm
    h = activation(gate(n)) * up(n)
    y = down(h)                                      (+ x)

with ``gate``, ``up`` and ``down`` as in :mod:`fastpack.ops.linear.projections`. Tensors that are cheap to compute again
are not saved: the backward computes n and h from x, gate(n) and up(n). Unless the graph is retained, it then overwrites
gate(n) and up(n) with their gradients, so a saved-tensors hook that holds on to them finds gradients there afterwards.

In a long batch gate(n), up(n) and h take more memory than all else in a layer. Where checkpointing computes them again
anyway, they are computed in tiles of tokens: the forward saves x alone, and the backward computes one tile after the
other and adds up the gradients of weights.

Shape suffixes: T tokens, H hidden size, I size inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once, is_last_pass
from fastpack.ops.implementation import Implementation
from fastpack.ops.kinds import ActivationKind
from fastpack.ops.linear.lora_glu import Factors, lora_glu_backward, lora_glu_forward
from fastpack.ops.linear.lora_matmul import expand_forward, factors
from fastpack.ops.linear.operands import Norm, Projection, ProjectionSettings, tensors_of
from fastpack.ops.linear.projections import (
    backward_to_input,
    backward_to_weights,
    group_forward,
    needs_input_again,
    normalise,
    normalise_backward,
    save_weights,
)
from fastpack.ops.row_count import RowCount

_ROWS = 128
"""Tiles have a multiple of so many tokens, as those of matmuls do."""


class ActivationStore(Protocol):
    """A store for gate and up, between a checkpointed forward and the recomputation before its backward."""

    def save(self, outputs: Sequence[Tensor], x: Tensor) -> None:
        """Store the ``outputs`` of the projections of ``x [T, H]``; they must not change before :meth:`load`."""

    def load(self) -> list[Tensor] | None:
        """Return the stored outputs, in memory that the caller may overwrite, or None if they must be computed."""


def gated_mlp(
    x: Tensor,
    inner: Sequence[Projection],
    down: Projection,
    activation: ActivationKind,
    *,
    norm: Norm | None = None,
    residual: bool = False,
    need_output: bool = True,
    store: ActivationStore | None = None,
    tile_bytes: int | None = None,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Compute a gated MLP, with LoRA.

    Args:
        x: ``[T, H]``, in the projections' dtype if ``residual``.
        inner: the projections gate and up, or one projection to both, ``[2 I, H]`` (Phi 3).
        down: the projection back, ``[H, I]``.
        activation: the activation of the gate.
        norm: the norm that is applied to x first, or None.
        residual: add x to the result.
        need_output: False if checkpointing recomputes the MLP only for its backward: the matmul with ``down`` is left
            out, and the result is uninitialised.
        store: a store that may keep gate and up until the recomputation, or None.
        tile_bytes: compute tiles of tokens whose ``[tile, I]`` tensors take so many bytes together, if all tokens take
            more than twice as many. The backward then computes gate and up again. None for no tiles; there are none
            with a store, a row count or dropout either.
        row_count: how many of the T tokens are real; see :func:`fastpack.ops.linear.projections.project`.
        implementation: as for :func:`fastpack.ops.linear.projections.project`.

    Returns:
        ``[T, H]``, in the projections' dtype.

    Example:
        >>> x, dtype = torch.randn(5, 8), torch.float32
        >>> gate, up = (Projection(torch.randn(16, 8), dtype) for _ in range(2))
        >>> gated_mlp(x, [gate, up], Projection(torch.randn(8, 16), dtype), "silu").shape
        torch.Size([5, 8])
    """
    settings = (
        ProjectionSettings.of(inner, implementation, row_count),
        ProjectionSettings.of([down], implementation, row_count),
    )
    weight = None if norm is None else norm.weight
    tensors = (x, weight, *tensors_of([*inner, down]))
    options = (residual, need_output, store)
    rows = len(x)
    if tile_bytes is not None and store is None and row_count is None and not _draws([*inner, down]):
        rows = tile_rows(len(x), down.in_features, down.dtype, tile_bytes)
    if rows < len(x):
        return _TiledGatedMlp.apply(rows, *settings, norm, activation, options, *tensors)
    return _GatedMlp.apply(*settings, norm, activation, options, *tensors)


def _draws(projections: Sequence[Projection]) -> bool:
    """Return whether an update drops elements of its input: a tile that is computed again would drop others."""
    return any(projection.lora is not None and projection.lora.dropout for projection in projections)


def tile_rows(tokens: int, size: int, dtype: torch.dtype, tile_bytes: int) -> int:
    """Return the number of tokens of a tile; all of them if they take at most ``2 * tile_bytes``.

    Args:
        tokens: T.
        size: I.
        dtype: the dtype of ``[T, I]`` tensors.
        tile_bytes: the bytes of these tensors in a tile.
    """
    tiles = math.ceil(tokens * bytes_per_token(size, dtype) / tile_bytes)
    return tokens if tiles <= 2 else _ROWS * math.ceil(tokens / tiles / _ROWS)


def bytes_per_token(size: int, dtype: torch.dtype) -> int:
    """Return the bytes of the ``[T, I]`` tensors that are needed at a time: gate, up, and two gradients."""
    return 4 * size * dtype.itemsize


class _GatedMlp(torch.autograd.Function):
    """The autograd Function of :func:`gated_mlp`."""

    @staticmethod
    def forward(
        ctx: Any,
        inner: ProjectionSettings,
        down: ProjectionSettings,
        norm: Norm | None,
        activation: ActivationKind,
        options: tuple[bool, bool, ActivationStore | None],
        x: Tensor,
        norm_weight: Tensor | None,
        *flat: Tensor | None,
    ) -> Tensor:
        saved: dict[str, Tensor] = {"x": x}
        residual, need_output, store = options
        with torch.autocast(x.device.type, enabled=False):
            n = normalise(x, norm, inner, saved)
            updates = expand_forward(n, inner, flat[:-4], saved, prefix="inner ")
            stored = None if store is None else store.load()
            if stored is None:
                outputs = group_forward(n, inner, flat[:-4], saved, updates={}, prefix="inner ")
                if store is not None:
                    store.save(outputs, n)
            else:
                outputs = stored
                save_weights(inner, flat[:-4], saved, prefix="inner ")
            gate, up = _gate_and_up(outputs)
            h = lora_glu_forward(
                gate,
                up,
                activation,
                *_gate_and_up_updates(updates, len(outputs)),
                row_count=inner.row_count,
                implementation=inner.implementation,
            )
            if need_output:
                (y,) = group_forward(h, down, flat[-4:], saved, residual=x if residual else None, prefix="down ")
            else:
                expand_forward(h, down, flat[-4:], saved, prefix="down ")
                save_weights(down, flat[-4:], saved, prefix="down ")
                y = torch.empty_like(x, dtype=down.dtype)
        saved.update(zip(("output 0", "output 1"), outputs, strict=False))
        ctx.settings, ctx.norm, ctx.activation, ctx.residual = (inner, down), norm, activation, residual
        ctx.names, ctx.x_dtype = tuple(saved), x.dtype
        ctx.save_for_backward(*saved.values())
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        inner, down = ctx.settings
        needs = ctx.needs_input_grad
        needs_inner, needs_down = needs[7:-4], needs[-4:]
        need_x = needs[5] or needs[6]
        need_inner = need_x or any(needs_inner)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained, each tensor is freed after its last use
        outputs = [saved.pop(name) for name in ("output 0", "output 1") if name in saved]
        gate, up = _gate_and_up(outputs)
        with torch.autocast(grad.device.type, enabled=False):
            down_grads = [grad.to(down.dtype)]
            fuses = down.uniform and bool(down.owners)
            dh, low = backward_to_input(
                down_grads, down, saved, need_input=need_inner, updates=not fuses, prefix="down "
            )
            updates = _gate_and_up_updates(factors(inner, saved, prefix="inner "), len(outputs))
            dh_update = (low, saved["down a"]) if fuses and low is not None else None
            h: Tensor | None = None
            inner_grads: list[Tensor] = []
            if dh is not None:
                # a retained graph may read the saved tensors again; otherwise the gradients overwrite them
                inner_grads = outputs if is_last_pass() else [torch.empty_like(tensor) for tensor in outputs]
                h = lora_glu_backward(
                    dh,
                    gate,
                    up,
                    ctx.activation,
                    *updates,
                    dh_update,
                    out=_gate_and_up(inner_grads),
                    recompute=needs_input_again(needs_down),
                    row_count=inner.row_count,
                    implementation=inner.implementation,
                )
            elif needs_input_again(needs_down):
                count = inner.row_count
                h = lora_glu_forward(
                    gate, up, ctx.activation, *updates, row_count=count, implementation=inner.implementation
                )
            del outputs, gate, up
            down_weights = backward_to_weights(down_grads, low, h, down, saved, needs_down, prefix="down ")
            h = dh = None
            if not need_inner:
                return (None,) * 7 + (*[None] * len(needs_inner), *down_weights)
            dn, low = backward_to_input(inner_grads, inner, saved, need_input=need_x, prefix="inner ")
            need_n = needs_input_again(needs_inner)
            residual_grad = grad if ctx.residual else None
            n, dx, dnorm = normalise_backward(dn, ctx.norm, inner, saved, residual_grad, needs[6], need_n=need_n)
            inner_weights = backward_to_weights(inner_grads, low, n, inner, saved, needs_inner, prefix="inner ")
        if dx is not None and dx.dtype != ctx.x_dtype:
            dx = dx.to(ctx.x_dtype)
        return (None,) * 5 + (dx, dnorm, *inner_weights, *down_weights)


class _TiledGatedMlp(torch.autograd.Function):
    """A :class:`_GatedMlp` of each tile of tokens, whose number comes first. Of activations it saves x alone."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: int,
        inner: ProjectionSettings,
        down: ProjectionSettings,
        norm: Norm | None,
        activation: ActivationKind,
        options: tuple[bool, bool, None],
        x: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.rows, ctx.settings, ctx.residual = rows, (inner, down, norm, activation), options[0]
        ctx.save_for_backward(x, *tensors)
        y = torch.empty_like(x, dtype=down.dtype)
        if options[1]:
            for start in range(0, len(x), rows):
                tile = slice(start, start + rows)
                y[tile] = _GatedMlp.apply(*ctx.settings, options, x[tile], *tensors)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *tensors = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[6:]
        # copies, since hooks of the parameters themselves belong to the sums
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(tensors, needs, strict=True)
        ]
        wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        dx = torch.empty_like(x) if needs_x else None
        sums: list[Tensor] = []
        for start in range(0, len(x), ctx.rows):
            tile = slice(start, start + ctx.rows)
            with torch.enable_grad():
                part = x[tile].detach().requires_grad_(needs_x)
                y = _GatedMlp.apply(*ctx.settings, (ctx.residual, False, None), part, *inputs)
            got = list(torch.autograd.grad(y, [part, *wanted] if needs_x else wanted, grad[tile]))
            if dx is not None:
                dx[tile] = got.pop(0)
            sums = got if not sums else [total.add_(more) for total, more in zip(sums, got, strict=True)]
        gradients = iter(sums)
        return (None,) * 6 + (dx, *(next(gradients) if needed else None for needed in needs))


def _gate_and_up(outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return gate and up, from two tensors or the halves of one."""
    if len(outputs) == 2:
        return outputs[0], outputs[1]
    gate, up = outputs[0].chunk(2, -1)
    return gate, up


def _gate_and_up_updates(updates: dict[int, tuple[Tensor, Tensor]], count: int) -> tuple[Factors, Factors]:
    """Return the factors of gate's and of up's update, from the factors of two projections or of one to both."""
    if count == 2:
        return updates.get(0), updates.get(1)
    if not updates:
        return None, None
    low, b = updates[0]
    gate_b, up_b = b.chunk(2, -1)
    return (low, gate_b), (low, up_b)
