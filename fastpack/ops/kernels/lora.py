"""LoRA's matmuls with a low rank: Triton kernels of :mod:`fastpack.ops.linear.lora`, which holds their definition.

These matmuls do next to no arithmetic. So each large tensor is read or written once, and one launch serves a whole
group of projections. The library's own matmuls take three launches if they split a sum (clear, sum parts, add parts
up), and copy the tensor that they add to first.

Each launcher takes lists with one entry for each projection, and launches three of them at once. ``low`` is a low-rank
activation ``[T, R]``. ``weight`` is the LoRA factor that is multiplied with ``low`` or that makes it. Large tensors
have rows of stride 1; low-rank activations may have any strides. Kernels are never specialised on the number of tokens.

Shape suffixes: T tokens, K input size, O outputs, M input size or outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import (
    MAX_GROUP,
    early,
    on_device,
    processors,
    rows_that_count,
    stages_that_fit,
    threes,
    wait_for_inputs,
)

LARGEST_RANK = 128
"""The sums of a tile with a larger rank don't fit into registers."""

RESERVED = 2048
"""Bytes of shared memory that the compiler may add."""

EXPAND = {"BLOCK_T": 16, "BLOCK_O": 128, "TILES": 8, "num_warps": 4}
"""A program walks down ``TILES`` tiles with the second factor in registers."""
SHRINK = {"BLOCK_T": 16, "BLOCK_K": 128, "num_warps": 2}
REDUCE = {"BLOCK_T": 64, "BLOCK_M": 64, "num_warps": 4}
MOST_STAGES = {"expand": 3, "shrink": 5, "reduce": 5}
"""All of these constants were measured on an H200, at 2,944 and 12,032 tokens."""


# --- parts of kernels -------------------------------------------------------------------------------------------------


@triton.jit
def second_factor(pointer, row, column, columns, width, rank, BLOCK_R: tl.constexpr):
    """Load the columns of a second factor that a program needs, ``[BLOCK_R, columns]``."""
    ranks = tl.arange(0, BLOCK_R)
    return tl.load(
        pointer + ranks[:, None] * row + columns[None, :].to(tl.int64) * column,
        mask=(ranks[:, None] < rank) & (columns[None, :] < width),
        other=0.0,
    )


@triton.jit
def first_factor(pointer, row, column, rows, tokens, rank, BLOCK_R: tl.constexpr):
    """Load rows of a first factor, ``[rows, BLOCK_R]``."""
    ranks = tl.arange(0, BLOCK_R)
    return tl.load(
        pointer + rows[:, None].to(tl.int64) * row + ranks[None, :] * column,
        mask=(rows[:, None] < tokens) & (ranks[None, :] < rank),
        other=0.0,
    )


