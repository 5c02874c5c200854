"""Triton kernels of the LoRA GLU: a gated unit that adds LoRA's updates to gate, up and gradient as it reads them.

A program takes a tile of tokens and columns. It reads gate and up (and the gradient), multiplies the two factors of
each update with the matrix units, and writes the result once. Otherwise each update would cost one more pass over a
``[T, I]`` tensor. The factors of an update are low-rank activations ``low`` and a LoRA factor ``weight``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.glu import activate, activate_and_slope
from fastpack.ops.kernels.launch import early, on_device, rows_that_count, stages_that_fit, wait_for_inputs
from fastpack.ops.kernels.lora import LARGEST_RANK, RESERVED, block_of_ranks, first_factor, second_factor
from fastpack.ops.kinds import ActivationKind

Factors = tuple[Tensor, Tensor] | None
"""An update's factors ``[T, R]`` and ``[R, I]``, with any strides, or None for no update."""


@triton.jit
def _updated(base, pointer, row, column, weight, rows, tokens, rank, BLOCK_R: tl.constexpr):
    """Return ``base + low @ weight`` of one tile, in float32."""
    low = first_factor(pointer, row, column, rows, tokens, rank, BLOCK_R)
    return base + tl.dot(low, weight, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    gate, gate_row, up, up_row, out, out_row,
    gate_low, gate_low_row, gate_low_rank, gate_weight, gate_weight_rank, gate_weight_column, gate_rank,
    up_low, up_low_row, up_low_rank, up_weight, up_weight_rank, up_weight_column, up_rank,
    count, tokens, width,
    KIND: tl.constexpr, HAS_GATE: tl.constexpr, HAS_UP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    real = rows_that_count(count, tokens)
    columns = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    of_gate = second_factor(gate_weight, gate_weight_rank, gate_weight_column, columns, width, gate_rank, BLOCK_R)
    of_up = second_factor(up_weight, up_weight_rank, up_weight_column, columns, width, up_rank, BLOCK_R)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        rows = (tl.program_id(1) * TILES + tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = (rows[:, None] < tokens) & (columns[None, :] < width)
        counts = inside & (rows[:, None] < real)
        at = rows[:, None].to(tl.int64)
        g = tl.load(gate + at * gate_row + columns[None, :], mask=counts, other=0.0).to(tl.float32)
        u = tl.load(up + at * up_row + columns[None, :], mask=counts, other=0.0).to(tl.float32)
        if HAS_GATE:
            g = _updated(g, gate_low, gate_low_row, gate_low_rank, of_gate, rows, real, gate_rank, BLOCK_R)
        if HAS_UP:
            u = _updated(u, up_low, up_low_row, up_low_rank, of_up, rows, real, up_rank, BLOCK_R)
        value = activate(g, KIND)
        tl.store(out + at * out_row + columns[None, :], (value * u).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grad, grad_row, gate, gate_row, up, up_row, dgate, dgate_row, dup, dup_row,
    gate_low, gate_low_row, gate_low_rank, gate_weight, gate_weight_rank, gate_weight_column, gate_rank,
    up_low, up_low_row, up_low_rank, up_weight, up_weight_rank, up_weight_column, up_rank,
    grad_low, grad_low_row, grad_low_rank, grad_weight, grad_weight_rank, grad_weight_column, grad_rank,
    count, tokens, width,
    KIND: tl.constexpr, HAS_GATE: tl.constexpr, HAS_UP: tl.constexpr, HAS_GRAD: tl.constexpr, RECOMPUTE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write both gradients.

    Grid: blocks of columns; programs. These take tiles of tokens in turn, so that they share the real tokens evenly.
    """
    wait_for_inputs(EARLY)
    real = rows_that_count(count, tokens)
    columns = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    of_gate = second_factor(gate_weight, gate_weight_rank, gate_weight_column, columns, width, gate_rank, BLOCK_R)
    of_up = second_factor(up_weight, up_weight_rank, up_weight_column, columns, width, up_rank, BLOCK_R)
    of_grad = second_factor(grad_weight, grad_weight_rank, grad_weight_column, columns, width, grad_rank, BLOCK_R)
    for tile in tl.range(tl.program_id(1), tl.cdiv(tokens, BLOCK_T), tl.num_programs(1), num_stages=STAGES):
        rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = (rows[:, None] < tokens) & (columns[None, :] < width)
        counts = inside & (rows[:, None] < real)
        at = rows[:, None].to(tl.int64)
        g = tl.load(gate + at * gate_row + columns[None, :], mask=counts, other=0.0).to(tl.float32)
        u = tl.load(up + at * up_row + columns[None, :], mask=counts, other=0.0).to(tl.float32)
        d = tl.load(grad + at * grad_row + columns[None, :], mask=counts, other=0.0).to(tl.float32)
        if HAS_GATE:
            g = _updated(g, gate_low, gate_low_row, gate_low_rank, of_gate, rows, real, gate_rank, BLOCK_R)
        if HAS_UP:
            u = _updated(u, up_low, up_low_row, up_low_rank, of_up, rows, real, up_rank, BLOCK_R)
        if HAS_GRAD:
            d = _updated(d, grad_low, grad_low_row, grad_low_rank, of_grad, rows, real, grad_rank, BLOCK_R)
        value, slope = activate_and_slope(g, KIND)
        of_g, of_u = (d * u * slope).to(dgate.dtype.element_ty), (d * value).to(dup.dtype.element_ty)
        tl.store(dgate + at * dgate_row + columns[None, :], of_g, mask=inside)
        tl.store(dup + at * dup_row + columns[None, :], of_u, mask=inside)
        if RECOMPUTE:
            h = (value * u).to(grad.dtype.element_ty)
            tl.store(grad + at * grad_row + columns[None, :], h, mask=inside)


BLOCK_T, BLOCK_I = 16, 128
TILES, MOST_STAGES, WARPS = 8, 3, 4
"""A program walks down ``TILES`` tiles with the second factors in registers, and loads the next tiles ahead."""


def forward(
    gate: Tensor, up: Tensor, kind: ActivationKind, of_gate: Factors, of_up: Factors, rows: Tensor | None = None
) -> Tensor:
    """Return ``activation(gate + of_gate) * (up + of_up)``, ``[T, I]``; gate and up may be halves of one tensor.

    Args:
        gate: ``[T, I]``, rows of stride 1.
        up: as gate.
        kind: the activation.
        of_gate: the factors of gate's update.
        of_up: the factors of up's update.
        rows: int32 ``[1]``, how many of the first rows count; in the others gate and up are taken to be zero.
    """
    tokens, width = gate.shape
    out = torch.empty(tokens, width, dtype=gate.dtype, device=gate.device)
    with on_device(gate):
        if not tokens:
            return out
        _forward_kernel[_grid(tokens, width)](
            gate, gate.stride(0), up, up.stride(0), out, out.stride(0),
            *_arguments(of_gate, gate), *_arguments(of_up, gate), rows, tokens, width,
            KIND=kind, HAS_GATE=of_gate is not None, HAS_UP=of_up is not None,
            BLOCK_T=BLOCK_T, BLOCK_I=BLOCK_I, BLOCK_R=_ranks_of(of_gate, of_up),
            TILES=TILES, STAGES=stages(2, of_gate, of_up), num_warps=WARPS, **early(gate),
        )  # fmt: skip
    return out


def backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    kind: ActivationKind,
    of_gate: Factors,
    of_up: Factors,
    of_grad: Factors,
    out: tuple[Tensor, Tensor],
    recompute: bool,
    rows: Tensor | None = None,
) -> None:
    """Write the gradients of gate and up into ``out``; ``recompute`` writes the forward's result over ``grad``.

    Args:
        grad: the gradient of the result, ``[T, I]``.
        gate: as in :func:`forward`.
        up: as in :func:`forward`.
        kind: the activation.
        of_gate: the factors of gate's update.
        of_up: the factors of up's update.
        of_grad: the factors of the gradient's update.
        out: memory for the gradients of gate and up.
        recompute: whether to write the forward's result over ``grad``.
        rows: as in :func:`forward`; in rows that don't count the gradient is taken to be zero, too.
    """
    tokens, width = gate.shape
    dgate, dup = out
    with on_device(gate):
        if not tokens:
            return
        _backward_kernel[_grid(tokens, width)](
            grad, grad.stride(0), gate, gate.stride(0), up, up.stride(0), dgate, dgate.stride(0), dup, dup.stride(0),
            *_arguments(of_gate, gate), *_arguments(of_up, gate), *_arguments(of_grad, gate),
            rows, tokens, width,
            KIND=kind, HAS_GATE=of_gate is not None, HAS_UP=of_up is not None, HAS_GRAD=of_grad is not None,
            RECOMPUTE=recompute,
            BLOCK_T=BLOCK_T, BLOCK_I=BLOCK_I, BLOCK_R=_ranks_of(of_gate, of_up, of_grad),
            STAGES=stages(3, of_gate, of_up, of_grad), num_warps=WARPS, **early(gate),
        )  # fmt: skip


def stages(tiles: int, *factors: Factors) -> int:
    """Return how many pipeline stages of ``tiles`` tiles fit beside the second factors; 0 if those don't fit."""
    lows = [pair[0] for pair in factors if pair is not None]
    ranks, size = block_of_ranks(lows), lows[0].element_size()
    if ranks > LARGEST_RANK:
        return 0
    resident = len(lows) * ranks * BLOCK_I
    streamed = BLOCK_T * (tiles * BLOCK_I + len(lows) * ranks)
    return stages_that_fit(lows[0].device, MOST_STAGES, RESERVED + resident * size, streamed * size)


def _grid(tokens: int, width: int) -> tuple[int, int]:
    # columns come first: neighbouring programs share tokens, and the second axis is limited to 65,535
    return (triton.cdiv(width, BLOCK_I), triton.cdiv(tokens, BLOCK_T * TILES))


def _ranks_of(*factors: Factors) -> int:
    return block_of_ranks([pair[0] for pair in factors if pair is not None])


def _arguments(factors: Factors, stand_in: Tensor) -> tuple[Any, ...]:
    if factors is None:
        return (stand_in, 0, 0, stand_in, 0, 0, 0)
    low, weight = factors
    return (low, *low.stride(), weight, *weight.stride(), low.shape[1])
