"""Limits that several attention kernels share, and the limits of every FlashAttention-2 build."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastpack.backends.call import AttentionShape
from fastpack.utils.compile import constant

INT32_LIMIT = 2**31
HALF_DTYPES = (torch.float16, torch.bfloat16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32)
AMPERE = "a GPU from Ampere on, fp16 or bf16"


class Limits(NamedTuple):
    """The limits of a backend in words, for ``fastpack doctor``.

    Attributes:
        needs: the devices and dtypes that it needs.
        serves: the features that it trains with beyond causal attention and sliding windows: ``softcap``, ``sinks``,
            ``dropout``, and ``image blocks`` that see ahead. Numbers in parentheses are generations of flash-attn.
        install: how to install it.
    """

    needs: str
    serves: tuple[str, ...]
    install: str


def cuda_capability(shape: AttentionShape) -> tuple[int, int] | None:
    """Return the compute capability of the shape's device, or None if it is not a CUDA device of this machine."""
    if shape.device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _capability(shape.device)


@constant
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def needs_cuda(shape: AttentionShape, minimum: tuple[int, int]) -> str | None:
    """Return why the device is not a CUDA device of at least this compute capability, or None."""
    capability = cuda_capability(shape)
    if capability is None:
        return f"needs a CUDA device, not {shape.device.type}"
    if capability < minimum:
        required, actual = (".".join(map(str, pair)) for pair in (minimum, capability))
        return f"needs compute capability {required}, this GPU has {actual}"
    return None


def lacks(shape: AttentionShape, kernel: str, *features: str) -> str | None:
    """Return why a kernel without these features can't serve a shape, or None.

    Args:
        shape: the attention to compute.
        kernel: the kernel's name in the message.
        *features: the features that the kernel lacks: any of ``softcap``, ``attention sinks`` and ``dropout``.
    """
    needed = {"softcap": shape.softcap is not None, "attention sinks": shape.sinks, "dropout": shape.dropout > 0}
    for feature in features:
        if needed[feature]:
            return f"{kernel} has no {feature}"
    return None


def wrong_dtype(shape: AttentionShape, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Return why a kernel for these dtypes can't serve a shape, or None."""
    if shape.dtype in dtypes:
        return None
    *others, last, dtype = (str(dtype).removeprefix("torch.") for dtype in (*dtypes, shape.dtype))
    return f"takes {', '.join(others)} and {last}, not {dtype}"


def wrong_sizes(shape: AttentionShape, *, multiple: int = 1, least: int = 1, most: int | None = None) -> str | None:
    """Return why a kernel with these limits on the sizes of keys and values can't serve a shape, or None."""
    sizes = (shape.head_dim, shape.value_dim)
    limit = None
    if sizes[0] % multiple or sizes[1] % multiple:
        limit = f"multiples of {multiple}"
    elif most is not None and max(sizes) > most:
        limit = f"at most {most}"
    elif min(sizes) < least:
        limit = f"at least {least}"
    return None if limit is None else f"head sizes must be {limit}, not {sizes[0]} and {sizes[1]}"


def flash2_rejects(shape: AttentionShape) -> str | None:
    """Return why a FlashAttention-2 varlen kernel can't serve a shape, or None.

    Softcap, sinks and dropout are not checked, since builds differ in them.
    """
    why = needs_cuda(shape, (8, 0)) or wrong_dtype(shape, HALF_DTYPES)
    if why is not None:
        return why
    if shape.head_dim > 256 or shape.head_dim % 8:
        return f"head size must be a multiple of 8 up to 256, not {shape.head_dim}"
    if shape.value_dim != shape.head_dim:
        return f"keys and values must have one head size, not {shape.head_dim} and {shape.value_dim}"
    if shape.needs_grad and flash2_accumulator(shape) >= INT32_LIMIT:
        return (
            f"its backward would index past 2^31 elements (T = {shape.total_tokens}, N = {shape.num_sequences}); "
            "use fewer tokens per batch"
        )
    return None


def flash2_accumulator(shape: AttentionShape) -> int:
    """Return the size of the float32 dq accumulator in FlashAttention-2's varlen backward, which int32 indexes.

    The kernel pads each sequence to a multiple of 128 tokens and the head size to a multiple of 32.
    """
    head_dim = -(-shape.head_dim // 32) * 32
    return (shape.total_tokens + 128 * shape.num_sequences) * shape.num_heads * head_dim
