"""Sums over the rows of several matrices in one launch: bias gradients, and the last step of norm weight gradients.

A program adds up a few columns from top to bottom, in float32 and in a fixed order, and rounds once. This is faster
than a launch for each matrix if there are enough columns to fill the device, or few rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.implementation import KERNEL_DTYPES
from fastpack.ops.kernels.launch import early, on_device, processors, threes, wait_for_inputs

TILE = {"BLOCK_T": 256, "BLOCK_M": 32, "num_warps": 8}
TILES_OF_FEW_ROWS = (
    {"BLOCK_T": 8, "BLOCK_M": 512, "num_warps": 4},
    {"BLOCK_T": 16, "BLOCK_M": 512, "num_warps": 8},
)
"""Tiles for matrices with at most ``BLOCK_T`` rows."""
STAGES_OF_FEW_PROGRAMS, STAGES_OF_MANY_PROGRAMS = 3, 1
"""Pipeline stages if a multiprocessor has at most two programs, and if it has more. Measured on an H200."""
MOST_BYTES = 2**19
"""Bytes of the largest column block if there are fewer blocks than multiprocessors.

For larger blocks torch is faster, since it splits sums between programs."""


@triton.jit
def _sum(x, row, rows, width, out, block, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr):
    columns = block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = columns < width
    total = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for start in tl.range(0, rows, BLOCK_T, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK_T)
        mask = (at[:, None] < rows) & exists[None, :]
        total += tl.load(x + at[:, None].to(tl.int64) * row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + columns, tl.sum(total, 0).to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["rows0", "rows1", "rows2"])
def _kernel(
    x0, row0, rows0, width0, out0,
    x1, row1, rows1, width1, out1,
    x2, row2, rows2, width2, out2,
    COUNT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum up to three matrices. Grid: the column blocks of the first matrix, then of the second and the third."""
    wait_for_inputs(EARLY)
    block = tl.program_id(0)
    blocks0, blocks1 = tl.cdiv(width0, BLOCK_M), tl.cdiv(width1, BLOCK_M)
    if block < blocks0:
        _sum(x0, row0, rows0, width0, out0, block, BLOCK_T, BLOCK_M, STAGES)
    elif COUNT > 1:
        if block < blocks0 + blocks1:
            _sum(x1, row1, rows1, width1, out1, block - blocks0, BLOCK_T, BLOCK_M, STAGES)
        elif COUNT > 2:
            _sum(x2, row2, rows2, width2, out2, block - blocks0 - blocks1, BLOCK_T, BLOCK_M, STAGES)


def sum_rows(xs: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return the sum over the rows of each matrix; torch computes them if it is faster or the kernel can't.

    Args:
        xs: ``[T, M]`` each, of any sizes.
        dtypes: the dtype of each result.

    Returns:
        ``[M]`` each.
    """
    if not _serves(xs):
        wide = [torch.promote_types(x.dtype, dtype) for x, dtype in zip(xs, dtypes, strict=True)]
        return [x.sum(0, dtype=w).to(dtype) for x, w, dtype in zip(xs, wide, dtypes, strict=True)]
    outs = [x.new_empty(x.shape[1], dtype=dtype) for x, dtype in zip(xs, dtypes, strict=True)]
    entries = [(x, x.stride(0), *x.shape, out) for x, out in zip(xs, outs, strict=True)]
    with on_device(xs[0]):
        for group, arguments in threes(entries):
            blocks = _blocks(xs[group])
            stages = STAGES_OF_FEW_PROGRAMS if blocks <= 2 * processors(xs[0].device) else STAGES_OF_MANY_PROGRAMS
            _kernel[(blocks,)](*arguments, COUNT=len(xs[group]), STAGES=stages, **_tile(xs[group]), **early(xs[0]))
    return outs


def _serves(xs: Sequence[Tensor]) -> bool:
    if not xs or any(x.stride(1) != 1 or x.dtype not in KERNEL_DTYPES for x in xs):
        return False
    longest = max(x.shape[0] * x.element_size() for x in xs) * _tile(xs)["BLOCK_M"]
    return longest <= MOST_BYTES or _blocks(xs) >= processors(xs[0].device)


def _blocks(xs: Sequence[Tensor]) -> int:
    return sum(triton.cdiv(x.shape[1], _tile(xs)["BLOCK_M"]) for x in xs)


def _tile(xs: Sequence[Tensor]) -> dict[str, int]:
    longest = max(map(len, xs))
    return next((tile for tile in TILES_OF_FEW_ROWS if longest <= tile["BLOCK_T"]), TILE)
