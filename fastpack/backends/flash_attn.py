"""Dao-AILab's FlashAttention 2, 3 or 4, whichever is installed and serves this GPU.

Generation 2 is ``flash_attn.flash_attn_varlen_func``, 3 is ``flash_attn_interface.flash_attn_varlen_func``, 4 is
``flash_attn.cute.flash_attn_varlen_func``. They differ in the names of a few arguments and in what they can do.

Sources for their limits: generation 2 asserts that dropout is 0 if there is a softcap. Generation 4 refuses a softcap
in its varlen backward (Dao-AILab/flash-attention #2544) and gave sinks no gradient before #2706. Up to version 4.0.0b36
its gradients are silently wrong if the head size is not a multiple of 32 (#2896; measured here with 8 and 40 on an
H200), and on Blackwell if the head size is 256 (NVIDIA/TransformerEngine #3216).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape
from fastpack.backends.limits import (
    AMPERE,
    HALF_DTYPES,
    Limits,
    cuda_capability,
    flash2_rejects,
    lacks,
    needs_cuda,
    wrong_dtype,
)
from fastpack.utils.compile import cached_constant

SERVES = ("window",)
LIMITS = Limits(
    f"{AMPERE}; 3: Hopper; 4: Hopper or B200, head sizes that are multiples of 32",
    ("softcap (2, 3)", "dropout (2)"),
    "pip install flash-attn, or fastpack-train[flash4]",
)


@dataclass(frozen=True)
class Generation:
    """One generation of FlashAttention: where it lives and what it can do."""

    number: int
    module: str
    capabilities: tuple[int, ...]
    """Major compute capabilities on which fastpack uses this generation."""
    lacks: tuple[str, ...]
    """Features that its forward or backward lacks, as :func:`fastpack.backends.limits.lacks` names them."""
    no_window: int | None
    """The value that means "no limit" on the left of a window."""


GENERATIONS = (
    Generation(3, "flash_attn_interface", (9,), ("attention sinks", "dropout"), no_window=-1),
    Generation(4, "flash_attn.cute", (9, 10), ("softcap", "dropout"), no_window=None),
    Generation(2, "flash_attn", (8, 9, 10, 12), ("attention sinks",), no_window=-1),
)


LONG = 768
"""From this sequence length on, in tokens, generations 3 and 4 are preferred to fastpack's own kernel."""

NOT_INSTALLED = "not installed"


def rejects(shape: AttentionShape) -> str | None:
    """Return why no installed generation can compute this, or None."""
    if shape.device.type != "cuda":
        return needs_cuda(shape, (8, 0))
    why: dict[int, str] = {}
    for generation in GENERATIONS:
        reason = _rejects(generation, shape)
        if reason is None:
            return None
        if reason != NOT_INSTALLED:
            why[generation.number] = reason
    if not why:
        return "flash-attn is not installed (pip install flash-attn, or use attention='torch_varlen')"
    return "; ".join(f"FlashAttention {number}: {reason}" for number, reason in sorted(why.items()))


def serving(shape: AttentionShape) -> Generation | None:
    """Return the generation that computes this, or None."""
    return next((generation for generation in GENERATIONS if _rejects(generation, shape) is None), None)


def wins_on_long(shape: AttentionShape) -> bool:
    """Return whether sequences are long enough for generation 3 or 4 to be faster than fastpack's own kernel.

    Measured on an H200, forward and backward in a recorded graph, in ms, fastpack's kernel / generation 4 (4.0.0b36)::

        sequences                  32/8 heads of 128    14/2 heads of 64
        64 of 199 tokens           0.56 / 0.95          0.20 / 0.27
        12 of 700                  0.64 / 0.67          0.22 / 0.20
        8 of 1,024                 0.82 / 0.74          0.29 / 0.21
        1 of 8,192                 5.2  / 3.4           1.5  / 0.85
        1 of 8,192 and 20 of 100   5.2  / 3.4           1.6  / 0.86
    """
    generation = serving(shape) if shape.typical_length >= LONG else None
    return generation is not None and generation.number > 2


def run(call: AttentionCall) -> Tensor:
    """Return ``[T, H, V]``; the kernel reads grouped key/value heads without repeating them."""
    generation = serving(call.shape)
    assert generation is not None
    window = call.visibility.window
    keywords: dict[str, Any] = {
        "cu_seqlens_q": call.packed.cu_seqlens,
        "cu_seqlens_k": call.packed.cu_seqlens,
        "max_seqlen_q": call.packed.max_seqlen,
        "max_seqlen_k": call.packed.max_seqlen,
        "softmax_scale": call.scale,
        "causal": True,
        "window_size": ((generation.no_window, generation.no_window) if window is None else (window - 1, 0)),
    }
    if call.softcap is not None:
        keywords["softcap"] = call.softcap
    if call.sinks is not None:
        keywords["learnable_sink"] = call.sinks.to(torch.bfloat16)
    if call.dropout:
        keywords["dropout_p"] = call.dropout
    out = _function(generation.module)(call.q, call.k, call.v, **keywords)
    # generations 3 and 4 may return (out, log-sum-exp)
    return out[0] if isinstance(out, tuple) else out


def _rejects(generation: Generation, shape: AttentionShape) -> str | None:
    if not _installed(generation.module):
        return NOT_INSTALLED
    return _rejects_shape(generation, shape) or _import_error(generation.module)


def _rejects_shape(generation: Generation, shape: AttentionShape) -> str | None:
    capability = cuda_capability(shape)
    if capability is not None and capability[0] not in generation.capabilities:
        return f"does not support compute capability {capability[0]}.{capability[1]}"
    why = lacks(shape, "it", *generation.lacks)
    if why is not None:
        return why
    if shape.sinks and shape.needs_grad:
        return "it has no gradient for attention sinks"
    if shape.dropout and shape.softcap is not None:
        return "it has no dropout with a softcap"
    if generation.number == 2:
        return flash2_rejects(shape)
    why = needs_cuda(shape, (8, 0)) or wrong_dtype(shape, HALF_DTYPES)
    if why is None and (shape.head_dim > 256 or shape.head_dim % 8 or shape.value_dim != shape.head_dim):
        why = f"head sizes must be equal multiples of 8 up to 256, not {shape.head_dim} and {shape.value_dim}"
    if why is None and generation.number == 4 and shape.needs_grad:
        blackwell = capability is not None and capability[0] == 10
        if shape.head_dim % 32 or (blackwell and shape.head_dim > 128):
            why = f"its gradients are wrong with heads of {shape.head_dim}"
    return why


@cached_constant
def _installed(module: str) -> bool:
    parent = module.partition(".")[0]
    spec = importlib.util.find_spec(parent)
    if spec is None:
        return False
    if parent == module:
        return spec.origin is not None  # a folder without code of its own holds only generation 4
    try:
        return importlib.util.find_spec(module) is not None  # this imports the parent, which may be broken
    except (ImportError, OSError):
        return True


@cached_constant
def _import_error(module: str) -> str | None:
    # The import fails if the wheel is for another torch or CUDA, or if generation 2's wheel ships generation 4's source
    # without the dependencies.
    try:
        _function(module)
    except (ImportError, OSError, AttributeError) as error:
        return f"does not import with torch {torch.__version__}: {error}"
    return None


@functools.cache
def _function(module: str) -> Callable[..., Any]:
    return importlib.import_module(module).flash_attn_varlen_func
