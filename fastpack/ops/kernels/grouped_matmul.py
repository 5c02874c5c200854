"""Triton kernels of grouped matmuls; the definitions are in :mod:`fastpack.ops.experts.grouped_matmul`.

One program for each processor walks over tiles of the result. A table lists each tile's expert and first row, so that
no tile has rows of two experts; rows after the expert's last one are computed, but not stored. Tensor descriptors
(Hopper's TMA) load tiles into shared memory, and put zeros where a tile extends beyond the tensor. A low-rank update is
added to a tile's sum after the last step.

In an outer product a program computes a tile of one expert's result, and walks over the expert's rows.

Shape suffixes: R rows, E experts, I inner dimension, O columns.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpack.ops.expert_operands import STEP, Routing, Stack
from fastpack.ops.kernels.launch import early, on_device, processors, stages_that_fit, wait_for_inputs
from fastpack.ops.kernels.routing import TILE_ROWS

WIDEST, NARROW = 256, 64
"""The columns of the widest tile, and those up to which a tile has few warps and many stages."""
OUTER_ROWS, OUTER_M, OUTER_N = 64, 128, 256
FEW_STAGES = 3
"""With fewer stages than that, a narrower tile is faster."""
RESERVED = 33 * 2**10
"""The bytes of shared memory that a tile's results take on their way out; a low-rank update has them before that."""


@triton.jit
def _load_matrix(matrices, expert, height, at, column, width, TRANSPOSED: tl.constexpr):
    """Load a tile of an expert's matrix, ``[inner, columns]``."""
    if TRANSPOSED:
        tile = matrices.load([expert * width + column, at]).T
    else:
        tile = matrices.load([expert * height + at, column])
    return tile


@triton.jit
def _store(sums, out, bias, row, end, column, columns, scale, WIDTH: tl.constexpr):
    rows, places = row + tl.arange(0, sums.shape[0]), column + tl.arange(0, WIDTH)
    exists = rows < end
    sums *= scale
    if bias is not None:
        sums += tl.load(bias + places, mask=places < columns, other=0.0).to(tl.float32)[None, :]
    out += rows[:, None].to(tl.int64) * columns + places[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=exists[:, None] & (places[None, :] < columns))


