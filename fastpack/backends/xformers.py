"""xformers' memory_efficient_attention with a ``BlockDiagonalCausalMask``."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape
from fastpack.backends.limits import needs_cuda
from fastpack.compiling import known_once


def rejects(shape: AttentionShape) -> str | None:
    """Why xformers can't compute this, or None."""
    why = needs_cuda(shape, (7, 0)) if shape.device.type != "cuda" else _unusable()
    if why is not None:
        return why
    if torch.compiler.is_compiling():
        return "in a compiled region its mask, made of lengths on the host, would wait for the device in each layer"
    if shape.softcap is not None:
        return "xformers has no softcap"
    if shape.sinks:
        return "xformers has no attention sinks"
    why = needs_cuda(shape, (8, 0) if shape.dtype == torch.bfloat16 else (7, 0))
    if why is not None:
        return why
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim % 8 or shape.value_dim % 8:
        return f"head sizes must be multiples of 8, not {shape.head_dim} and {shape.value_dim}"
    return None


def run(call: AttentionCall) -> Tensor:
    """``[T, H, V]``; key/value heads are repeated, since xformers trains without grouped heads only."""
    from xformers.ops import memory_efficient_attention

    k, v = call.expanded_kv()
    window = call.effective_window
    out: Tensor = memory_efficient_attention(
        call.q[None],
        k[None],
        v[None],
        attn_bias=call.packed.memo(("xformers", window, call.q.device), lambda: _bias(call, window)),
        p=call.dropout,
        scale=call.scale,
    )
    return out[0]


def _bias(call: AttentionCall, window: int | None) -> Any:
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    bias = BlockDiagonalCausalMask.from_seqlens(list(call.packed.lengths), device=call.q.device)
    return bias if window is None else bias.make_local_attention(window)


@known_once
def _unusable() -> str | None:
    if importlib.util.find_spec("xformers") is None:
        return "xformers is not installed (pip install xformers)"
    try:
        from xformers.ops.fmha import common
    except (ImportError, OSError) as error:
        return f"xformers does not import with torch {torch.__version__}: {error}"
    # Its wheels hold kernels for one torch and CUDA only; elsewhere every call says "wasn't build with CUDA support".
    if not getattr(common, "_built_with_cuda", True):
        return f"this xformers wheel holds no CUDA kernels for torch {torch.__version__}"
    return None
