"""Kernels of routing: a counting sort, and the two passes between tokens and the rows of their experts.

The sort takes three launches. The first counts each block's slots by expert, the second sums the counts up, the third
gives each slot its row and lists the tiles of the grouped matmuls. It is stable, and nothing waits for the device.

Shape suffixes: T tokens, K choices of a token, E experts, R rows, H size of a vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs

TILE_ROWS = 128
"""The rows of a tile of a grouped matmul."""
ENTRIES = 2**14
"""The entries of a table by experts that a program of the sort holds at once."""
CHUNKS = 8
"""The number of such tables of slots that one program sorts."""
BLOCK_H = 1024
"""The elements of a vector that a program moves at once."""


@triton.jit
def _chosen(index, at, count, choices, slots, experts):
    """Return the expert of each slot; those of no expert, and slots that don't exist, get number ``experts``."""
    if count is not None:
        slots = tl.minimum(slots, tl.load(count) * choices)
    chosen = tl.load(index + at, mask=at < slots, other=experts).to(tl.int32)
    return tl.where((chosen >= 0) & (chosen < experts), chosen, experts)


@triton.jit(do_not_specialize=["slots"])
def _count_kernel(
    index, counts, count, choices, slots, experts, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for chunk in range(CHUNKS):
        at = (tl.program_id(0) * CHUNKS + chunk) * BLOCK + tl.arange(0, BLOCK)
        chosen = _chosen(index, at, count, choices, slots, experts)
        total += tl.sum((chosen[:, None] == columns[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * COLUMNS + columns, total)


@triton.jit(do_not_specialize=["blocks"])
def _scan_kernel(
    counts, starts, offsets, tile_starts, tile_count, blocks, experts, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Replace each block's counts by the sums over the blocks before it, and find where each expert's rows begin."""
    wait_for_inputs(EARLY)
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, blocks, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        places = counts + rows[:, None] * COLUMNS + columns[None, :]
        own = tl.load(places, mask=rows[:, None] < blocks, other=0)
        tl.store(places, tl.cumsum(own, 0) - own + total[None, :], mask=rows[:, None] < blocks)
        total += tl.sum(own, 0)
    ends = tl.cumsum(total, 0)
    tl.store(starts + columns, ends - total)
    real = columns < experts
    tl.store(offsets + columns, ends, mask=real)
    tiles = tl.where(real, tl.cdiv(total, ROWS), 0)
    tl.store(tile_starts + columns, tl.cumsum(tiles, 0) - tiles)
    tl.store(tile_count, tl.sum(tiles, 0))


@triton.jit(do_not_specialize=["slots", "blocks"])
def _place_kernel(
    index, counts, starts, offsets, tile_starts, order, rows, tiles, count, choices, slots, blocks, experts,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the rows of a block's slots; the programs after the last block write the tiles of one expert each."""
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    if program < blocks:
        columns = tl.arange(0, COLUMNS)
        before = tl.load(counts + program * COLUMNS + columns) + tl.load(starts + columns)
        for chunk in range(CHUNKS):
            at = (program * CHUNKS + chunk) * BLOCK + tl.arange(0, BLOCK)
            chosen = _chosen(index, at, count, choices, slots, experts)
            one_hot = (chosen[:, None] == columns[None, :]).to(tl.int32)
            row = tl.sum(one_hot * (tl.cumsum(one_hot, 0) - 1 + before[None, :]), 1)
            tl.store(order + row, at, mask=at < slots)
            tl.store(rows + at, row, mask=at < slots)
            before += tl.sum(one_hot, 0)
    else:
        expert = program - blocks
        first = tl.load(starts + expert)
        number = tl.cdiv(tl.load(offsets + expert) - first, ROWS)
        tiles += tl.load(tile_starts + expert) * 2
        for start in range(0, number, 64):
            tile = start + tl.arange(0, 64)
            exists = tile < number
            tl.store(tiles + tile * 2, tl.zeros((64,), tl.int32) + expert, mask=exists)
            tl.store(tiles + tile * 2 + 1, first + tile * ROWS, mask=exists)


def route(index: Tensor, experts: int, count: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return order, offsets, tiles, tile_count and rows of :class:`fastpack.ops.expert_operands.Routing`.

    Args:
        index: ``[T, K]``.
        experts: E.
        count: int32 ``[1]``, the number of real tokens, or None for all.
    """
    slots, device, choices = index.numel(), index.device, index.shape[1]
    columns = triton.next_power_of_2(experts + 1)
    block = max(16, ENTRIES // columns)
    blocks = triton.cdiv(slots, block * CHUNKS)

    def integers(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    counts, starts, tile_starts = integers(blocks * columns), integers(columns), integers(columns)
    order, rows, offsets, tile_count = integers(slots), integers(slots), integers(experts), integers(1)
    tiles = torch.empty(triton.cdiv(slots, TILE_ROWS) + min(experts, slots), 2, dtype=torch.int32, device=device)
    index = index.contiguous()
    shared = {"COLUMNS": columns, "num_warps": 8, **early(index)}
    with on_device(index):
        if blocks:
            _count_kernel[(blocks,)](
                index, counts, count, choices, slots, experts, BLOCK=block, CHUNKS=CHUNKS, **shared
            )
        _scan_kernel[(1,)](
            counts, starts, offsets, tile_starts, tile_count, blocks, experts, BLOCK=block, ROWS=TILE_ROWS, **shared
        )
        _place_kernel[(blocks + experts,)](
            *(index, counts, starts, offsets, tile_starts, order, rows, tiles, count, choices, slots, blocks, experts),
            BLOCK=block,
            CHUNKS=CHUNKS,
            ROWS=TILE_ROWS,
            **shared,
        )
    return order, offsets, tiles, tile_count, rows


@triton.jit
def rows_to_write(offsets, experts, rows, ROWS: tl.constexpr):
    """Return how many rows a pass over rows writes: those of experts, and one tile of others.

    An outer product, which walks over rows in tiles, multiplies the rows after an expert's last one with zeros. So they
    must be finite. All rows after that tile are undefined.
    """
    return tl.minimum(rows, tl.load(offsets + experts - 1) + ROWS)


@triton.jit(do_not_specialize=["most"])
def _spread_kernel(
    x, rows, out, offsets, experts, most, CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    written = rows_to_write(offsets, experts, most, ROWS)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * WIDTH + at, mask=at < WIDTH, other=0.0)
    for choice in tl.static_range(CHOICES):
        row = tl.load(rows + token * CHOICES + choice).to(tl.int64)
        tl.store(out + row * WIDTH + at, value, mask=at < tl.where(row < written, WIDTH, 0))


def spread_rows(x: Tensor, rows: Tensor, offsets: Tensor, choices: int, most: int) -> Tensor:
    """Return ``x [T, H]`` at the token of each of the first ``most`` rows, ``[R, H]``; see :func:`rows_to_write`.

    A program reads a token once and writes all of its rows. One that gathers a row reads each token K times, and large
    batches don't fit into the cache.
    """
    tokens, width = x.shape
    out = x.new_empty(most, width)
    block = min(BLOCK_H, triton.next_power_of_2(width))
    x = x.contiguous()
    if tokens:
        with on_device(x):
            _spread_kernel[(tokens, triton.cdiv(width, block))](
                x, rows, out, offsets, len(offsets), most, choices, width, block, TILE_ROWS, num_warps=4, **early(x)
            )
    return out


@triton.jit
def _sum_kernel(
    y, rows, index, weights, out, count, experts, CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    width = WIDTH
    if count is not None:
        width = tl.where(token < tl.load(count), WIDTH, 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        slot = token * CHOICES + choice
        chosen = tl.load(index + slot)
        filled = tl.where((chosen >= 0) & (chosen < experts), width, 0)
        row = tl.load(rows + slot).to(tl.int64)
        value = tl.load(y + row * WIDTH + at, mask=at < filled, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + slot).to(tl.float32)
        total += value
    tl.store(out + token * WIDTH + at, total.to(out.dtype.element_ty), mask=at < WIDTH)


def sum_rows(
    y: Tensor, rows: Tensor, index: Tensor, experts: int, weights: Tensor | None, count: Tensor | None
) -> Tensor:
    """Return the weighted sums of ``y [R, H]`` over each token's rows, ``[T, H]``, and zeros for bucket padding."""
    tokens, choices = index.shape
    width = y.shape[1]
    out = y.new_empty(tokens, width)
    block = min(BLOCK_H, triton.next_power_of_2(width))
    index, weights = index.contiguous(), None if weights is None else weights.contiguous()
    if tokens:
        with on_device(y):
            _sum_kernel[(tokens, triton.cdiv(width, block))](
                y, rows, index, weights, out, count, experts, choices, width, block, num_warps=4, **early(y)
            )
    return out