@triton.jit
def _matmul_kernel(
    x, matrices, low, factors, bias, out, offsets, tiles, tile_count, inner, columns, rank, scale,
    TRANSPOSED: tl.constexpr, RANK_STEPS: tl.constexpr, FACTORS_TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, RANK_STEP: tl.constexpr, HALVES: tl.constexpr,
    PROGRAMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    across = tl.cdiv(columns, WIDTH)
    for tile in tl.range(tl.program_id(0), tl.load(tile_count) * across, PROGRAMS, flatten=RANK_STEPS < 2):
        expert, row = tl.load(tiles + tile // across * 2), tl.load(tiles + tile // across * 2 + 1)
        column = tile % across * WIDTH
        sums = tl.zeros((ROWS, WIDTH), tl.float32)
        for at in range(0, inner, STEP):
            matrix = _load_matrix(matrices, expert, inner, at, column, columns, TRANSPOSED)
            sums = tl.dot(x.load([row, at]), matrix, sums, input_precision="ieee")
        if RANK_STEPS == 1:  # without a second loop, the loop over tiles and the loop over steps become one
            factor = _load_matrix(factors, expert, rank, 0, column, columns, FACTORS_TRANSPOSED)
            sums = tl.dot(low.load([row, 0]), factor, sums, input_precision="ieee")
        elif RANK_STEPS > 1:
            for at in tl.range(0, rank, RANK_STEP, num_stages=1):
                factor = _load_matrix(factors, expert, rank, at, column, columns, FACTORS_TRANSPOSED)
                sums = tl.dot(low.load([row, at]), factor, sums, input_precision="ieee")
        end = tl.load(offsets + expert)
        if bias is not None:
            of_expert = bias + expert * columns
        else:
            of_expert = bias
        if HALVES:  # a whole tile would take too many registers
            left, right = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))
            _store(left, out, of_expert, row, end, column, columns, scale, WIDTH // 2)
            _store(right, out, of_expert, row, end, column + WIDTH // 2, columns, scale, WIDTH // 2)
        else:
            _store(sums, out, of_expert, row, end, column, columns, scale, WIDTH)


def grouped_matmul(
    x: Tensor,
    stack: Stack,
    routing: Routing,
    *,
    scale: float,
    bias: Tensor | None,
    update: tuple[Tensor, Stack] | None,
) -> Tensor:
    """Compute :func:`fastpack.ops.experts.grouped_matmul.grouped_matmul`; with an update the scale must be 1."""
    assert update is None or scale == 1, "the update would be scaled, too"
    assert stack.weight.shape[2 if stack.transposed else 1] == x.shape[1], "the kernel would read other matrices"
    rows, columns, inner = len(x), stack.columns, x.shape[1]
    out = x.new_empty(rows, columns)
    if not rows:
        return out
    rank = 0 if update is None else update[0].shape[1]
    tile = matmul_tile(x, columns, rank)
    width, step, rank_step = tile["WIDTH"], tile["STEP"], tile["RANK_STEP"]
    low = factors = None
    if update is not None:
        low = TensorDescriptor.from_tensor(update[0], [TILE_ROWS, rank_step])
        factors = _descriptor(update[1], rank_step, width)
    resident = processors(x.device) * (2 if width <= NARROW // 2 else 1)
    programs = min(resident, (triton.cdiv(rows, TILE_ROWS) + routing.experts) * triton.cdiv(columns, width))
    with on_device(x):
        _matmul_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [TILE_ROWS, step]), _descriptor(stack, step, width),
            low, factors, bias, out, routing.offsets, routing.tiles, routing.tile_count,
            inner, columns, rank, scale, TRANSPOSED=stack.transposed,
            FACTORS_TRANSPOSED=update is not None and update[1].transposed,
            ROWS=TILE_ROWS, PROGRAMS=programs, **tile, **early(x),
        )  # fmt: skip
    return out


def _descriptor(stack: Stack, step: int, width: int) -> TensorDescriptor:
    weight = stack.weight.reshape(-1, stack.weight.shape[2])
    return TensorDescriptor.from_tensor(weight, [width, step] if stack.transposed else [step, width])


def matmul_tile(x: Tensor, columns: int, rank: int) -> dict[str, Any]:
    """Return the constants and options of the grouped matmul for this device's shared memory."""
    size = x.element_size()
    step = 2 * STEP // size
    rank_step = min(step, rank) or step
    width = min(2 * WIDEST // size, max(16, triton.next_power_of_2(columns)))
    while True:
        few = width <= NARROW
        resident = max(RESERVED, (TILE_ROWS + width) * rank_step * size if rank else 0)
        stages = stages_that_fit(x.device, 5 if few else 4, resident, (TILE_ROWS + width) * step * size)
        if stages >= FEW_STAGES or few:
            break
        width //= 2
    return {
        "WIDTH": width,
        "STEP": step,
        "RANK_STEP": rank_step,
        "RANK_STEPS": triton.cdiv(rank, rank_step),
        "HALVES": width >= WIDEST // 2,
        "num_stages": max(1, stages),
        "num_warps": 4 if few else 8,
    }


@triton.jit
def _outer_step(x, y, at, end, m, n, sums, ROWS: tl.constexpr, PARTIAL: tl.constexpr):
    left = x.load([at, m])
    if PARTIAL:
        left = tl.where((at + tl.arange(0, ROWS) < end)[:, None], left, 0.0)
    return tl.dot(left.T, y.load([at, n]), sums, input_precision="ieee")


@triton.jit
def _outer_kernel(
    x, y, out, of_expert, of_row, of_column, offsets, height, width, M: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    across = tl.cdiv(width, N)
    m, n = tl.program_id(0) // across * M, tl.program_id(0) % across * N
    expert = tl.program_id(1)
    first = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    sums = tl.zeros((M, N), tl.float32)
    whole = first + (end - first) // ROWS * ROWS
    for at in range(first, whole, ROWS):
        sums = _outer_step(x, y, at, end, m, n, sums, ROWS, False)
    if whole < end:
        sums = _outer_step(x, y, whole, end, m, n, sums, ROWS, True)
    rows, columns = m + tl.arange(0, M), n + tl.arange(0, N)
    out += expert.to(tl.int64) * of_expert + rows[:, None].to(tl.int64) * of_row + columns[None, :] * of_column
    tl.store(out, sums.to(out.dtype.element_ty), mask=(rows[:, None] < height) & (columns[None, :] < width))


def grouped_outer(x: Tensor, y: Tensor, routing: Routing, out: Tensor) -> Tensor:
    """Compute :func:`fastpack.ops.experts.grouped_matmul.grouped_outer`."""
    _, height, width = out.shape
    if not len(x):
        return out.zero_()
    tile = outer_tile(x, height, width)
    m, n, rows = tile["M"], tile["N"], tile["ROWS"]
    assert rows <= TILE_ROWS, "after an expert's last row, no more than TILE_ROWS are written"
    grid = (triton.cdiv(height, m) * triton.cdiv(width, n), routing.experts)
    with on_device(x):
        _outer_kernel[grid](
            TensorDescriptor.from_tensor(x, [rows, m]), TensorDescriptor.from_tensor(y, [rows, n]),
            out, *out.stride(), routing.offsets, height, width, **tile, **early(x),
        )  # fmt: skip
    return out


def outer_tile(x: Tensor, height: int, width: int) -> dict[str, Any]:
    """Return the constants and options of the outer products for this device's shared memory."""
    size = x.element_size()
    m = min(OUTER_M, max(16, triton.next_power_of_2(height)))
    few = m <= NARROW
    widest = OUTER_N // 2 if few else 2 * OUTER_N // size  # narrow tiles share a processor
    n = min(widest, max(16, triton.next_power_of_2(width)))
    rows = 2 * OUTER_ROWS // size
    while True:
        stages = stages_that_fit(x.device, 4 if few else 3, RESERVED, (m + n) * rows * size)
        if stages >= FEW_STAGES or n <= NARROW:
            break
        n //= 2
    return {"M": m, "N": n, "ROWS": rows, "num_stages": max(1, stages), "num_warps": 4 if few else 8}
