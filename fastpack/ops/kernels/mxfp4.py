"""Kernel that makes MXFP4 stacks dense: it reads each byte once and writes each weight once.

Four bytes are read as one word, whose eight weights are one store of 16 bytes in half precision. Values and scales are
made from their bits, without tables. The programs of an expert without rows do nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs

WORDS = 512
"""The number of words that a program reads."""
WARPS = 4


@triton.jit
def _kernel(blocks, scales, out, offsets, words, WORDS: tl.constexpr, EARLY: tl.constexpr):
    wait_for_inputs(EARLY)
    expert = tl.program_id(1)
    exists = tl.full((), 1, tl.int1)
    if offsets is not None:
        exists = tl.load(offsets + expert) > tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    if exists:
        first = expert.to(tl.int64) * words
        word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        inside = word < words
        packed = tl.load(blocks.to(tl.pointer_type(tl.int32)) + first + word, mask=inside, other=0)
        exponent = tl.load(scales + first // 4 + word // 4, mask=inside, other=0).to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
        scale = bits.to(tl.float32, bitcast=True)
        each = tl.arange(0, 8)
        nibble = (packed[:, None] >> (each * 4)[None, :]) & 15  # the lower half of a byte comes first
        power, half = (nibble & 7) >> 1, (nibble & 1).to(tl.float32)
        value = tl.where(power == 0, half * 0.5, (2.0 + half) * (1 << power).to(tl.float32) * 0.25)
        value *= tl.where(nibble > 7, -1.0, 1.0)
        places = out + (first + word)[:, None] * 8 + each[None, :]
        tl.store(places, (value * scale[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype, offsets: Tensor | None) -> Tensor:
    """Return the dense stack, if :func:`fastpack.ops.mxfp4.kernel_rejects` doesn't reject it."""
    count, columns, groups = scales.shape
    out = torch.empty(count, columns, groups * 32, dtype=dtype, device=blocks.device)
    words = columns * groups * 4
    if out.numel():
        with on_device(blocks):
            _kernel[(triton.cdiv(words, WORDS), count)](
                blocks, scales, out, offsets, words, WORDS=WORDS, num_warps=WARPS, **early(blocks)
            )
    return out
