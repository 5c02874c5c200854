"""A tensor times a number that the device alone knows, nothing where it stays in its place and the number is 1.

A loss has gradients ready when its own arrives, which is 1 unless something follows the loss. To read and write them
all the same takes as long as a product of a thousand tokens with a large vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, on_device, processors, wait_for_inputs

BLOCK = 4096
WARPS = 8
EACH = 8
"""Programs of a multiprocessor, as many as it has room for: they walk over the tensor."""


@triton.jit
def _kernel(x, factor, out, count, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_inputs(EARLY)
    by = tl.load(factor).to(tl.float32)
    if IN_PLACE:
        count = tl.where(by == 1.0, 0, count)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * by
        tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)


def times(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """``x * factor`` into ``out``, in float32, rounded once.

    Args:
        x: contiguous.
        factor: one element, of any floating-point dtype.
        out: as large, contiguous, of any floating-point dtype; may be ``x`` itself.
    """
    count = x.numel()
    programs = min(triton.cdiv(count, BLOCK), EACH * processors(x.device))
    if count:
        with on_device(x):
            _kernel[(programs,)](x, factor, out, count, IN_PLACE=out is x, BLOCK=BLOCK, num_warps=WARPS, **early(x))
