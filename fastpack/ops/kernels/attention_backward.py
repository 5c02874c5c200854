"""Packed causal attention, backward: two launches, without atomics, the same bits each time.

Shape suffixes as in :mod:`fastpack.ops.kernels.attention`.

The first takes tiles of queries as the forward does. A program holds the gradient of its rows anyway, so it also makes
``delta``, the row sums of that times the result, in passing: a launch of its own would read both tensors once more. The
second takes tiles of keys of one key/value head and walks over the queries that see them, of the whole group: gradients
of keys and values are written once, in their dtype, without a copy for each query head.

Products are laid out so that what was computed is the left factor of the next product, which may stay in registers:
keys are the rows of every tile in the second kernel.

Source: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, with its loops taken apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.attention import (
    Scores,
    Tile,
    bounded,
    chosen,
    load_keys,
    load_rows,
    locate,
    parts_of,
    per_row,
    rows_of,
    sizes,
    slots,
    store_rows,
    visible,
)
from fastpack.ops.kernels.launch import early, on_device, rows_that_count, wait_for_inputs

QUERIES: dict[int, Tile] = {
    # as attention.FORWARD
    64: Tile(rows=64, keys=32, warps=4, stages=3, registers=96),
    128: Tile(rows=64, keys=32, warps=4, stages=2, registers=168),
    256: Tile(rows=64, keys=32, warps=8, stages=2),
}
KEYS: dict[int, Tile] = {
    64: Tile(rows=64, keys=64, warps=4, stages=2),
    128: Tile(rows=32, keys=64, warps=4, stages=3),
    256: Tile(rows=32, keys=32, warps=8, stages=1),
}


# --- gradient of the queries ------------------------------------------------------------------------------------------


@triton.jit
def _walk_keys(
    q, grad, dq, lse, delta, token, K, V, low, high, end, k_token, v_token, window, inner, outer,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    for first in tl.range(low, high, KEYS):
        k = load_keys(K, first, end, k_token, KEYS, D, BLOCK_D, MASKED)
        score = bounded(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, CAPPED)
        weight = tl.exp2(score * outer - lse[:, None])
        if MASKED:
            key = first + tl.arange(0, KEYS)
            weight = tl.where(visible(token[:, None], key[None, :], window, WINDOWED), weight, 0.0)
        v = load_keys(V, first, end, v_token, KEYS, VALUES, BLOCK_V, MASKED)
        slope = weight * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])
        if CAPPED:
            slope *= 1.0 - score * score
        dq = tl.dot(slope.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["sequences", "window"])
def queries_kernel(
    Q, K, V, OUT, GRAD, LSE, DELTA, DQ, cu_seqlens, count, sequences, window, inner, outer, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid as of the forward. Writes DQ, and DELTA ``[T, H]`` for :func:`keys_kernel`."""
    wait_for_inputs(EARLY)
    BLOCK_T: tl.constexpr = ROWS // PART
    slot = tl.program_id(0) // (KV_HEADS * PARTS)
    kv_head = tl.program_id(0) // PARTS % KV_HEADS
    part = tl.program_id(0) % PARTS
    begin, end, tile = locate(cu_seqlens, slot, sequences, BLOCK_T)
    tiles = tl.cdiv(end - begin, BLOCK_T)
    if tile >= tiles:
        return
    first = begin + (tiles - 1 - tile) * BLOCK_T
    token, _, kept = rows_of(first, end, part, ROWS, GROUP, PART)

    group = kv_head.to(tl.int64) * GROUP
    dq = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    delta_rows = per_row(DELTA + group, first, part, KV_HEADS * GROUP, ROWS, PART)
    DQ += group * D
    if begin >= rows_that_count(count, end):
        tl.store(delta_rows, tl.zeros((ROWS,), dtype=tl.float32), mask=kept)
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
    lse = tl.load(per_row(LSE + group, first, part, KV_HEADS * GROUP, ROWS, PART), mask=kept, other=0.0)
    tl.store(delta_rows, delta, mask=kept)

    K += kv_head.to(tl.int64) * k_head
    V += kv_head.to(tl.int64) * v_head
    low = begin
    if WINDOWED:
        low = tl.maximum(begin, first - window + 1)
    high = tl.minimum(first + BLOCK_T, end)
    # fmt: off
    if SPLIT and not WINDOWED:
        full = low + (first + 1 - low) // KEYS * KEYS
        dq = _walk_keys(
            q, grad, dq, lse, delta, token, K, V, low, full, high, k_token, v_token, window, inner, outer,
            D, VALUES, BLOCK_D, BLOCK_V, KEYS, False, WINDOWED, CAPPED,
        )
        low = full
    dq = _walk_keys(
        q, grad, dq, lse, delta, token, K, V, low, high, high, k_token, v_token, window, inner, outer,
        D, VALUES, BLOCK_D, BLOCK_V, KEYS, True, WINDOWED, CAPPED,
    )
    # fmt: on
    store_rows(DQ, dq * scale, first, end, part, KV_HEADS * GROUP, ROWS, GROUP, PART, D, BLOCK_D)


