"""Several small tensors brought to one dtype, end to end in one buffer, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs

BLOCK = 2048
MOST = 6
"""A and B of three projections."""


@triton.jit
def _kernel(p0, p1, p2, p3, p4, p5, n0, n1, n2, n3, n4, n5, out, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_inputs(EARLY)
    which = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if which == 0:
        tl.store(out + at, tl.load(p0 + at, mask=at < n0, other=0.0).to(out.dtype.element_ty), mask=at < n0)
    start = n0
    if which == 1:
        tl.store(out + start + at, tl.load(p1 + at, mask=at < n1, other=0.0).to(out.dtype.element_ty), mask=at < n1)
    start += n1
    if which == 2:
        tl.store(out + start + at, tl.load(p2 + at, mask=at < n2, other=0.0).to(out.dtype.element_ty), mask=at < n2)
    start += n2
    if which == 3:
        tl.store(out + start + at, tl.load(p3 + at, mask=at < n3, other=0.0).to(out.dtype.element_ty), mask=at < n3)
    start += n3
    if which == 4:
        tl.store(out + start + at, tl.load(p4 + at, mask=at < n4, other=0.0).to(out.dtype.element_ty), mask=at < n4)
    start += n4
    if which == 5:
        tl.store(out + start + at, tl.load(p5 + at, mask=at < n5, other=0.0).to(out.dtype.element_ty), mask=at < n5)


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All elements of the tensors, in order, in one flat tensor of ``dtype``."""
    sizes = [t.numel() for t in tensors]
    out = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    done = 0
    with on_device(out):
        for first in range(0, len(tensors), MOST):
            batch = [t.contiguous() for t in tensors[first : first + MOST]]
            counts = sizes[first : first + MOST]
            blank = MOST - len(batch)
            _kernel[(triton.cdiv(max(counts), BLOCK), len(batch))](
                *batch, *[out] * blank, *counts, *[0] * blank, out[done:], BLOCK=BLOCK, num_warps=4, **early(out)
            )
            done += sum(counts)
    return out
