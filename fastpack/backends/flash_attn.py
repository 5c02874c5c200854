"""Dao-AILab's FlashAttention 2, 3 or 4, whichever is installed and serves this GPU.

Generation 2 is ``flash_attn.flash_attn_varlen_func``, 3 is ``flash_attn_interface.flash_attn_varlen_func``, 4 is
``flash_attn.cute.flash_attn_varlen_func``. They differ in the names of a few arguments and in what they can do.

Sources for what they can't: 2 checks that dropout is 0 where there is a softcap; 4 refuses a softcap in its varlen
backward (Dao-AILab/flash-attention #2544), and gave no gradient to sinks before #2706.
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
from fastpack.backends.limits import HALF_DTYPES, cuda_capability, flash2_rejects, needs_cuda
from fastpack.compiling import known_once


@dataclass(frozen=True)
class Generation:
    """One generation of FlashAttention: where it lives and what it can do."""

    number: int
    module: str
    capabilities: tuple[int, ...]
    """Major compute capabilities that it is the better choice on, in its order of preference."""
    softcap: bool
    """Forward and backward."""
    sinks: bool
    """Forward only: none is counted on to give the sinks a gradient."""
    dropout: bool
    no_window: int | None
    """What stands for "no limit" on the left of a window."""


GENERATIONS = (
    Generation(3, "flash_attn_interface", (9,), softcap=True, sinks=False, dropout=False, no_window=-1),
    Generation(4, "flash_attn.cute", (9, 10), softcap=False, sinks=True, dropout=False, no_window=None),
    Generation(2, "flash_attn", (8, 9, 10, 12), softcap=True, sinks=False, dropout=True, no_window=-1),
)


NOT_INSTALLED = "not installed"


def rejects(shape: AttentionShape) -> str | None:
    """Why no installed generation can compute this, or None."""
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


def run(call: AttentionCall) -> Tensor:
    """``[T, H, V]``; grouped key/value heads are read as they are."""
    shape = call.shape
    generation = next(g for g in GENERATIONS if _rejects(g, shape) is None)
    window = call.effective_window
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
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def _rejects(generation: Generation, shape: AttentionShape) -> str | None:
    if not _installed(generation.module):
        return NOT_INSTALLED
    return _rejects_shape(generation, shape) or _import_error(generation.module)


def _rejects_shape(generation: Generation, shape: AttentionShape) -> str | None:
    capability = cuda_capability(shape)
    if capability is not None and capability[0] not in generation.capabilities:
        return f"does not serve compute capability {capability[0]}.{capability[1]}"
    if shape.softcap is not None and not generation.softcap:
        return "no softcap"
    if shape.sinks and not generation.sinks:
        return "no attention sinks"
    if shape.sinks and shape.needs_grad:
        return "no gradient of attention sinks"
    if shape.dropout and not generation.dropout:
        return "no dropout"
    if shape.dropout and shape.softcap is not None:
        return "no dropout with a softcap"
    if generation.number == 2:
        return flash2_rejects(shape)
    why = needs_cuda(shape, (8, 0))
    if why is None and shape.dtype not in HALF_DTYPES:
        why = f"takes float16 and bfloat16, not {str(shape.dtype).removeprefix('torch.')}"
    if why is None and (shape.head_dim > 256 or shape.head_dim % 8 or shape.value_dim != shape.head_dim):
        why = f"head sizes {shape.head_dim} and {shape.value_dim}"
    return why


@known_once
def _installed(module: str) -> bool:
    parent = module.partition(".")[0]
    if importlib.util.find_spec(parent) is None:
        return False
    if parent == module:
        return True
    try:
        return importlib.util.find_spec(module) is not None  # imports the parent, which may be broken
    except (ImportError, OSError):
        return True


@known_once
def _import_error(module: str) -> str | None:
    # A wheel for another torch or CUDA, or generation 4's source shipped beside 2 without what it needs.
    try:
        _function(module)
    except (ImportError, OSError, AttributeError) as error:
        return f"does not import with torch {torch.__version__}: {error}"
    return None


@functools.cache
def _function(module: str) -> Callable[..., Any]:
    function: Callable[..., Any] = importlib.import_module(module).flash_attn_varlen_func
    return function
