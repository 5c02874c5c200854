"""Fastpack's own Triton kernels for short packed sequences: each tile holds a few tokens and a group of heads.

Sequences that begin alike may be the segments of a tree (:class:`fastpack.packing.prefix_tree.PrefixTree`), whose keys
are stored once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastpack.backends.call import AttentionCall, AttentionShape, Kept, stored_or_computed
from fastpack.backends.limits import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    Limits,
    cuda_capability,
    lacks,
    needs_cuda,
    wrong_dtype,
    wrong_sizes,
)
from fastpack.ops.autograd import differentiable_once
from fastpack.ops.implementation import triton_installed
from fastpack.ops.row_count import rows_of
from fastpack.utils.compile import cached_constant

if TYPE_CHECKING:
    from fastpack.ops.kernels.attention import Scores

SERVES = ("window", "two_way", "segments")
LIMITS = Limits(
    "a GPU from Ampere on; on Hopper, auto prefers it for head sizes 64 to 128, but takes flash-attn 3 or 4 if most "
    "tokens are in sequences of 768 or more",
    ("softcap", "sinks", "image blocks"),
    "pip install triton",
)


def rejects(shape: AttentionShape) -> str | None:
    """Return why these kernels can't compute this, or None."""
    return (
        lacks(shape, "fastpack's own kernel", "dropout")
        or needs_cuda(shape, (8, 0))  # Triton does not use the matrix units of older GPUs
        or wrong_dtype(shape, FLOAT_DTYPES)
        or wrong_sizes(shape, least=16, most=256)
        or (None if _installed() else "needs Triton (pip install triton)")
    )


def wins(shape: AttentionShape) -> bool:
    """Return whether this kernel was measured to be faster than FlashAttention-2, on short and on long sequences.

    Measured on an H200, forward and backward, in ms, this kernel / torch's / flash-attn 2.8.3::

        sequences                      32/8 heads of 128     14/2 heads of 64
        16 with 3,844 tokens in all    0.21 / 0.46 / 0.43    0.08 / 0.15 / 0.14
        1 of 8,192                     5.2  / 6.5  / 6.1     1.5  / 1.8  / 1.7

    It was compared with torch's kernel at 17 other numbers of heads, too.
    """
    capability = cuda_capability(shape)
    plain = shape.softcap is None and not shape.sinks and shape.dtype in HALF_DTYPES
    return plain and capability is not None and capability[0] == 9 and 64 <= shape.head_dim <= 128


def run(call: AttentionCall) -> Tensor:
    """Return ``[T, H, V]``; the kernel doesn't repeat grouped key/value heads, and reads lengths only on the device."""
    from fastpack.ops.kernels.attention import Scores, readable

    q, k, v = (readable(t) for t in (call.q, call.k, call.v))
    scale = call.scale
    if scale <= 0:  # the kernel looks for the largest score before it scales
        q, scale = q * (-1 if scale else 0), abs(scale) or 1.0
    scores = Scores(scale, call.visibility.window, call.softcap)
    rows, ranges = rows_of(call.packed.row_count), call.seen_ranges
    shared, cu_seqlens = call.packed.shared, call.packed.cu_seqlens
    seen: tuple[Tensor | None, ...] = (None,) * 4
    edges: tuple[Tensor | None, ...] = (None,) * 4
    if ranges is not None:
        seen = (ranges.first_key, ranges.end_key, ranges.first_query, ranges.end_query)
    if shared is not None:
        cu_seqlens, paths, branches = shared.tree.cu_seqlens, shared.tree.paths, shared.tree.branches
        edges = (paths.table, paths.offsets, branches.table, branches.offsets)
    kept = None
    # Not for sinks: the first of two runs under reentrant checkpointing has no gradients, and rounds what they need
    # exactly. Not in a CUDA graph, where only the device knows the lengths.
    if call.store is not None and call.sinks is None and call.packed.knows_lengths:
        kept = (call.store, call.operations)
    return _TritonPacked.apply(q, k, v, call.sinks, cu_seqlens, rows, scores, kept, *seen, *edges)


@cached_constant
def _installed() -> bool:
    return triton_installed()


class _TritonPacked(torch.autograd.Function):
    """The kernels' forward and backward, which saves the result and log-sum-exps, and recomputes attention weights."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor,
        rows: Tensor | None,
        scores: Scores,
        kept: Kept,
        *layout: Tensor | None,
    ) -> Tensor:
        from fastpack.ops.kernels import attention

        # the gradient of a sink is a sum over all tokens: computed from a rounded result, it would lose small terms
        exact = torch.float32 if ctx.needs_input_grad[3] else None
        seen = {"seen_keys": layout[:2], "paths": layout[4:6]}
        out, lse = stored_or_computed(
            kept, lambda: [*attention.forward(q, k, v, sinks, cu_seqlens, scores, dtype=exact, rows=rows, **seen)]
        )
        ctx.save_for_backward(q, k, v, sinks, out, lse, cu_seqlens, rows, *layout)
        ctx.scores = scores
        return out.to(q.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from fastpack.ops.kernels import attention, attention_keys, attention_queries

        q, k, v, sinks, out, lse, cu_seqlens, rows, *layout = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad = attention.readable(grad)
        of_keys = needed[1] or needed[2]
        arrivals = attention_keys.make_arrivals(q, k, v, cu_seqlens) if of_keys else None
        shared = {"rows": rows, "arrivals": arrivals}
        dq, delta = attention_queries.queries(
            grad, q, k, v, out, lse, cu_seqlens, ctx.scores, **shared, seen_keys=layout[:2], paths=layout[4:6]
        )
        dk = dv = dsinks = None
        if of_keys:
            shared |= {"seeing_queries": layout[2:4], "branches": layout[6:]}
            dk, dv = attention_keys.keys(grad, q, k, v, lse, delta, cu_seqlens, ctx.scores, **shared)
        if sinks is not None and needed[3]:
            # a sink's weight times (0 - delta), since the sink carries no value; summed once, in float32
            weight = torch.exp2(sinks.float() * attention.LOG2E - lse)
            dsinks = (weight * delta).sum(0).neg().to(sinks.dtype)
        return dq, dk, dv, dsinks, *(None,) * 12
