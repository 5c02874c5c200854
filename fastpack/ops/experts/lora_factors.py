"""PEFT's factors of LoRA on stacked weights, packed as a matrix for each expert.

PEFT holds A as ``[E r, I]``, one expert after the other, and B as ``[O, r E]``, in which the expert is the fastest
index.

Shape suffixes: E experts, I inner dimension, O columns, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack.ops.expert_operands import NARROWEST, STEP


def padded_rank(rank: int) -> int:
    """Return the rank that kernels pad to: a power of two up to :data:`STEP`, or a multiple of that."""
    return max(NARROWEST, 1 << (rank - 1).bit_length()) if rank <= STEP else -(-rank // STEP) * STEP


def pack_factors(a: Tensor, b: Tensor, experts: int, dtype: torch.dtype, *, for_kernels: bool) -> tuple[Tensor, Tensor]:
    """Return A as ``[E, r, I]`` and B as ``[E, O, r]``, contiguous; for kernels, r is padded by zeros.

    Args:
        a: ``[E r, I]`` of any float dtype.
        b: ``[O, r E]`` of any float dtype.
        experts: E.
        dtype: the dtype of the results.
        for_kernels: whether grouped matmuls run as kernels. Then a kernel packs, too, in one launch.
    """
    a, b = a.contiguous(), b.contiguous()
    if for_kernels:
        from fastpack.ops.kernels.lora_factors import pack_factors as kernel

        rank = len(a) // experts
        return kernel(a, b, experts, rank, padded_rank(rank), dtype)
    by_expert = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)
    of_a, of_b = (each.to(dtype).contiguous() for each in by_expert)
    return of_a, of_b
