"""Kernel that packs PEFT's factors of LoRA on stacked weights (:mod:`fastpack.ops.experts.lora_factors`).

The first programs copy rows of A. The others take a few columns of B each, and write these columns' ranks for one
expert after another, so that both the reads and the writes are of neighbouring elements.

Shape suffixes: E experts, I inner dimension, O columns, r rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs

BLOCK = 2048
"""The elements of a row of A that are copied at once."""
ENTRIES = 2**14
"""The elements of B that a program holds."""


@triton.jit
def _pack_kernel(
    a, b, of_a, of_b, experts, rank, inner, columns, rows, across, RANK: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    if program < rows:
        source = a + (program // RANK * rank + program % RANK).to(tl.int64) * inner
        target = of_a + program.to(tl.int64) * inner
        filled = tl.where(program % RANK < rank, inner, 0)
        for start in range(0, inner, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(source + at, mask=at < filled, other=0.0)
            tl.store(target + at, value.to(of_a.dtype.element_ty), mask=at < inner)
    else:
        place = program - rows
        column = place // across * COLUMNS + tl.arange(0, COLUMNS)[:, None, None]
        which = tl.arange(0, LANES)[None, :, None]
        expert = place % across * EXPERTS + tl.arange(0, EXPERTS)[None, None, :]
        exists = (column < columns) & (expert < experts)
        value = tl.load(
            b + (column.to(tl.int64) * rank + which) * experts + expert, mask=exists & (which < rank), other=0.0
        )
        tl.store(
            of_b + (expert.to(tl.int64) * columns + column) * RANK + which,
            value.to(of_b.dtype.element_ty),
            mask=exists & (which < RANK),
        )


def pack_factors(
    a: Tensor, b: Tensor, experts: int, rank: int, padded: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return A ``[E, padded, I]`` and B ``[E, O, padded]``."""
    inner, columns = a.shape[1], len(b)
    of_a = torch.empty(experts, padded, inner, dtype=dtype, device=a.device)
    of_b = torch.empty(experts, columns, padded, dtype=dtype, device=a.device)
    together = min(128, triton.next_power_of_2(experts))
    lanes = triton.next_power_of_2(padded)
    each = max(1, ENTRIES // (together * lanes))
    across = triton.cdiv(experts, together)
    grid = (experts * padded + triton.cdiv(columns, each) * across,)
    with on_device(a):
        _pack_kernel[grid](
            *(a, b, of_a, of_b, experts, rank, inner, columns, experts * padded, across),
            RANK=padded,
            LANES=lanes,
            BLOCK=min(BLOCK, triton.next_power_of_2(inner)),
            COLUMNS=each,
            EXPERTS=together,
            num_warps=8,
            **early(a),
        )
    return of_a, of_b
