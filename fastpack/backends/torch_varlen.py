"""The varlen FlashAttention-2 kernel that torch itself ships (``torch.nn.attention.varlen``)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape
from fastpack.backends.limits import AMPERE, Limits, flash2_rejects, lacks
from fastpack.utils.compile import cached_constant

SERVES = ("window",)
LIMITS = Limits(AMPERE, (), "comes with torch")


def rejects(shape: AttentionShape) -> str | None:
    """Return why torch's varlen kernel can't compute this, or None."""
    without = ("softcap", "attention sinks", "dropout")
    return lacks(shape, "torch's varlen kernel", *without) or flash2_rejects(shape)


def run(call: AttentionCall) -> Tensor:
    """Return ``[T, H, V]``; the kernel reads grouped key/value heads without repeating them."""
    from torch.nn.attention.varlen import varlen_attn

    window = call.visibility.window
    out = varlen_attn(
        call.q,
        call.k,
        call.v,
        call.packed.cu_seqlens,
        call.packed.cu_seqlens,
        call.packed.max_seqlen,
        call.packed.max_seqlen,
        scale=call.scale,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped_heads(call.groups > 1),
    )
    assert isinstance(out, Tensor)  # the log-sum-exp is returned only on request
    return out


def grouped_heads(grouped: bool) -> dict[str, Any]:
    """Return the keyword argument for grouped key/value heads, or no keyword if this torch or call needs none."""
    return {"enable_gqa": True} if grouped and _asks_for_groups() else {}


@cached_constant
def _asks_for_groups() -> bool:
    # torch 2.11 accepts fewer key/value heads without a keyword; from 2.13 on it needs enable_gqa=True.
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
