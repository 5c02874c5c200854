"""Gated units whose gate, up and gradient have a low-rank update each, added on the way: Triton kernels.

One program takes a tile of tokens and columns: it reads gate and up (and the gradient), multiplies the two thin
factors of each update with the matrix units, and writes the result once. Without this, each update costs a pass over
a ``[T, I]`` tensor of its own. In the backward it may sum over tokens what the updates' second factors get for
gradients, while it has at hand what they are made of; that would be another pass each.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.glu import ActivationKind
from fastpack.ops.kernels.glu import activate, activate_and_slope
from fastpack.ops.kernels.launch import (
    capability,
    early,
    on_device,
    processors,
    rows_that_count,
    stages_that_fit,
    wait_for_inputs,
)
from fastpack.ops.kernels.thin import LARGEST_RANK, RESERVED, block_of_ranks, first_factor, second_factor

Factors = tuple[Tensor, Tensor] | None
"""``[T, R]`` and ``[R, I]``, in any strides, or None for no update."""


@triton.jit
def _updated(base, pointer, row, column, wide, rows, tokens, rank, BLOCK_R: tl.constexpr):
    """``base + thin @ wide`` of one tile, in float32; and the first factor."""
    thin = first_factor(pointer, row, column, rows, tokens, rank, BLOCK_R)
    return base + tl.dot(thin, wide, input_precision="ieee"), thin


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    gate, gate_row, up, up_row, out, out_row,
    gate_thin, gate_thin_row, gate_thin_rank, gate_wide, gate_wide_rank, gate_wide_column, gate_rank,
    up_thin, up_thin_row, up_thin_rank, up_wide, up_wide_rank, up_wide_column, up_rank,
    count, tokens, width,
    KIND: tl.constexpr, HAS_GATE: tl.constexpr, HAS_UP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    real = rows_that_count(count, tokens)
    columns = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    of_gate = second_factor(gate_wide, gate_wide_rank, gate_wide_column, columns, width, gate_rank, BLOCK_R)
    of_up = second_factor(up_wide, up_wide_rank, up_wide_column, columns, width, up_rank, BLOCK_R)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        rows = (tl.program_id(1) * TILES + tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = (rows[:, None] < tokens) & (columns[None, :] < width)
        counts = inside & (rows[:, None] < real)
        at = rows[:, None].to(tl.int64)
        g = tl.load(gate + at * gate_row + columns[None, :], mask=counts, other=0.0).to(tl.float32)
        u = tl.load(up + at * up_row + columns[None, :], mask=counts, other=0.0).to(tl.float32)
        if HAS_GATE:
            g, _ = _updated(g, gate_thin, gate_thin_row, gate_thin_rank, of_gate, rows, real, gate_rank, BLOCK_R)
        if HAS_UP:
            u, _ = _updated(u, up_thin, up_thin_row, up_thin_rank, of_up, rows, real, up_rank, BLOCK_R)
        value = activate(g, KIND)
        tl.store(out + at * out_row + columns[None, :], (value * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_sum(sums, total, columns, width, column, step, rank, BLOCK_R: tl.constexpr):
    """Of one update, ``[BLOCK_I, BLOCK_R]``."""
    ranks = tl.arange(0, BLOCK_R)
    at = sums + columns[:, None].to(tl.int64) * column + ranks[None, :].to(tl.int64) * step
    tl.store(at, total, mask=(columns[:, None] < width) & (ranks[None, :] < rank))


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grad, grad_row, gate, gate_row, up, up_row, dgate, dgate_row, dup, dup_row,
    gate_thin, gate_thin_row, gate_thin_rank, gate_wide, gate_wide_rank, gate_wide_column, gate_rank,
    up_thin, up_thin_row, up_thin_rank, up_wide, up_wide_rank, up_wide_column, up_rank,
    grad_thin, grad_thin_row, grad_thin_rank, grad_wide, grad_wide_rank, grad_wide_column, grad_rank,
    sums, count, tokens, width,
    KIND: tl.constexpr, HAS_GATE: tl.constexpr, HAS_UP: tl.constexpr, HAS_GRAD: tl.constexpr, RECOMPUTE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of columns; spans, which take turns at tiles of tokens, so that all have as many that count."""
    wait_for_inputs(EARLY)
    real = rows_that_count(count, tokens)
    columns = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    of_gate = second_factor(gate_wide, gate_wide_rank, gate_wide_column, columns, width, gate_rank, BLOCK_R)
    of_up = second_factor(up_wide, up_wide_rank, up_wide_column, columns, width, up_rank, BLOCK_R)
    of_grad = second_factor(grad_wide, grad_wide_rank, grad_wide_column, columns, width, grad_rank, BLOCK_R)
    gate_sum = tl.zeros([BLOCK_I, BLOCK_R], tl.float32)
    up_sum = tl.zeros([BLOCK_I, BLOCK_R], tl.float32)
    grad_sum = tl.zeros([BLOCK_I, BLOCK_R], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(tokens, BLOCK_T), tl.num_programs(1), num_stages=STAGES):
        rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = (rows[:, None] < tokens) & (columns[None, :] < width)
        counts = inside & (rows[:, None] < real)
        at = rows[:, None].to(tl.int64)
        g = tl.load(gate + at * gate_row + columns[None, :], mask=counts, other=0.0).to(tl.float32)
        u = tl.load(up + at * up_row + columns[None, :], mask=counts, other=0.0).to(tl.float32)
        d = tl.load(grad + at * grad_row + columns[None, :], mask=counts, other=0.0).to(tl.float32)
        if HAS_GATE:
            g, thin_g = _updated(g, gate_thin, gate_thin_row, gate_thin_rank, of_gate, rows, real, gate_rank, BLOCK_R)
        if HAS_UP:
            u, thin_u = _updated(u, up_thin, up_thin_row, up_thin_rank, of_up, rows, real, up_rank, BLOCK_R)
        if HAS_GRAD:
            d, thin_d = _updated(d, grad_thin, grad_thin_row, grad_thin_rank, of_grad, rows, real, grad_rank, BLOCK_R)
        value, slope = activate_and_slope(g, KIND)
        of_g, of_u = (d * u * slope).to(dgate.dtype.element_ty), (d * value).to(dup.dtype.element_ty)
        h = (value * u).to(grad.dtype.element_ty)
        tl.store(dgate + at * dgate_row + columns[None, :], of_g, mask=inside)
        tl.store(dup + at * dup_row + columns[None, :], of_u, mask=inside)
        if RECOMPUTE:
            tl.store(grad + at * grad_row + columns[None, :], h, mask=inside)
        if sums is not None:
            gate_sum = tl.dot(tl.trans(of_g), thin_g, gate_sum, input_precision="ieee")
            up_sum = tl.dot(tl.trans(of_u), thin_u, up_sum, input_precision="ieee")
            grad_sum = tl.dot(tl.trans(h), thin_d, grad_sum, input_precision="ieee")
    if sums is not None:
        sums += tl.program_id(1).to(tl.int64) * (width * (gate_rank + up_rank + grad_rank))
        _store_sum(sums, gate_sum, columns, width, gate_rank, 1, gate_rank, BLOCK_R)
        sums += width * gate_rank
        _store_sum(sums, up_sum, columns, width, up_rank, 1, up_rank, BLOCK_R)
        sums += width * up_rank
        _store_sum(sums, grad_sum, columns, width, 1, width, grad_rank, BLOCK_R)


