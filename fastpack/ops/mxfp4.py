"""Dequantisation of MXFP4 weights (OCP Microscaling Formats (MX) Specification v1.0, sections 5.3.3, 5.4.1 and 6.3).

Definition, for element i of a row:

    w_i = value[nibble_i] 2^(scale_b - 127),  b = i // 32           rounded once; a scale of 255 makes the block NaN

``value`` is e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and the same with a sign bit. The lower half of a byte comes before
the upper half. Every product is exact in bfloat16 and wider. :func:`definition` is this definition in PyTorch.

Shape suffixes: E experts, O columns of the result, I inner dimension, G = I / 32 blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, kernel_serves, use_triton

BLOCK = 32
"""The number of elements that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS, _NAN = 127, 255
_LARGEST_POWER = 2
"""The exponent of the largest value."""


def dequantize_mxfp4(
    blocks: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    implementation: Implementation = "auto",
    offsets: Tensor | None = None,
) -> Tensor:
    """Return the dense stack ``[E, O, I]``, new and contiguous.

    Args:
        blocks: uint8 ``[E, O, G, 16]`` or ``[E, O, I / 2]``, two elements a byte.
        scales: uint8 ``[E, O, G]``, e8m0.
        dtype: the dtype of the result.
        implementation: ``auto`` runs the kernel if :func:`use_triton` allows it and the kernel supports the stack.
        offsets: int32 ``[E]``, the end of each expert's rows, or None. With it, the matrices of experts without rows
            may be left undefined.

    Raises:
        ValueError: the shapes don't belong together, or ``implementation="triton"``, and the kernel doesn't support the
            stack.

    Example:
        >>> blocks, scales = torch.full((1, 2, 1, 16), 0x21, dtype=torch.uint8), torch.tensor([[[127], [128]]])
        >>> dequantize_mxfp4(blocks, scales.to(torch.uint8), torch.float32)[0, :, :4].tolist()
        [[0.5, 1.0, 0.5, 1.0], [1.0, 2.0, 1.0, 2.0]]
    """
    if blocks.numel() * 2 != scales.numel() * BLOCK or blocks.shape[:2] != scales.shape[:2]:
        raise ValueError(
            f"MXFP4 blocks of shape {tuple(blocks.shape)} need a scale for each 16 bytes, not scales of shape "
            f"{tuple(scales.shape)}."
        )
    if use_triton(implementation, blocks) and kernel_serves(
        implementation, "dequantising MXFP4", kernel_rejects(blocks, scales, dtype)
    ):
        from fastpack.ops.kernels import mxfp4 as kernels

        return kernels.dequantize_mxfp4(blocks, scales, dtype, offsets)
    return definition(blocks, scales, dtype)


def definition(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dense stack step by step; slow, with several times the result's memory."""
    wide = torch.promote_types(dtype, torch.float32)
    packed = blocks.reshape(*scales.shape, BLOCK // 2)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    values = torch.tensor(VALUES, dtype=wide, device=blocks.device)[nibbles.int()]
    factors = torch.ldexp(torch.ones_like(scales, dtype=wide), scales.int() - _BIAS)
    factors = factors.masked_fill(scales == _NAN, torch.nan)
    return (values * factors[..., None]).to(dtype).flatten(-2)


def quantize_mxfp4(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise matrices as the specification says: the scale is a power of two, so that the largest element fits.

    Args:
        dense: ``[E, O, I]`` of a float dtype; I is a multiple of 32.

    Returns:
        The blocks ``[E, O, G, 16]`` and the scales ``[E, O, G]``, both uint8. Elements are rounded to the nearest
        value, of two to the smaller one; what is larger than the largest value becomes that value.

    Raises:
        ValueError: I is not a multiple of 32.
    """
    if dense.shape[-1] % BLOCK:
        raise ValueError(
            f"MXFP4 has blocks of {BLOCK} elements, which matrices {tuple(dense.shape)} don't divide into."
        )
    groups = dense.detach().float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1)
    exponents = torch.frexp(largest).exponent - 1 - _LARGEST_POWER
    exponents = exponents.where(largest > 0, -_BIAS).clamp(-_BIAS, _NAN - 1 - _BIAS)
    scaled = torch.ldexp(groups, -exponents[..., None])
    values = torch.tensor(VALUES[:8], device=dense.device)
    codes = torch.bucketize(scaled.abs().contiguous(), (values[1:] + values[:-1]) / 2).to(torch.uint8)
    codes += (scaled.signbit() & (codes > 0)).to(torch.uint8) * 8
    return codes[..., ::2] | (codes[..., 1::2] << 4), (exponents + _BIAS).to(torch.uint8)


def kernel_rejects(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> str | None:
    """Return why the kernel can't dequantise this stack, or None."""
    if dtype not in KERNEL_DTYPES:
        return f"{dtype}, but supports float32, bfloat16 and float16"
    if not (blocks.is_contiguous() and scales.is_contiguous()):
        return "blocks or scales that are not contiguous"
    return "blocks that don't begin at a multiple of four bytes" if blocks.data_ptr() % 4 else None
