"""Torch's scaled_dot_product_attention, a run of equally long sequences at a time: for CPUs and Apple chips.

It needs no padding and no varlen kernel: neighbouring sequences of equal length share a call, as a batch. If a window
is shorter than a sequence, queries are taken in blocks, each with a band mask of at most ``[block, block + window]``.
If images have blocks that see ahead, queries are taken in blocks, too, each with a mask ``[block, keys]``.
Long sequences for which torch has no fused kernel are taken in blocks too, so that only one block's scores exist at
once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastpack.backends.call import AttentionCall, AttentionShape, Run
from fastpack.backends.limits import HALF_DTYPES, Limits, lacks

SERVES = ("window", "two_way")
LIMITS = Limits("anything: a CPU, an Apple chip", ("dropout", "image blocks"), "comes with torch")

QUERY_BLOCK = 512


def rejects(shape: AttentionShape) -> str | None:
    """Return why scaled_dot_product_attention can't compute this, or None."""
    return lacks(shape, "scaled_dot_product_attention", "softcap", "attention sinks")


def run(call: AttentionCall) -> Tensor:
    """Return ``[T, H, V]``."""
    out: list[Tensor] = []
    with _kernels(call.q.device):
        causal = call.visibility.two_way is None
        for run in call.runs():
            q, k, v = (t.transpose(1, 2) for t in (run.q, run.k, run.v))
            length = q.shape[2]
            whole = causal and (call.window is None or call.window >= length)
            if whole and (length <= QUERY_BLOCK or _has_fused_kernel(call)):
                block = _sdpa(call, q, k, v, None)
            else:
                block = torch.cat([_banded(call, run, q, k, v, at) for at in range(0, length, QUERY_BLOCK)], 2)
            out.append(block.transpose(1, 2).flatten(0, 1))
    return torch.cat(out) if len(out) > 1 else out[0]


def _has_fused_kernel(call: AttentionCall) -> bool:
    if call.dropout or call.q.shape[2] != call.v.shape[2]:
        return False
    # on a GPU, only FlashAttention reads grouped heads without repeating them, and only in half precision
    return call.q.device.type != "cuda" or call.groups == 1 or call.q.dtype in HALF_DTYPES


def _banded(call: AttentionCall, run: Run, q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
    q = q[:, :, at : at + QUERY_BLOCK]
    keys, seen = call.block(run, at, at + q.shape[2])
    return _sdpa(call, q, k[:, :, keys], v[:, :, keys], seen if seen.ndim == 2 else seen[:, None])


def _sdpa(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=mask is None,
        scale=call.scale,
        enable_gqa=call.groups > 1,
    )


def _kernels(device: torch.device) -> AbstractContextManager[None]:
    # On a GPU, cuDNN builds a plan for every new length (~150 ms each): a loop over lengths must not use it.
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
