"""Products with a thin factor, LoRA's: Triton kernels of :mod:`fastpack.ops.linear.lora`, which holds their definition.

They do next to no arithmetic, so what counts is that each large tensor is read or written once, and that one launch
does it for a whole group of projections. The library's own products take three launches where they split a sum
(clearing, summing parts, adding them up), and copy a tensor first that they are to add to.

Each launcher takes lists, one entry for each projection, and three of them a launch. Large tensors have rows of stride
1; thin ones any strides. The number of tokens is never specialised on.

Shape suffixes: T tokens, K summed over, O outputs, M either of both, R rank.
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
"""Above it the sums of a tile no longer fit into registers."""

RESERVED = 2048
"""Bytes of shared memory for what a compiler adds of its own."""

EXPAND = {"BLOCK_T": 16, "BLOCK_O": 128, "TILES": 8, "num_warps": 4}
"""A program walks down so many tiles with the second factor in registers."""
SHRINK = {"BLOCK_T": 16, "BLOCK_K": 128, "num_warps": 2}
REDUCE = {"BLOCK_T": 64, "BLOCK_M": 64, "num_warps": 4}
MOST_STAGES = {"expand": 3, "shrink": 5, "reduce": 5}
"""All measured on an H200, at 2,944 and 12,032 tokens."""


# --- parts of kernels -------------------------------------------------------------------------------------------------


@triton.jit
def second_factor(pointer, row, column, columns, width, rank, BLOCK_R: tl.constexpr):
    """The columns of a second factor that a program needs, ``[BLOCK_R, columns]``."""
    ranks = tl.arange(0, BLOCK_R)
    return tl.load(
        pointer + ranks[:, None] * row + columns[None, :].to(tl.int64) * column,
        mask=(ranks[:, None] < rank) & (columns[None, :] < width),
        other=0.0,
    )


@triton.jit
def first_factor(pointer, row, column, rows, tokens, rank, BLOCK_R: tl.constexpr):
    """The rows of a first factor, ``[rows, BLOCK_R]``."""
    ranks = tl.arange(0, BLOCK_R)
    return tl.load(
        pointer + rows[:, None].to(tl.int64) * row + ranks[None, :] * column,
        mask=(rows[:, None] < tokens) & (ranks[None, :] < rank),
        other=0.0,
    )


@triton.jit
def _expand(
    base, base_row, thin, thin_row, thin_rank, wide, wide_rank, wide_column, out, out_row, width, rank, block, tokens,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = block * BLOCK_O + tl.arange(0, BLOCK_O)
    factor = second_factor(wide, wide_rank, wide_column, columns, width, rank, BLOCK_R)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        rows = (tl.program_id(1) * TILES + tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = (rows[:, None] < tokens) & (columns[None, :] < width)
        at = rows[:, None].to(tl.int64)
        first = first_factor(thin, thin_row, thin_rank, rows, tokens, rank, BLOCK_R)
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
    x, x_row, thin, thin_row, thin_rank, out, out_column, out_rank, width, rank, block, tokens,
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
        factor = first_factor(thin, thin_row, thin_rank, rows, tokens, rank, BLOCK_R)
        total = tl.dot(tl.trans(tile), factor, total, input_precision="ieee")
    out += columns[:, None].to(tl.int64) * out_column + ranks[None, :].to(tl.int64) * out_rank
    tl.store(out, total.to(out.dtype.element_ty), mask=(columns[:, None] < width) & (ranks[None, :] < rank))


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def _expand_kernel(
    base0, base_row0, thin0, row0, rank_step0, wide0, wide_rank0, wide_column0, out0, out_row0, width0, rank0,
    base1, base_row1, thin1, row1, rank_step1, wide1, wide_rank1, wide_column1, out1, out_row1, width1, rank1,
    base2, base_row2, thin2, row2, rank_step2, wide2, wide_rank2, wide_column2, out2, out_row2, width2, rank2,
    tokens, MEMBERS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: column blocks of the first, the second, the third; spans of tokens."""
    wait_for_inputs(EARLY)
    block = tl.program_id(0)
    blocks0, blocks1 = tl.cdiv(width0, BLOCK_O), tl.cdiv(width1, BLOCK_O)
    if block < blocks0:
        _expand(base0, base_row0, thin0, row0, rank_step0, wide0, wide_rank0, wide_column0, out0, out_row0, width0,
                rank0, block, tokens, BLOCK_T, BLOCK_O, BLOCK_R, TILES, STAGES)  # fmt: skip
    elif MEMBERS > 1:
        if block < blocks0 + blocks1:
            _expand(base1, base_row1, thin1, row1, rank_step1, wide1, wide_rank1, wide_column1, out1, out_row1, width1,
                    rank1, block - blocks0, tokens, BLOCK_T, BLOCK_O, BLOCK_R, TILES, STAGES)  # fmt: skip
        elif MEMBERS > 2:
            _expand(base2, base_row2, thin2, row2, rank_step2, wide2, wide_rank2, wide_column2, out2, out_row2, width2,
                    rank2, block - blocks0 - blocks1, tokens, BLOCK_T, BLOCK_O, BLOCK_R, TILES,
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
    """Grid: blocks of tokens; which."""
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
    x0, x_row0, thin0, thin_row0, thin_rank0, out0, out_column0, out_rank0, width0, rank0,
    x1, x_row1, thin1, thin_row1, thin_rank1, out1, out_column1, out_rank1, width1, rank1,
    x2, x_row2, thin2, thin_row2, thin_rank2, out2, out_column2, out_rank2, width2, rank2,
    count, tokens, MEMBERS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: column blocks of the first, the second, the third."""
    wait_for_inputs(EARLY)
    tokens = rows_that_count(count, tokens)
    block = tl.program_id(0)
    blocks0, blocks1 = tl.cdiv(width0, BLOCK_M), tl.cdiv(width1, BLOCK_M)
    if block < blocks0:
        _reduce(x0, x_row0, thin0, thin_row0, thin_rank0, out0, out_column0, out_rank0, width0, rank0,
                block, tokens, BLOCK_T, BLOCK_M, BLOCK_R, STAGES)  # fmt: skip
    elif MEMBERS > 1:
        if block < blocks0 + blocks1:
            _reduce(x1, x_row1, thin1, thin_row1, thin_rank1, out1, out_column1, out_rank1, width1, rank1,
                    block - blocks0, tokens, BLOCK_T, BLOCK_M, BLOCK_R, STAGES)  # fmt: skip
        elif MEMBERS > 2:
            _reduce(x2, x_row2, thin2, thin_row2, thin_rank2, out2, out_column2, out_rank2, width2, rank2,
                    block - blocks0 - blocks1, tokens, BLOCK_T, BLOCK_M, BLOCK_R, STAGES)  # fmt: skip


# --- launchers --------------------------------------------------------------------------------------------------------


def serves(kernel: str, xs: Sequence[Tensor], thins: Sequence[Tensor]) -> bool:
    """Whether a launcher can run over ``xs`` and is likely to gain by it.

    It has to have room for its tiles, and a sum that is not split needs enough programs to keep the device busy.

    Args:
        kernel: ``expand``, ``shrink`` or ``reduce``.
        xs: the large tensors ``[T, ...]`` that are read.
        thins: the thin ones ``[T, R]``.
    """
    if not stages(kernel, thins):
        return False
    if kernel == "shrink":
        return len(xs) * triton.cdiv(len(xs[0]), SHRINK["BLOCK_T"]) >= processors(xs[0].device)
    if kernel == "reduce":
        return 2 * sum(triton.cdiv(x.shape[1], REDUCE["BLOCK_M"]) for x in xs) >= processors(xs[0].device)
    return True


def expand(
    thins: Sequence[Tensor], wides: Sequence[Tensor], outs: Sequence[Tensor], bases: Sequence[Tensor | None]
) -> None:
    """``thin [T, R] @ wide [R, O]`` (``+ base [T, O]``) into each ``out [T, O]``, which may be its base."""
    tokens = len(thins[0])
    given = [
        (
            base, 0 if base is None else base.stride(0), thin, *thin.stride(), wide, *wide.stride(), out, out.stride(0),
            out.shape[1], thin.shape[1],
        )
        for thin, wide, out, base in zip(thins, wides, outs, bases, strict=True)
    ]  # fmt: skip
    spans = triton.cdiv(tokens, EXPAND["BLOCK_T"] * EXPAND["TILES"])
    shared = {"BLOCK_R": block_of_ranks(thins), "STAGES": stages("expand", thins), **EXPAND, **early(thins[0])}
    if tokens:
        with on_device(thins[0]):
            for some, arguments in threes(given):
                columns = sum(triton.cdiv(out.shape[1], EXPAND["BLOCK_O"]) for out in outs[some])
                _expand_kernel[(columns, spans)](*arguments, tokens, MEMBERS=len(outs[some]), **shared)


def shrink(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    scales: Sequence[float],
    outs: Sequence[Tensor],
    rows: Tensor | None = None,
) -> None:
    """``scale * x [T, K] @ weight [K, R]`` into each ``out [T, R]``; zeros where rows don't count.

    Args:
        rows: int32 ``[1]``, how many rows count; None for all.
    """
    tokens = len(inputs[0])
    given = [
        (x, x.stride(0), weight, *weight.stride(), out, *out.stride(), scale, x.shape[1], weight.shape[1])
        for x, weight, scale, out in zip(inputs, weights, scales, outs, strict=True)
    ]
    even = all(x.shape[1] % SHRINK["BLOCK_K"] == 0 for x in inputs)
    shared = {"BLOCK_R": block_of_ranks(outs), "STAGES": stages("shrink", outs), **SHRINK, **early(inputs[0])}
    if tokens:
        with on_device(inputs[0]):
            for some, arguments in threes(given):
                grid = (triton.cdiv(tokens, SHRINK["BLOCK_T"]), len(outs[some]))
                _shrink_kernel[grid](*arguments, rows, tokens, MEMBERS=len(outs[some]), EVEN=even, **shared)


def reduce(
    inputs: Sequence[Tensor], thins: Sequence[Tensor], outs: Sequence[Tensor], rows: Tensor | None = None
) -> None:
    """``x [T, M]^T @ thin [T, R]`` over the rows that count (all without ``rows``) into each ``out [M, R]``, of any
    strides."""
    given = [
        (x, x.stride(0), thin, *thin.stride(), out, *out.stride(), x.shape[1], thin.shape[1])
        for x, thin, out in zip(inputs, thins, outs, strict=True)
    ]
    shared = {"BLOCK_R": block_of_ranks(thins), "STAGES": stages("reduce", thins), **REDUCE, **early(inputs[0])}
    with on_device(inputs[0]):
        for some, arguments in threes(given):
            columns = sum(triton.cdiv(x.shape[1], REDUCE["BLOCK_M"]) for x in inputs[some])
            _reduce_kernel[(columns,)](*arguments, rows, len(inputs[0]), MEMBERS=len(outs[some]), **shared)


def block_of_ranks(thins: Sequence[Tensor]) -> int:
    """What the matrix units take at least, or the power of two that holds them all."""
    return max([16, *(triton.next_power_of_2(thin.shape[1]) for thin in thins)])


def stages(kernel: str, thins: Sequence[Tensor]) -> int:
    """How many tiles may be on their way, 0 for none; compilers give each projection's branch memory of its own."""
    ranks, size = block_of_ranks(thins), thins[0].element_size()
    if ranks > LARGEST_RANK:
        return 0
    held = 2 * ranks * EXPAND["BLOCK_O"] if kernel == "expand" else 0  # the second factor, on its way to registers
    streamed = {
        "expand": EXPAND["BLOCK_T"] * (EXPAND["BLOCK_O"] + ranks),
        "shrink": SHRINK["BLOCK_K"] * (SHRINK["BLOCK_T"] + ranks),
        "reduce": REDUCE["BLOCK_T"] * (REDUCE["BLOCK_M"] + ranks),
    }[kernel]
    return stages_that_fit(
        thins[0].device, MOST_STAGES[kernel], RESERVED + held * size, streamed * size * min(MAX_GROUP, len(thins))
    )
