"""Torch's memory-efficient (CUTLASS) kernel with ``cu_seqlens``: for older GPUs (T4), and for float32 on any GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape
from fastpack.backends.limits import FLOAT_DTYPES, Limits, lacks, needs_cuda, wrong_dtype, wrong_sizes

SERVES = ("window",)
LIMITS = Limits("any GPU, also a T4: fp16, fp32; from Ampere on, bf16", ("dropout",), "comes with torch")

CAUSAL_FROM_TOP_LEFT = 1


def rejects(shape: AttentionShape) -> str | None:
    """Return why the memory-efficient kernel can't compute this, or None."""
    return (
        lacks(shape, "the memory-efficient kernel", "softcap", "attention sinks")
        or needs_cuda(shape, (8, 0) if shape.dtype == torch.bfloat16 else (5, 0))
        or wrong_dtype(shape, FLOAT_DTYPES)
        or wrong_sizes(shape, multiple=4 if shape.dtype == torch.float32 else 8)
    )


def run(call: AttentionCall) -> Tensor:
    """Return ``[T, H, V]``; key/value heads are repeated, since this kernel has no grouped heads."""
    k, v = call.expanded_kv()
    return _MemEfficient.apply(call.q, k, v, call)


class _MemEfficient(torch.autograd.Function):
    """The kernel's forward and backward. Torch's own derivative of the forward ignores the window."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        packed = call.packed
        out, logsumexp, seed, offset, _, _ = torch.ops.aten._efficient_attention_forward(
            q[None],
            k[None],
            v[None],
            None,
            packed.cu_seqlens,
            packed.cu_seqlens,
            packed.max_seqlen,
            packed.max_seqlen,
            call.dropout,
            CAUSAL_FROM_TOP_LEFT,
            True,
            scale=call.scale,
            window_size=call.visibility.window,
        )
        ctx.save_for_backward(q, k, v, out, packed.cu_seqlens, logsumexp, seed, offset)
        ctx.settings = (packed.max_seqlen, call.dropout, call.scale, call.visibility.window)
        return out[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, cu_seqlens, logsumexp, seed, offset = ctx.saved_tensors
        max_seqlen, dropout, scale, window = ctx.settings
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            grad[None].contiguous(),
            q[None],
            k[None],
            v[None],
            None,
            out,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            logsumexp,
            dropout,
            seed,
            offset,
            CAUSAL_FROM_TOP_LEFT,
            False,
            scale=scale,
            window_size=window,
        )
        return dq[0], dk[0], dv[0], None
