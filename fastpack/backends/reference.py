"""Plain float32 attention, a sequence at a time: the definition that every other backend is measured against.

It computes everything that an :class:`AttentionCall` can ask for, on any device, slowly. It takes queries in blocks, so
its scores are ``[block, keys]``, never T x T.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape, Run
from fastpack.backends.limits import Limits

SERVES = ("window", "two_way")
LIMITS = Limits("anything; plain float32, slow", ("softcap", "sinks", "dropout", "image blocks"), "comes with fastpack")

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
        for run in call.runs():
            count, length = run.q.shape[:2]
            # [n, K, G, L, D] for queries, [n, K, L, D] for keys and values: grouped heads without a copy
            q = run.q.to(wide).unflatten(2, (-1, call.groups)).permute(0, 2, 3, 1, 4)
            k, v = (t.to(wide).transpose(1, 2) for t in (run.k, run.v))
            blocks = [_block(call, run, q, k, v, at) for at in range(0, length, QUERY_BLOCK)]
            merged = torch.cat(blocks, -2) if len(blocks) > 1 else blocks[0]
            out.append(merged.permute(0, 3, 1, 2, 4).reshape(count * length, call.q.shape[1], -1))
    return torch.cat(out).to(call.q.dtype) if len(out) > 1 else out[0].to(call.q.dtype)


def _block(call: AttentionCall, run: Run, q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
    """Attend with the queries ``[n, K, G, block, D]`` from position ``at`` on to the keys that they may see."""
    q = q[..., at : at + QUERY_BLOCK, :]
    keys, seen = call.block(run, at, at + q.shape[-2])
    k, v = k[:, :, None, keys], v[:, :, None, keys]
    seen = seen if seen.ndim == 2 else seen[:, None, None]
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
