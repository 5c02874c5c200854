"""Dequantisation of bitsandbytes' 4-bit weights (Dettmers et al., "QLoRA", arXiv:2305.14314, section 3 and eq. 6).

Definition, for weight i of a tensor in row-major order, all in float32:

    w_i      = code[nibble_i] absmax_b,  b = i // blocksize             rounded once, to the dtype it was quantised from
    absmax_b = code2[level_b] absmax2_c + offset,  c = b // blocksize2  if the scales are quantised too ("nested")

The upper half of a byte comes before the lower half. ``code`` is NormalFloat (NF4) or, with a sign bit, FP4. Each
product and each sum is rounded separately. On a GPU every implementation gives the same bits, except for values below
2^-126, which bitsandbytes sets to zero. :func:`definition` is this definition in PyTorch.

Shape suffixes: O size of an output, H of the input, N = O H.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, kernel_serves, use_triton

KERNEL_CODES = ("nf4", "fp4")
SMALLEST_BLOCK = 32


def dequantize(weight: Tensor, quant_state: Any, dtype: torch.dtype, implementation: Implementation = "auto") -> Tensor:
    """Return the dense weight, equal to ``bitsandbytes.functional.dequantize_4bit(weight, quant_state).to(dtype)``.

    Args:
        weight: the packed weight, ``[N / 2, 1]`` of uint8, or as many bytes of another ``quant_storage``.
        quant_state: the weight's bitsandbytes ``QuantState``, on the same device.
        dtype: the dtype of the result. The values are rounded to the state's dtype first.
        implementation: ``auto`` runs the kernel, in one launch, if :func:`use_triton` allows it and the kernel supports
            the weight. Otherwise ``auto`` calls bitsandbytes, as ``torch`` always does; that takes two more launches
            for nested scales.

    Returns:
        The dense weight ``[O, H]``, new and contiguous.

    Raises:
        ValueError: ``implementation="triton"``, and the kernel doesn't support the weight.

    Example:
        >>> weight, state = bitsandbytes.functional.quantize_4bit(dense, quant_type="nf4")  # doctest: +SKIP
        >>> dequantize(weight, state, torch.bfloat16).shape == dense.shape  # doctest: +SKIP
        True
    """
    if use_triton(implementation, weight):
        packed = weight.detach()  # a plain tensor: every attribute access on bitsandbytes' class runs Python code
        if kernel_serves(implementation, "dequantising", kernel_rejects(packed, quant_state, dtype)):
            from fastpack.ops.kernels import dequantize as kernels

            return kernels.dequantize(packed, quant_state, dtype)
    from bitsandbytes.functional import dequantize_4bit

    dense: Tensor = dequantize_4bit(weight, quant_state)
    return dense.to(dtype)


def definition(weight: Tensor, quant_state: Any) -> Tensor:
    """Return the weight ``[O, H]`` in the state's dtype, step by step; slow, with several times the result's memory."""
    state = quant_state
    absmax = state.absmax
    if state.nested:
        outer = state.state2.absmax.repeat_interleave(state.state2.blocksize)[: absmax.numel()]
        absmax = state.state2.code[absmax.int()] * outer + state.offset.float()
    code = torch.cat([state.code[:8], -state.code[:8]]) if state.quant_type == "fp4" else state.code
    packed = weight.detach().flatten().view(torch.uint8)
    nibbles = torch.stack([packed >> 4, packed & 15], 1).flatten()[: math.prod(state.shape)]
    values = code[nibbles.int()] * absmax.repeat_interleave(state.blocksize)[: nibbles.numel()]
    return values.to(state.dtype).view(state.shape)


def kernel_rejects(packed: Tensor, quant_state: Any, dtype: torch.dtype) -> str | None:
    """Return why the kernel can't dequantise this weight, or None."""
    state = quant_state
    if state.quant_type not in KERNEL_CODES:
        return f"a quant_type of {state.quant_type!r}, but supports {' and '.join(KERNEL_CODES)}"
    if getattr(state, "packing_format_for_cpu", False):
        return "a weight packed for a CPU"
    if dtype not in KERNEL_DTYPES or state.dtype not in KERNEL_DTYPES:
        return f"{dtype} of {state.dtype}, but supports float32, bfloat16 and float16"
    count, size = math.prod(state.shape), state.blocksize
    if not _power_of_two(size) or size < SMALLEST_BLOCK:
        return f"blocks of {size}, but supports powers of two from {SMALLEST_BLOCK} on"
    if packed.nbytes < (count + 1) // 2:
        return f"{packed.nbytes} bytes for {count} weights"
    blocks = -(-count // size)
    tables = [(state.code, torch.float32, 16)]
    if state.nested:
        outer = state.state2
        if outer.nested or outer.dtype != torch.float32 or not _power_of_two(outer.blocksize):
            return f"scales quantised to {outer.dtype} in blocks of {outer.blocksize}"
        tables += [
            (state.absmax, torch.uint8, blocks),
            (outer.code, torch.float32, 256),
            (outer.absmax, torch.float32, -(-blocks // outer.blocksize)),
            (state.offset, state.offset.dtype, 1),  # float32, or the default dtype at the time of loading
        ]
    else:
        tables.append((state.absmax, torch.float32, blocks))
    for table, expected, least in tables:
        if table.dtype != expected or table.numel() < least:
            return f"a table of {table.numel()} {table.dtype} in its quant_state, but reads {least} {expected}"
        if table.device != packed.device:
            return f"a weight on {packed.device} and a quant_state on {table.device}"
        if not table.is_contiguous():
            return "a quant_state whose tensors are not contiguous"
    return None if packed.is_contiguous() else f"a weight of strides {packed.stride()}, but needs a contiguous one"


def _power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0
