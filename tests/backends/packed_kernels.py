"""Helpers that call fastpack's own attention kernels with chosen tiles, and collect their launchers' results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import Case
from torch import Tensor

from fastpack.backends.call import AttentionCall
from fastpack.packing.seqlens import PackedSeqLens

pytest.importorskip("triton")
from fastpack.ops.kernels import attention, attention_keys, attention_queries
from fastpack.ops.kernels.attention import AttentionTile, Scores

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
FLOAT, HALF = torch.float32, torch.float16

# several tiles of keys and of rows in a sequence of 33 tokens, and rows that belong to no token
ONE_LOOP, TWO_LOOPS, WIDE = (
    AttentionTile(rows=rows, keys=16, warps=4, stages=1, split=split)
    for rows, split in ((16, False), (16, True), (32, True))
)
TILED = [
    (Case(groups=7, head_dim=8), ONE_LOOP),
    (Case(groups=7, head_dim=8), WIDE),
    (Case(groups=1, head_dim=8), TWO_LOOPS),
    (Case(groups=1, head_dim=8, window=7), TWO_LOOPS),
    (Case(groups=1, head_dim=8, window=2), ONE_LOOP),
    (Case(groups=4, head_dim=8, softcap=1.5, sinks=True), TWO_LOOPS),
    (Case(groups=3, head_dim=8, window=17, sinks=True), ONE_LOOP),
    (Case(groups=17, head_dim=8), WIDE),
]

Cut = Callable[[AttentionTile], None]
"""A function that sets every kernel's tile: a fixture of :mod:`conftest`."""


def make(lengths: list[int], *, heads: int = 2, kv_heads: int = 1, size: int = 16, **settings: Any) -> AttentionCall:
    """Return a call on random float32 heads."""
    generator = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths)
    q, k, v = (torch.randn(total, count, size, generator=generator) for count in (heads, kv_heads, kv_heads))
    return AttentionCall(q, k, v, PackedSeqLens.from_lengths(lengths), size**-0.5, **settings)


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def all_of(call: AttentionCall, cu_seqlens: Tensor, grad: Tensor, rows: Tensor | None = None) -> list[Tensor]:
    """Return the result, the log-sum-exp and the gradients, straight from the launchers."""
    return all_and_arrivals(call, cu_seqlens, grad, rows)[0]


def all_and_arrivals(
    call: AttentionCall, cu_seqlens: Tensor, grad: Tensor, rows: Tensor | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """Return :func:`all_of`, and the number of finished pieces of each walk over queries, if walks may be shared."""
    q, k, v = call.q, call.k, call.v
    scores = Scores(call.scale, call.window, call.softcap)
    out, lse = attention.forward(q, k, v, call.sinks, cu_seqlens, scores, rows=rows)
    arrivals = attention_keys.make_arrivals(q, k, v, cu_seqlens)
    if arrivals is not None:
        arrivals.fill_(77)  # memory may hold anything
    shared = {"rows": rows, "arrivals": arrivals}
    dq, delta = attention_queries.queries(grad, q, k, v, out, lse, cu_seqlens, scores, **shared)
    dk, dv = attention_keys.keys(grad, q, k, v, lse, delta, cu_seqlens, scores, **shared)
    return [out, lse, dq, dk, dv], arrivals


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def on_gpu(lengths: list[int], heads: int, kv_heads: int, size: int) -> AttentionCall:
    call = make(lengths, heads=heads, kv_heads=kv_heads, size=size)
    q, k, v = (t.to("cuda", torch.bfloat16).requires_grad_() for t in (call.q, call.k, call.v))
    return AttentionCall(q, k, v, PackedSeqLens.from_lengths(lengths, device="cuda"), call.scale)