BLOCK_T, BLOCK_I = 16, 128
TILES, MOST_STAGES, WARPS = 8, 3, 4
"""A program walks down ``TILES`` tiles with the second factors in registers, the next tiles already on their way."""
SUMMING: dict[int, tuple[int, int]] = {16: (3, 168), 32: (2, 248)}
"""Where programs hold sums over tokens: how many of them a multiprocessor has room for, and the registers that a thread
may take for it, by the block of ranks. Above these the sums no longer fit; nor do they before Hopper, whose matrix
units alone leave the tile's layout as it is. Measured on an H200, at ranks 8, 16 and 32."""


def forward(
    gate: Tensor, up: Tensor, kind: ActivationKind, of_gate: Factors, of_up: Factors, rows: Tensor | None = None
) -> Tensor:
    """``activation(gate + of_gate) * (up + of_up)``, ``[T, I]``; gate and up may be halves of one tensor.

    Args:
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
    parts: Tensor | None = None,
) -> None:
    """Gradients of gate and up into ``out``; with ``recompute`` the forward's result over ``grad``.

    Args:
        rows: as of :func:`forward`; there the gradient is taken to be zero too.
        parts: what :func:`make_parts` made: in each row a part of the sums over tokens that
            :func:`fastpack.ops.updated_glu.updated_backward` gives.
    """
    tokens, width = gate.shape
    dgate, dup = out
    blocks, spans = _grid(tokens, width)
    ranks = _ranks_of(of_gate, of_up, of_grad)
    with on_device(gate):
        if not tokens:
            return
        _backward_kernel[(blocks, spans if parts is None else len(parts))](
            grad, grad.stride(0), gate, gate.stride(0), up, up.stride(0), dgate, dgate.stride(0), dup, dup.stride(0),
            *_arguments(of_gate, gate), *_arguments(of_up, gate), *_arguments(of_grad, gate),
            parts, rows, tokens, width,
            KIND=kind, HAS_GATE=of_gate is not None, HAS_UP=of_up is not None, HAS_GRAD=of_grad is not None,
            RECOMPUTE=recompute,
            BLOCK_T=BLOCK_T, BLOCK_I=BLOCK_I, BLOCK_R=ranks, STAGES=stages(3, of_gate, of_up, of_grad),
            num_warps=WARPS, maxnreg=None if parts is None else SUMMING[ranks][1], **early(gate),
        )  # fmt: skip


def sums(gate: Tensor, *factors: Factors) -> bool:
    """Whether :func:`backward` can sum over tokens, and gains by it: with all updates, of small rank, on Hopper."""
    thins = [pair[0] for pair in factors if pair is not None]
    if len(thins) < len(factors) or block_of_ranks(thins) not in SUMMING:
        return False
    return not gate.is_cuda or (gate.element_size() == 2 and capability(gate.device)[0] == 9)


def make_parts(gate: Tensor, *factors: Factors) -> Tensor:
    """float32 ``[spans, I * (sum of R)]``, a row for each program that walks down the same columns."""
    tokens, width = gate.shape
    ranks = sum(pair[0].shape[1] for pair in factors if pair is not None)
    at_once = SUMMING[_ranks_of(*factors)][0] * processors(gate.device)
    spans = spans_of_sums(tokens, triton.cdiv(width, BLOCK_I), ranks, at_once)
    return torch.empty(spans, width * ranks, dtype=torch.float32, device=gate.device)


@functools.lru_cache(maxsize=1024)
def spans_of_sums(tokens: int, blocks: int, ranks: int, at_once: int) -> int:
    """How many programs share a block of columns.

    A round of programs that is not full takes as long as a full one; and each span more writes and reads a part of the
    sums, 8 bytes for each rank, beside the 10 of a token.

    Args:
        blocks: of columns.
        ranks: of all updates together.
        at_once: how many programs run at once.
    """

    def cost(spans: int) -> float:
        rounds = triton.cdiv(blocks * spans, at_once)
        return rounds * at_once / (blocks * spans) + 0.8 * ranks * spans / tokens

    most = min(triton.cdiv(tokens, BLOCK_T), max(8, 2 * at_once // blocks))
    return min(range(1, most + 1), key=cost)


def stages(tiles: int, *factors: Factors) -> int:
    """How many sets of so many tiles may be on their way beside the second factors; 0 where those don't fit."""
    thins = [pair[0] for pair in factors if pair is not None]
    ranks, size = block_of_ranks(thins), thins[0].element_size()
    if ranks > LARGEST_RANK:
        return 0
    held = len(thins) * ranks * BLOCK_I
    streamed = BLOCK_T * (tiles * BLOCK_I + len(thins) * ranks)
    return stages_that_fit(thins[0].device, MOST_STAGES, RESERVED + held * size, streamed * size)


def _grid(tokens: int, width: int) -> tuple[int, int]:
    # neighbouring programs take neighbouring columns of the same tokens: the second axis may not pass 65,535
    return (triton.cdiv(width, BLOCK_I), triton.cdiv(tokens, BLOCK_T * TILES))


def _ranks_of(*factors: Factors) -> int:
    return block_of_ranks([pair[0] for pair in factors if pair is not None])


def _arguments(factors: Factors, stand_in: Tensor) -> tuple[Any, ...]:
    if factors is None:
        return (stand_in, 0, 0, stand_in, 0, 0, 0)
    thin, wide = factors
    return (thin, *thin.stride(), wide, *wide.stride(), thin.shape[1])