# --- gradients of the keys and values ---------------------------------------------------------------------------------


@triton.jit
def _walk_rows(
    k, v, dk, dv, key, Q, GRAD, LSE, DELTA, start, steps, end, window, inner, outer,
    q_token, q_head, grad_token, grad_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Take in ``steps`` tiles of queries from token ``start`` on, each in all parts of the group."""
    for step in tl.range(0, steps * PARTS):
        first, part = start + step // PARTS * (ROWS // PART), step % PARTS
        q = load_rows(Q, first, end, part, q_token, q_head, ROWS, GROUP, PART, D, BLOCK_D)
        token, _, kept = rows_of(first, end, part, ROWS, GROUP, PART)
        lse = tl.load(per_row(LSE, first, part, KV_HEADS * GROUP, ROWS, PART), mask=kept, other=0.0)
        score = bounded(tl.dot(k, tl.trans(q), input_precision="ieee"), inner, CAPPED)
        weight = tl.exp2(score * outer - lse[None, :])
        if MASKED:
            weight = tl.where(visible(token[None, :], key[:, None], window, WINDOWED), weight, 0.0)
        grad = load_rows(GRAD, first, end, part, grad_token, grad_head, ROWS, GROUP, PART, VALUES, BLOCK_V)
        dv = tl.dot(weight.to(grad.dtype), grad, dv, input_precision="ieee")
        delta = tl.load(per_row(DELTA, first, part, KV_HEADS * GROUP, ROWS, PART), mask=kept, other=0.0)
        slope = weight * (tl.dot(v, tl.trans(grad), input_precision="ieee") - delta[None, :])
        if CAPPED:
            slope *= 1.0 - score * score
        dk = tl.dot(slope.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["sequences", "window"])
def keys_kernel(
    Q, K, V, GRAD, LSE, DELTA, DK, DV, cu_seqlens, count, sequences, window, inner, outer, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: slots of ``KEYS`` tokens times key/value heads, heads first. A sequence's first tile has most to do."""
    wait_for_inputs(EARLY)
    BLOCK_T: tl.constexpr = ROWS // PART
    slot = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    begin, end, tile = locate(cu_seqlens, slot, sequences, KEYS)
    first = begin + tile * KEYS
    if first >= end:
        return
    dk = tl.zeros((KEYS, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((KEYS, BLOCK_V), dtype=tl.float32)
    # a contiguous [T, K, size] is one of rows with one head each
    DK += kv_head * D
    DV += kv_head * VALUES
    if begin >= rows_that_count(count, end):
        store_rows(DK, dk, first, end, 0, KV_HEADS, KEYS, 1, 1, D, BLOCK_D)
        store_rows(DV, dv, first, end, 0, KV_HEADS, KEYS, 1, 1, VALUES, BLOCK_V)
        return
    key = first + tl.arange(0, KEYS)
    k = load_keys(K + kv_head.to(tl.int64) * k_head, first, end, k_token, KEYS, D, BLOCK_D, True)
    v = load_keys(V + kv_head.to(tl.int64) * v_head, first, end, v_token, KEYS, VALUES, BLOCK_V, True)
    group = kv_head.to(tl.int64) * GROUP
    Q += group * q_head
    GRAD += group * grad_head
    LSE += group
    DELTA += group

    last = end  # behind the last query that sees a key of this tile
    if WINDOWED:
        last = tl.minimum(end, first + KEYS + window - 1)
    steps = tl.cdiv(last - first, BLOCK_T)
    # fmt: off
    if SPLIT and not WINDOWED:
        diagonal = tl.minimum(tl.cdiv(KEYS, BLOCK_T), steps)
        dk, dv = _walk_rows(
            k, v, dk, dv, key, Q, GRAD, LSE, DELTA, first, diagonal, end, window, inner, outer,
            q_token, q_head, grad_token, grad_head,
            KV_HEADS, GROUP, PART, PARTS, D, VALUES, BLOCK_D, BLOCK_V, ROWS, True, WINDOWED, CAPPED,
        )
        dk, dv = _walk_rows(
            k, v, dk, dv, key, Q, GRAD, LSE, DELTA, first + diagonal * BLOCK_T, steps - diagonal, end,
            window, inner, outer, q_token, q_head, grad_token, grad_head,
            KV_HEADS, GROUP, PART, PARTS, D, VALUES, BLOCK_D, BLOCK_V, ROWS, False, WINDOWED, CAPPED,
        )
    else:
        dk, dv = _walk_rows(
            k, v, dk, dv, key, Q, GRAD, LSE, DELTA, first, steps, end, window, inner, outer,
            q_token, q_head, grad_token, grad_head,
            KV_HEADS, GROUP, PART, PARTS, D, VALUES, BLOCK_D, BLOCK_V, ROWS, True, WINDOWED, CAPPED,
        )
    # fmt: on
    store_rows(DK, dk * scale, first, end, 0, KV_HEADS, KEYS, 1, 1, D, BLOCK_D)
    store_rows(DV, dv, first, end, 0, KV_HEADS, KEYS, 1, 1, VALUES, BLOCK_V)


# --- launcher ---------------------------------------------------------------------------------------------------------


def queries(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scores: Scores,
    tile: Tile | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of q, and what :func:`keys` needs.

    Args:
        grad: ``[T, H, V]``, of the result, :func:`~fastpack.ops.kernels.attention.readable`.
        q, k, v, cu_seqlens, scores, rows: as the forward took them.
        out, lse: what it returned.
        tile: for measuring.

    Returns:
        ``[T, H, D]`` contiguous in the dtype of q, and delta, float32 ``[T, H]``: the products of result and gradient
        summed over each head.
    """
    if tile is None:
        tile = chosen(QUERIES, q, v, streams_keys=True)
    part, parts = parts_of(q.shape[1] // k.shape[1])
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    with on_device(q):
        queries_kernel[(slots(cu_seqlens, len(q), tile.rows // part) * k.shape[1] * parts,)](
            q, k, v, out, grad, lse, delta, dq, cu_seqlens, rows, cu_seqlens.numel() - 1, *scores.arguments,
            scores.scale, *_strides(q, k, v, grad), **sizes(q, k, v), **scores.flags, **tile.arguments, **early(q),
        )  # fmt: skip
    return dq, delta


def keys(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    cu_seqlens: Tensor,
    scores: Scores,
    tile: Tile | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of k ``[T, K, D]`` and v ``[T, K, V]``, contiguous in their dtype; arguments as of :func:`queries`."""
    if tile is None:
        tile = chosen(KEYS, q, v, streams_keys=False)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    with on_device(q):
        keys_kernel[(slots(cu_seqlens, len(q), tile.keys) * k.shape[1],)](
            q, k, v, grad, lse, delta, dk, dv, cu_seqlens, rows, cu_seqlens.numel() - 1, *scores.arguments,
            scores.scale, *_strides(q, k, v, grad), **sizes(q, k, v), **scores.flags, **tile.arguments, **early(q),
        )  # fmt: skip
    return dk, dv


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of tokens and of heads."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])
