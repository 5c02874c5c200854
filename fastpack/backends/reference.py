"""Plain float32 attention, a sequence at a time: the definition that every other backend is measured against.

It computes everything that an :class:`AttentionCall` can ask for, on any device, slowly. It takes queries in blocks, so
its scores are ``[block, keys]``, never T x T.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape
from fastpack.backends.limits import Limits

SERVES = ("window",)
LIMITS = Limits("anything; plain float32, slow", ("softcap", "sinks", "dropout"), "comes with fastpack")

QUERY_BLOCK = 512


def rejects(shape: AttentionShape) -> str | None:
    """Return None: this backend is the last resort and rejects nothing."""
    return None


def run(call: AttentionCall) -> Tensor:
    """Return ``[T, H, V]`` in the dtype of ``call.q``, computed in float32 (float64 for float64 inputs)."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    if call.sinks is not None:  # widened once, so that gradients of all sequences and blocks are summed before rounding
        call = replace(call, sinks=call.sinks.to(wide))
    out: list[Tensor] = []
    with torch.autocast(call.q.device.type, enabled=False):
        for q, k, v in call.runs():
            count, length = q.shape[:2]
            # [n, K, G, L, D] for queries, [n, K, L, D] for keys and values: grouped heads without a copy
            q = q.to(wide).unflatten(2, (-1, call.groups)).permute(0, 2, 3, 1, 4)
            k, v = (t.to(wide).transpose(1, 2) for t in (k, v))
            blocks = [_block(call, q[..., at : at + QUERY_BLOCK, :], k, v, at) for at in range(0, length, QUERY_BLOCK)]
            merged = torch.cat(blocks, -2) if len(blocks) > 1 else blocks[0]
            out.append(merged.permute(0, 3, 1, 2, 4).reshape(count * length, call.q.shape[1], -1))
    return torch.cat(out).to(call.q.dtype) if len(out) > 1 else out[0].to(call.q.dtype)


def _block(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
    """Attend with queries ``[n, K, G, block, D]``, which begin at position ``at``, to the keys that they may see."""
    end = at + q.shape[-2]
    first, seen = call.visibility.block(at, end, q.device)
    k, v = k[:, :, None, first:end], v[:, :, None, first:end]
    scores = q @ k.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if call.dropout:
        weights = torch.nn.functional.dropout(weights, call.dropout)
    return weights @ v
