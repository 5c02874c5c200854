"""Packed causal attention, backward: the gradient of the queries.

With the same numbers of tokens and sequences, equal inputs give equal bits.

Shape suffixes as in :mod:`fastpack.ops.kernels.attention`.

This launch takes tiles of queries, as the forward does. A program holds the gradient of its rows anyway, so it also
computes ``delta``, the row sums of this gradient times the result, for :mod:`fastpack.ops.kernels.attention_keys`. A
separate launch for ``delta`` would read both tensors once more.

Source: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, with one kernel for each of its two loops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.attention import (
    CAUSAL,
    NO_TREE,
    AttentionTile,
    Ranges,
    Scores,
    Tree,
    chosen,
    parts_of,
    sizes,
    slots,
    strides,
)
from fastpack.ops.kernels.attention_parts import (
    bounded,
    load_edge,
    load_keys,
    load_rows,
    locate,
    per_row,
    ranges_of,
    rows_of,
    store_rows,
    visible,
)
from fastpack.ops.kernels.launch import early, on_device, rows_that_count, wait_for_inputs

QUERIES: dict[int, AttentionTile] = {
    # by the same sizes as attention.FORWARD
    64: AttentionTile(rows=64, keys=32, warps=4, stages=3, registers=96),
    128: AttentionTile(rows=64, keys=32, warps=4, stages=2, split=True, registers=168),
    256: AttentionTile(rows=64, keys=32, warps=8, stages=2),
}


@triton.jit
def _walk_keys(
    q, grad, dq, lse, delta, token, first_key, end_key, K, V, low, high, end, shift,
    k_token, v_token, window, inner, outer,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    for first in tl.range(low, high, KEYS):
        k = load_keys(K, first, end, k_token, KEYS, D, BLOCK_D, MASKED)
        score = bounded(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, CAPPED)
        weight = tl.exp2(score * outer - lse[:, None])
        if MASKED:
            key = first + tl.arange(0, KEYS)
            place = key
            if shift is not None:
                place = key - shift
            sees = visible(token[:, None], place[None, :], window, key[None, :], first_key, end_key, WINDOWED)
            if shift is not None:
                sees = sees & (key < end)[None, :]
            weight = tl.where(sees, weight, 0.0)
        v = load_keys(V, first, end, v_token, KEYS, VALUES, BLOCK_V, MASKED)
        slope = weight * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])
        if CAPPED:
            slope *= 1.0 - score * score
        dq = tl.dot(slope.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["arrivals", "sequences", "window"])
def queries_kernel(
    Q, K, V, OUT, GRAD, LSE, DELTA, DQ, ARRIVALS, arrivals, FIRST_KEY, END_KEY, PATHS, OF_SEGMENT, cu_seqlens,
    count, sequences, window, inner, outer, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write DQ and, for :func:`keys_kernel`, DELTA ``[T, H]`` and zeros in ARRIVALS. The grid is the forward's."""
    wait_for_inputs(EARLY)
    if ARRIVALS is not None:
        tl.store(ARRIVALS + tl.program_id(0), 0, mask=tl.program_id(0) < arrivals)
    BLOCK_T: tl.constexpr = ROWS // PART
    slot = tl.program_id(0) // (KV_HEADS * PARTS)
    kv_head = tl.program_id(0) // PARTS % KV_HEADS
    part = tl.program_id(0) % PARTS
    sequence, begin, end, tile = locate(cu_seqlens, slot, sequences, BLOCK_T)
    tiles = tl.cdiv(end - begin, BLOCK_T)
    if tile >= tiles:
        return
    first = begin + (tiles - 1 - tile) * BLOCK_T
    token, _heads, valid = rows_of(first, end, part, ROWS, GROUP, PART)

    group = kv_head.to(tl.int64) * GROUP
    dq = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    delta_rows = per_row(DELTA + group, first, part, KV_HEADS * GROUP, ROWS, PART)
    DQ += group * D
    if begin >= rows_that_count(count, end):
        tl.store(delta_rows, tl.zeros((ROWS,), dtype=tl.float32), mask=valid)
        store_rows(DQ, dq, first, end, part, KV_HEADS * GROUP, ROWS, GROUP, PART, D, BLOCK_D)
        return
    # fmt: off
    q = load_rows(
        Q + group * q_head, first, end, part, q_token, q_head, ROWS, GROUP, PART, D, BLOCK_D
    )
    grad = load_rows(
        GRAD + group * grad_head, first, end, part, grad_token, grad_head, ROWS, GROUP, PART, VALUES, BLOCK_V
    )
    out = load_rows(
        OUT + group * VALUES, first, end, part, KV_HEADS * GROUP * VALUES, VALUES,
        ROWS, GROUP, PART, VALUES, BLOCK_V
    )
    # fmt: on
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse = tl.load(per_row(LSE + group, first, part, KV_HEADS * GROUP, ROWS, PART), mask=valid, other=0.0)
    tl.store(delta_rows, delta, mask=valid)

    K += kv_head.to(tl.int64) * k_head
    V += kv_head.to(tl.int64) * v_head
    # fmt: off
    if PATHS is not None:
        for edge in range(tl.load(OF_SEGMENT + sequence), tl.load(OF_SEGMENT + sequence + 1)):
            low, high, _first_query, _end_query, shift = load_edge(PATHS, edge)
            if WINDOWED:
                low = tl.maximum(low, first - window + 1 + shift)
            if SPLIT and not WINDOWED:
                full = low + (high - low) // KEYS * KEYS
                dq = _walk_keys(
                    q, grad, dq, lse, delta, token, None, None, K, V, low, full, high, shift,
                    k_token, v_token, window, inner, outer,
                    D, VALUES, BLOCK_D, BLOCK_V, KEYS, False, WINDOWED, CAPPED,
                )
                low = full
            dq = _walk_keys(
                q, grad, dq, lse, delta, token, None, None, K, V, low, high, high, shift,
                k_token, v_token, window, inner, outer,
                D, VALUES, BLOCK_D, BLOCK_V, KEYS, True, WINDOWED, CAPPED,
            )
    # fmt: on
    low = begin
    if WINDOWED:
        low = tl.maximum(begin, first - window + 1)
    high = tl.minimum(first + BLOCK_T, end)
    first_key, end_key = None, None
    if FIRST_KEY is not None:
        first_key, end_key = ranges_of(FIRST_KEY, END_KEY, token, valid)
        low, high = tl.load(FIRST_KEY + first), tl.load(END_KEY + high - 1)
    # fmt: off
    if SPLIT and not WINDOWED:
        seen_by_all = first + 1  # one past the last key that every row sees
        if FIRST_KEY is not None:
            seen_by_all = tl.load(END_KEY + first)
        full = low + (seen_by_all - low) // KEYS * KEYS
        dq = _walk_keys(
            q, grad, dq, lse, delta, token, first_key, end_key, K, V, low, full, high, None,
            k_token, v_token, window, inner, outer,
            D, VALUES, BLOCK_D, BLOCK_V, KEYS, False, WINDOWED, CAPPED,
        )
        low = full
    dq = _walk_keys(
        q, grad, dq, lse, delta, token, first_key, end_key, K, V, low, high, high, None,
        k_token, v_token, window, inner, outer,
        D, VALUES, BLOCK_D, BLOCK_V, KEYS, True, WINDOWED, CAPPED,
    )
    # fmt: on
    store_rows(DQ, dq * scale, first, end, part, KV_HEADS * GROUP, ROWS, GROUP, PART, D, BLOCK_D)


