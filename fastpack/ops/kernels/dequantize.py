"""Kernel that makes bitsandbytes' 4-bit weights dense: it reads each byte once and writes each weight once.

Four packed bytes are read as one word, whose eight weights are one store of 16 bytes in half precision. The code's 16
values are looked up in shared memory. The scale of a block is read once for each word, and dequantised if it is
quantised itself. A weight is read byte by byte if its size is no multiple of eight, or it does not begin at a multiple
of four bytes.

A multiplication and an addition are never fused: each is rounded as bitsandbytes' separate kernels round it. Weights
are counted in int64, blocks in int32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs

UNITS = 512
"""The number of words, or single bytes, that a program reads."""
WARPS = 4

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _scales(ABSMAX, CODE2, ABSMAX2, OFFSET, block, mask, BLOCKSIZE2: tl.constexpr):
    """Return the scale of each block, which is its largest magnitude."""
    if CODE2 is None:
        scale = tl.load(ABSMAX + block, mask=mask)
    else:
        level = tl.load(ABSMAX + block, mask=mask).to(tl.int32)
        outer = tl.load(ABSMAX2 + block // BLOCKSIZE2, mask=mask)
        scale = tl.load(CODE2 + level) * outer + tl.load(OFFSET).to(tl.float32)
    return scale


# If Triton knew that PACKED is aligned, each thread would read 16 bytes in a row and exchange words before a store.
@triton.jit(do_not_specialize=["PACKED", "count"])
def _kernel(
    PACKED,
    CODE,
    ABSMAX,
    CODE2,
    ABSMAX2,
    OFFSET,
    OUT,
    count,
    BLOCKSIZE: tl.constexpr,
    BLOCKSIZE2: tl.constexpr,
    SIGNED: tl.constexpr,
    ROUND: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Read UNIT bytes at once. Nothing is stored beyond the end, so values loaded there may be anything."""
    wait_for_inputs(EARLY)
    EACH: tl.constexpr = 2 * UNIT
    TILE: tl.constexpr = EACH * UNITS
    SHARING: tl.constexpr = UNITS if BLOCKSIZE > TILE else BLOCKSIZE // EACH  # units of one block
    BLOCKS: tl.constexpr = UNITS // SHARING
    program = tl.program_id(0)
    start = program.to(tl.int64) * TILE
    left = tl.minimum(count - start, TILE).to(tl.int32)
    unit = tl.arange(0, UNITS)
    if UNIT == 4:
        source = PACKED.to(tl.pointer_type(tl.int32))
    else:
        source = PACKED.to(tl.pointer_type(tl.uint8))
    word = tl.load(source + program.to(tl.int64) * UNITS + unit, mask=unit * EACH < left).to(tl.int32)

    place = tl.arange(0, BLOCKS)
    block = (program // (BLOCKSIZE // TILE) if BLOCKSIZE > TILE else program * BLOCKS) + place
    scale = _scales(ABSMAX, CODE2, ABSMAX2, OFFSET, block, place * BLOCKSIZE < left, BLOCKSIZE2)
    scale = tl.reshape(tl.broadcast_to(scale[:, None], (BLOCKS, SHARING)), (UNITS,))

    level = tl.arange(0, 16)
    if SIGNED:  # the upper bit is the sign, also that of zero (a negation would be 0 - 0)
        code = tl.load(CODE + (level & 7)) * tl.where(level > 7, -1.0, 1.0)
    else:
        code = tl.load(CODE + level)
    each = tl.arange(0, EACH)
    nibble = (word[:, None] >> (each * 4 ^ 4)[None, :]) & 15  # the upper half of a byte comes first
    value = tl.reshape(tl.gather(code, tl.reshape(nibble, (TILE,)), 0), (UNITS, EACH)) * scale[:, None]

    inside = unit[:, None] * EACH + each[None, :]
    if UNIT == 4:
        mask = (unit * EACH < left)[:, None]  # equal for all weights of a store
    else:
        mask = inside < left
    tl.store(OUT + start + inside, value.to(ROUND).to(OUT.dtype.element_ty), mask=mask)


def dequantize(packed: Tensor, quant_state: Any, dtype: torch.dtype) -> Tensor:
    """Return the dense weight, if :func:`fastpack.ops.dequantize.kernel_rejects` doesn't reject the packed weight."""
    out = torch.empty(quant_state.shape, dtype=dtype, device=packed.device)
    count = out.numel()
    unit = 4 if count % 8 == 0 and packed.data_ptr() % 4 == 0 else 1
    nested = quant_state.state2 if quant_state.nested else None
    with on_device(packed):
        _kernel[(triton.cdiv(count, 2 * unit * UNITS),)](
            packed,
            quant_state.code,
            quant_state.absmax,
            None if nested is None else nested.code,
            None if nested is None else nested.absmax,
            None if nested is None else quant_state.offset,
            out,
            count,
            BLOCKSIZE=quant_state.blocksize,
            BLOCKSIZE2=1 if nested is None else nested.blocksize,
            SIGNED=quant_state.quant_type == "fp4",
            ROUND=_DTYPES[quant_state.dtype],
            UNIT=unit,
            UNITS=UNITS,
            num_warps=WARPS,
            enable_fp_fusion=False,
            **early(packed),
        )
    return out