@triton.jit
def _expand(
    base, base_row, low, low_row, low_rank, weight, weight_rank, weight_column, out, out_row, width, rank, block,
    tokens,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = block * BLOCK_O + tl.arange(0, BLOCK_O)
    factor = second_factor(weight, weight_rank, weight_column, columns, width, rank, BLOCK_R)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        rows = (tl.program_id(1) * TILES + tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = (rows[:, None] < tokens) & (columns[None, :] < width)
        at = rows[:, None].to(tl.int64)
        first = first_factor(low, low_row, low_rank, rows, tokens, rank, BLOCK_R)
        value = tl.dot(first, factor, input_precision="ieee")
        if base is not None:
            value += tl.load(base + at * base_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at * out_row + columns[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _shrink(
    x, x_row, weight, weight_sum, weight_rank, out, out_row, out_rank, scale, K, rank, real, tokens,
    EVEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ranks = tl.arange(0, BLOCK_R)
    summed = tl.arange(0, BLOCK_K)
    exists = rows[:, None] < real
    K = tl.where(tl.program_id(0) * BLOCK_T < real, K, 0)
    ranked = ranks[None, :] < rank
    x += rows[:, None].to(tl.int64) * x_row + summed[None, :]
    weight += summed[:, None].to(tl.int64) * weight_sum + ranks[None, :].to(tl.int64) * weight_rank
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        here, there = exists, ranked
        if not EVEN:
            here, there = here & (start + summed[None, :] < K), there & (start + summed[:, None] < K)
        total = tl.dot(
            tl.load(x, mask=here, other=0.0),
            tl.load(weight, mask=there, other=0.0),
            total,
            input_precision="ieee",
        )
        x += BLOCK_K
        weight += BLOCK_K * weight_sum
    out += rows[:, None].to(tl.int64) * out_row + ranks[None, :] * out_rank
    tl.store(out, (total * scale).to(out.dtype.element_ty), mask=(rows[:, None] < tokens) & ranked)


@triton.jit
def _reduce(
    x, x_row, low, low_row, low_rank, out, out_column, out_rank, width, rank, block, tokens,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = block * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in tl.range(0, tokens, BLOCK_T, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_T)
        tile = tl.load(
            x + rows[:, None].to(tl.int64) * x_row + columns[None, :],
            mask=(rows[:, None] < tokens) & (columns[None, :] < width),
            other=0.0,
        )
        factor = first_factor(low, low_row, low_rank, rows, tokens, rank, BLOCK_R)
        total = tl.dot(tl.trans(tile), factor, total, input_precision="ieee")
    out += columns[:, None].to(tl.int64) * out_column + ranks[None, :].to(tl.int64) * out_rank
    tl.store(out, total.to(out.dtype.element_ty), mask=(columns[:, None] < width) & (ranks[None, :] < rank))


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def _expand_kernel(
    base0, base_row0, low0, row0, rank_step0, weight0, weight_rank0, weight_column0, out0, out_row0, width0, rank0,
    base1, base_row1, low1, row1, rank_step1, weight1, weight_rank1, weight_column1, out1, out_row1, width1, rank1,
    base2, base_row2, low2, row2, rank_step2, weight2, weight_rank2, weight_column2, out2, out_row2, width2, rank2,
    tokens, MEMBERS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Expand up to three projections. Grid: column blocks of the first, then the second and third; spans of tokens."""
    wait_for_inputs(EARLY)
    block = tl.program_id(0)
    blocks0, blocks1 = tl.cdiv(width0, BLOCK_O), tl.cdiv(width1, BLOCK_O)
    if block < blocks0:
        _expand(base0, base_row0, low0, row0, rank_step0, weight0, weight_rank0, weight_column0, out0, out_row0, width0,
                rank0, block, tokens, BLOCK_T, BLOCK_O, BLOCK_R, TILES, STAGES)  # fmt: skip
    elif MEMBERS > 1:
        if block < blocks0 + blocks1:
            _expand(base1, base_row1, low1, row1, rank_step1, weight1, weight_rank1, weight_column1, out1, out_row1,
                    width1, rank1, block - blocks0, tokens, BLOCK_T, BLOCK_O, BLOCK_R, TILES, STAGES)  # fmt: skip
        elif MEMBERS > 2:
            _expand(base2, base_row2, low2, row2, rank_step2, weight2, weight_rank2, weight_column2, out2, out_row2,
                    width2, rank2, block - blocks0 - blocks1, tokens, BLOCK_T, BLOCK_O, BLOCK_R, TILES,
                    STAGES)  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _shrink_kernel(
    x0, x_row0, weight0, weight_sum0, weight_rank0, out0, out_row0, out_rank0, scale0, K0, rank0,
    x1, x_row1, weight1, weight_sum1, weight_rank1, out1, out_row1, out_rank1, scale1, K1, rank1,
    x2, x_row2, weight2, weight_sum2, weight_rank2, out2, out_row2, out_rank2, scale2, K2, rank2,
    count, tokens, MEMBERS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Shrink up to three projections. Grid: blocks of tokens; projections."""
    wait_for_inputs(EARLY)
    real = rows_that_count(count, tokens)
    which = tl.program_id(1)
    if which == 0:
        _shrink(x0, x_row0, weight0, weight_sum0, weight_rank0, out0, out_row0, out_rank0, scale0, K0, rank0, real,
                tokens, EVEN, BLOCK_T, BLOCK_K, BLOCK_R, STAGES)  # fmt: skip
    elif MEMBERS > 1:
        if which == 1:
            _shrink(x1, x_row1, weight1, weight_sum1, weight_rank1, out1, out_row1, out_rank1, scale1, K1, rank1,
                    real, tokens, EVEN, BLOCK_T, BLOCK_K, BLOCK_R, STAGES)  # fmt: skip
        elif MEMBERS > 2:
            _shrink(x2, x_row2, weight2, weight_sum2, weight_rank2, out2, out_row2, out_rank2, scale2, K2, rank2,
                    real, tokens, EVEN, BLOCK_T, BLOCK_K, BLOCK_R, STAGES)  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _reduce_kernel(
    x0, x_row0, low0, low_row0, low_rank0, out0, out_column0, out_rank0, width0, rank0,
    x1, x_row1, low1, low_row1, low_rank1, out1, out_column1, out_rank1, width1, rank1,
    x2, x_row2, low2, low_row2, low_rank2, out2, out_column2, out_rank2, width2, rank2,
    count, tokens, MEMBERS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Reduce up to three projections. Grid: column blocks of the first, then of the second and the third."""
    wait_for_inputs(EARLY)
    tokens = rows_that_count(count, tokens)
    block = tl.program_id(0)
    blocks0, blocks1 = tl.cdiv(width0, BLOCK_M), tl.cdiv(width1, BLOCK_M)
    if block < blocks0:
        _reduce(x0, x_row0, low0, low_row0, low_rank0, out0, out_column0, out_rank0, width0, rank0,
                block, tokens, BLOCK_T, BLOCK_M, BLOCK_R, STAGES)  # fmt: skip
    elif MEMBERS > 1:
        if block < blocks0 + blocks1:
            _reduce(x1, x_row1, low1, low_row1, low_rank1, out1, out_column1, out_rank1, width1, rank1,
                    block - blocks0, tokens, BLOCK_T, BLOCK_M, BLOCK_R, STAGES)  # fmt: skip
        elif MEMBERS > 2:
            _reduce(x2, x_row2, low2, low_row2, low_rank2, out2, out_column2, out_rank2, width2, rank2,
                    block - blocks0 - blocks1, tokens, BLOCK_T, BLOCK_M, BLOCK_R, STAGES)  # fmt: skip


# --- launchers --------------------------------------------------------------------------------------------------------


def serves(kernel: str, xs: Sequence[Tensor], lows: Sequence[Tensor]) -> bool:
    """Return whether a launcher can run over ``xs`` and is likely to be faster than torch.

    The kernel's tiles must fit into shared memory. Its sums are not split, so there must be enough programs to fill the
    device.

    Args:
        kernel: ``expand``, ``shrink`` or ``reduce``.
        xs: the large tensors ``[T, ...]`` that it reads.
        lows: the low-rank activations ``[T, R]``.
    """
    if not stages(kernel, lows):
        return False
    if kernel == "shrink":
        return len(xs) * triton.cdiv(len(xs[0]), SHRINK["BLOCK_T"]) >= processors(xs[0].device)
    if kernel == "reduce":
        return 2 * sum(triton.cdiv(x.shape[1], REDUCE["BLOCK_M"]) for x in xs) >= processors(xs[0].device)
    return True


def expand(
    lows: Sequence[Tensor], weights: Sequence[Tensor], outs: Sequence[Tensor], bases: Sequence[Tensor | None]
) -> None:
    """Write ``low [T, R] @ weight [R, O]`` (``+ base [T, O]``) into each ``out [T, O]``, which may be its base."""
    tokens = len(lows[0])
    entries = [
        (
            base, 0 if base is None else base.stride(0), low, *low.stride(), weight, *weight.stride(), out,
            out.stride(0), out.shape[1], low.shape[1],
        )
        for low, weight, out, base in zip(lows, weights, outs, bases, strict=True)
    ]  # fmt: skip
    spans = triton.cdiv(tokens, EXPAND["BLOCK_T"] * EXPAND["TILES"])
    shared = {"BLOCK_R": block_of_ranks(lows), "STAGES": stages("expand", lows), **EXPAND, **early(lows[0])}
    if tokens:
        with on_device(lows[0]):
            for group, arguments in threes(entries):
                columns = sum(triton.cdiv(out.shape[1], EXPAND["BLOCK_O"]) for out in outs[group])
                _expand_kernel[(columns, spans)](*arguments, tokens, MEMBERS=len(outs[group]), **shared)


def shrink(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    scales: Sequence[float],
    outs: Sequence[Tensor],
    rows: Tensor | None = None,
) -> None:
    """Write ``scale * x [T, K] @ weight [K, R]`` into each ``out [T, R]``; rows that don't count become zeros.

    Args:
        inputs: each x.
        weights: each weight.
        scales: each scale.
        outs: each out.
        rows: int32 ``[1]``, how many rows count; None for all.
    """
    tokens = len(inputs[0])
    entries = [
        (x, x.stride(0), weight, *weight.stride(), out, *out.stride(), scale, x.shape[1], weight.shape[1])
        for x, weight, scale, out in zip(inputs, weights, scales, outs, strict=True)
    ]
    even = all(x.shape[1] % SHRINK["BLOCK_K"] == 0 for x in inputs)
    shared = {"BLOCK_R": block_of_ranks(outs), "STAGES": stages("shrink", outs), **SHRINK, **early(inputs[0])}
    if tokens:
        with on_device(inputs[0]):
            for group, arguments in threes(entries):
                grid = (triton.cdiv(tokens, SHRINK["BLOCK_T"]), len(outs[group]))
                _shrink_kernel[grid](*arguments, rows, tokens, MEMBERS=len(outs[group]), EVEN=even, **shared)


def reduce(
    inputs: Sequence[Tensor], lows: Sequence[Tensor], outs: Sequence[Tensor], rows: Tensor | None = None
) -> None:
    """Write ``x [T, M]^T @ low [T, R]`` into each ``out [M, R]``, which has any strides.

    Only the first ``rows`` (int32 ``[1]``) count; None for all.
    """
    entries = [
        (x, x.stride(0), low, *low.stride(), out, *out.stride(), x.shape[1], low.shape[1])
        for x, low, out in zip(inputs, lows, outs, strict=True)
    ]
    shared = {"BLOCK_R": block_of_ranks(lows), "STAGES": stages("reduce", lows), **REDUCE, **early(inputs[0])}
    with on_device(inputs[0]):
        for group, arguments in threes(entries):
            columns = sum(triton.cdiv(x.shape[1], REDUCE["BLOCK_M"]) for x in inputs[group])
            _reduce_kernel[(columns,)](*arguments, rows, len(inputs[0]), MEMBERS=len(outs[group]), **shared)


def block_of_ranks(lows: Sequence[Tensor]) -> int:
    """Return the block of ranks: the power of two that holds them all, but at least 16 for the matrix units."""
    return max([16, *(triton.next_power_of_2(low.shape[1]) for low in lows)])


def stages(kernel: str, lows: Sequence[Tensor]) -> int:
    """Return the number of pipeline stages, 0 if none fits.

    The compiler gives each projection's branch its own memory.
    """
    ranks, size = block_of_ranks(lows), lows[0].element_size()
    if ranks > LARGEST_RANK:
        return 0
    resident = 2 * ranks * EXPAND["BLOCK_O"] if kernel == "expand" else 0  # the second factor
    streamed = {
        "expand": EXPAND["BLOCK_T"] * (EXPAND["BLOCK_O"] + ranks),
        "shrink": SHRINK["BLOCK_K"] * (SHRINK["BLOCK_T"] + ranks),
        "reduce": REDUCE["BLOCK_T"] * (REDUCE["BLOCK_M"] + ranks),
    }[kernel]
    return stages_that_fit(
        lows[0].device, MOST_STAGES[kernel], RESERVED + resident * size, streamed * size * min(MAX_GROUP, len(lows))
    )