def queries(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scores: Scores,
    rows: Tensor | None = None,
    arrivals: Tensor | None = None,
    seen_keys: Ranges = CAUSAL,
    paths: Tree = NO_TREE,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of q and the delta that :func:`keys` needs.

    Args:
        grad: ``[T, H, V]``, the gradient of the result, as :func:`~fastpack.ops.kernels.attention.readable` returns it.
        q: as in the forward.
        k: as in the forward.
        v: as in the forward.
        out: the forward's result.
        lse: the forward's log-sum-exp.
        cu_seqlens: as in the forward.
        scores: as in the forward.
        rows: as in the forward.
        arrivals: the result of :func:`make_arrivals`; the kernel sets it to zero.
        seen_keys: as in the forward.
        paths: as in the forward.

    Returns:
        The gradient ``[T, H, D]``, contiguous and in q's dtype, and delta, float32 ``[T, H]``: for each head, the sum
        of result times gradient.
    """
    tile = chosen(QUERIES, q, v, streams_keys=True)
    part, parts = parts_of(q.shape[1] // k.shape[1])
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    with on_device(q):
        queries_kernel[(slots(cu_seqlens, len(q), tile.rows // part) * k.shape[1] * parts,)](
            q, k, v, out, grad, lse, delta, dq, arrivals, 0 if arrivals is None else len(arrivals), *seen_keys, *paths,
            cu_seqlens, rows, cu_seqlens.numel() - 1, *scores.arguments, scores.scale, *strides(q, k, v, grad),
            **sizes(q, k, v), **scores.flags, **tile.arguments, **early(q),
        )  # fmt: skip
    return dq, delta
