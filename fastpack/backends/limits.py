"""What kernels of one lineage have in common: the limits of FlashAttention-2, whoever ships it."""

from __future__ import annotations

import torch

from fastpack.backends.call import AttentionShape
from fastpack.utils.compile import constant

INT32_LIMIT = 2**31
HALF_DTYPES = (torch.float16, torch.bfloat16)


def cuda_capability(shape: AttentionShape) -> tuple[int, int] | None:
    """Compute capability of the shape's device, or None where it is not a CUDA device of this machine."""
    if shape.device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _capability(shape.device)


@constant
def _capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def needs_cuda(shape: AttentionShape, minimum: tuple[int, int]) -> str | None:
    """Why the device is not a CUDA device of at least this compute capability, or None."""
    capability = cuda_capability(shape)
    if capability is None:
        return f"needs a CUDA device, not {shape.device.type}"
    if capability < minimum:
        wanted, found = (".".join(map(str, pair)) for pair in (minimum, capability))
        return f"needs compute capability {wanted}, this GPU has {found}"
    return None


def flash2_rejects(shape: AttentionShape) -> str | None:
    """Why a FlashAttention-2 varlen kernel can't serve, apart from softcap, sinks and dropout; or None."""
    why = needs_cuda(shape, (8, 0))
    if why is not None:
        return why
    if shape.dtype not in HALF_DTYPES:
        return f"takes float16 and bfloat16, not {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim > 256 or shape.head_dim % 8:
        return f"head size must be a multiple of 8 up to 256, not {shape.head_dim}"
    if shape.value_dim != shape.head_dim:
        return f"keys of {shape.head_dim} with values of {shape.value_dim}"
    if shape.needs_grad and flash2_accumulator(shape) >= INT32_LIMIT:
        return (
            f"its backward would index past 2^31 elements (T = {shape.total_tokens}, N = {shape.num_sequences}); "
            "use fewer tokens a batch"
        )
    return None


def flash2_accumulator(shape: AttentionShape) -> int:
    """Elements of the float32 dq accumulator of FlashAttention-2's varlen backward, indexed with an int32.

    It pads each sequence to a multiple of 128 tokens and the head size to a multiple of 32.
    """
    head_dim = -(-shape.head_dim // 32) * 32
    return (shape.total_tokens + 128 * shape.num_sequences) * shape.num_heads * head_dim
