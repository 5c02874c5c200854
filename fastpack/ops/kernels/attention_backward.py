"""Packed causal attention, backward, in two launches.

With the same numbers of tokens and sequences, equal inputs give equal bits.

Shape suffixes as in :mod:`fastpack.ops.kernels.attention`.

The first launch takes tiles of queries, as the forward does. A program holds the gradient of its rows anyway, so it
also computes ``delta``, the row sums of this gradient times the result. A separate launch for ``delta`` would read both
tensors once more. The second launch takes tiles of keys of one key/value head, and walks over the queries of the whole
group that see them. So gradients of keys and values are written once, in their dtype, without a copy for each query
head. If there are few such programs, the one with the longest sequence takes the most time. Then several programs share
a long walk: each writes its sums, and the program that ends last adds them up, in the order of the queries. No program
waits for another.

Each product is laid out as the left factor of the next product, which may stay in registers. In the second kernel, keys
are therefore the rows of every tile.

Source: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, with one kernel for each of its two loops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.attention import CAUSAL, AttentionTile, Ranges, Scores, chosen, parts_of, sizes, slots
from fastpack.ops.kernels.attention_parts import (
    bounded,
    load_keys,
    load_rows,
    locate,
    per_row,
    ranges_of,
    rows_of,
    store_rows,
    visible,
)
from fastpack.ops.kernels.launch import early, on_device, processors, rows_that_count, wait_for_inputs

QUERIES: dict[int, AttentionTile] = {
    # by the same sizes as attention.FORWARD
    64: AttentionTile(rows=64, keys=32, warps=4, stages=3, registers=96),
    128: AttentionTile(rows=64, keys=32, warps=4, stages=2, split=True, registers=168),
    256: AttentionTile(rows=64, keys=32, warps=8, stages=2),
}
KEYS: dict[int, AttentionTile] = {
    64: AttentionTile(rows=64, keys=64, warps=4, stages=2, sharing=9),
    128: AttentionTile(rows=32, keys=64, warps=4, stages=3, sharing=4),
    256: AttentionTile(rows=32, keys=32, warps=8, stages=1),
}
MOST_PIECES, LEAST_STEPS = 4, 8
"""The most pieces of a long walk over queries, and the fewest steps of a piece."""


# --- gradient of the queries ------------------------------------------------------------------------------------------


@triton.jit
def _walk_keys(
    q, grad, dq, lse, delta, token, first_key, end_key, K, V, low, high, end,
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
            sees = visible(token[:, None], key[None, :], window, key[None, :], first_key, end_key, WINDOWED)
            weight = tl.where(sees, weight, 0.0)
        v = load_keys(V, first, end, v_token, KEYS, VALUES, BLOCK_V, MASKED)
        slope = weight * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])
        if CAPPED:
            slope *= 1.0 - score * score
        dq = tl.dot(slope.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["arrivals", "sequences", "window"])
def queries_kernel(
    Q, K, V, OUT, GRAD, LSE, DELTA, DQ, ARRIVALS, arrivals, FIRST_KEY, END_KEY, cu_seqlens, count, sequences,
    window, inner, outer, scale,
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
    begin, end, tile = locate(cu_seqlens, slot, sequences, BLOCK_T)
    tiles = tl.cdiv(end - begin, BLOCK_T)
    if tile >= tiles:
        return
    first = begin + (tiles - 1 - tile) * BLOCK_T
    token, _, valid = rows_of(first, end, part, ROWS, GROUP, PART)

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
            q, grad, dq, lse, delta, token, first_key, end_key, K, V, low, full, high,
            k_token, v_token, window, inner, outer,
            D, VALUES, BLOCK_D, BLOCK_V, KEYS, False, WINDOWED, CAPPED,
        )
        low = full
    dq = _walk_keys(
        q, grad, dq, lse, delta, token, first_key, end_key, K, V, low, high, high,
        k_token, v_token, window, inner, outer,
        D, VALUES, BLOCK_D, BLOCK_V, KEYS, True, WINDOWED, CAPPED,
    )
    # fmt: on
    store_rows(DQ, dq * scale, first, end, part, KV_HEADS * GROUP, ROWS, GROUP, PART, D, BLOCK_D)


# --- gradients of the keys and values ---------------------------------------------------------------------------------


@triton.jit
def _walk_rows(
    k, v, dk, dv, key, first_query, end_query, Q, GRAD, LSE, DELTA, start, steps, end, window, inner, outer,
    q_token, q_head, grad_token, grad_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add ``steps`` tiles of queries from token ``start`` on to ``dk`` and ``dv``, for all parts of the group."""
    for step in tl.range(0, steps * PARTS):
        first, part = start + step // PARTS * (ROWS // PART), step % PARTS
        q = load_rows(Q, first, end, part, q_token, q_head, ROWS, GROUP, PART, D, BLOCK_D)
        token, _, valid = rows_of(first, end, part, ROWS, GROUP, PART)
        lse = tl.load(per_row(LSE, first, part, KV_HEADS * GROUP, ROWS, PART), mask=valid, other=0.0)
        score = bounded(tl.dot(k, tl.trans(q), input_precision="ieee"), inner, CAPPED)
        weight = tl.exp2(score * outer - lse[None, :])
        if MASKED:
            sees = visible(token[None, :], key[:, None], window, token[None, :], first_query, end_query, WINDOWED)
            weight = tl.where(sees, weight, 0.0)
        grad = load_rows(GRAD, first, end, part, grad_token, grad_head, ROWS, GROUP, PART, VALUES, BLOCK_V)
        dv = tl.dot(weight.to(grad.dtype), grad, dv, input_precision="ieee")
        delta = tl.load(per_row(DELTA, first, part, KV_HEADS * GROUP, ROWS, PART), mask=valid, other=0.0)
        slope = weight * (tl.dot(v, tl.trans(grad), input_precision="ieee") - delta[None, :])
        if CAPPED:
            slope *= 1.0 - score * score
        dk = tl.dot(slope.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _places(tile, most, piece, column, SIZE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets of one piece's sums ``[KEYS, SIZE]``, which begin at ``column`` of ``WIDTH`` columns."""
    start = (tile.to(tl.int64) * most + piece) * (KEYS * WIDTH) + column
    return start + tl.arange(0, KEYS)[:, None] * WIDTH + tl.arange(0, SIZE)[None, :]


@triton.jit
def _sum_of_pieces(
    SUMS, tile, most, pieces, column, SIZE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    total = tl.zeros((KEYS, SIZE), dtype=tl.float32)
    for piece in range(0, pieces):
        total += tl.load(SUMS + _places(tile, most, piece, column, SIZE, KEYS, WIDTH), cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["most", "sequences", "window"])
def keys_kernel(
    Q, K, V, GRAD, LSE, DELTA, DK, DV, SUMS, ARRIVALS, most, FIRST_QUERY, END_QUERY, cu_seqlens, count, sequences,
    window, inner, outer, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    LEAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write DK and DV.

    Grid: slots of ``KEYS`` tokens times pieces times key/value heads. Neighbouring programs take different heads.

    A walk has one piece for each ``LEAST`` steps, but at most ``most`` pieces; without SUMS it has one piece. The first
    tile of a sequence has the longest walk.
    """
    wait_for_inputs(EARLY)
    BLOCK_T: tl.constexpr = ROWS // PART
    slot = tl.program_id(0) // KV_HEADS
    piece = 0
    if SUMS is not None:
        piece = slot % most
        slot //= most
    kv_head = tl.program_id(0) % KV_HEADS
    begin, end, tile = locate(cu_seqlens, slot, sequences, KEYS)
    first = begin + tile * KEYS
    start, last = first, end  # the first query that sees a key of this tile, and one past the last
    if WINDOWED:
        last = tl.minimum(end, first + KEYS + window - 1)
    if FIRST_QUERY is not None:
        last_key = tl.minimum(first + KEYS, end) - 1
        start = tl.load(FIRST_QUERY + first, mask=first < end, other=0)
        last = tl.load(END_QUERY + last_key, mask=first < end, other=0)
    counts = begin < rows_that_count(count, end)
    steps = tl.cdiv(last - start, BLOCK_T)
    pieces = 1
    if SUMS is not None:
        pieces = tl.where(counts, tl.minimum(tl.maximum(steps * PARTS // LEAST, 1), most), 1)
    if (first >= end) | (piece >= pieces):
        return
    dk = tl.zeros((KEYS, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((KEYS, BLOCK_V), dtype=tl.float32)
    # to store_rows, a contiguous [T, K, size] has rows of one head each
    DK += kv_head * D
    DV += kv_head * VALUES
    if not counts:
        store_rows(DK, dk, first, end, 0, KV_HEADS, KEYS, 1, 1, D, BLOCK_D)
        store_rows(DV, dv, first, end, 0, KV_HEADS, KEYS, 1, 1, VALUES, BLOCK_V)
        return
    key = first + tl.arange(0, KEYS)
    k = load_keys(K + kv_head.to(tl.int64) * k_head, first, end, k_token, KEYS, D, BLOCK_D, True)
    v = load_keys(V + kv_head.to(tl.int64) * v_head, first, end, v_token, KEYS, VALUES, BLOCK_V, True)
    first_query, end_query = None, None
    if FIRST_QUERY is not None:
        first_query, end_query = ranges_of(FIRST_QUERY, END_QUERY, key, key < end)
    group = kv_head.to(tl.int64) * GROUP
    Q += group * q_head
    GRAD += group * grad_head
    LSE += group
    DELTA += group

    low, high = steps * piece // pieces, steps * (piece + 1) // pieces
    # fmt: off
    if SPLIT and not WINDOWED:
        partly = tl.cdiv(KEYS, BLOCK_T)  # steps with queries that don't see every key of the tile
        if FIRST_QUERY is not None:
            partly = tl.cdiv(tl.load(FIRST_QUERY + last_key) - start, BLOCK_T)
        diagonal = tl.maximum(tl.minimum(partly, high), low)
        dk, dv = _walk_rows(
            k, v, dk, dv, key, first_query, end_query, Q, GRAD, LSE, DELTA, start + low * BLOCK_T, diagonal - low, end,
            window, inner, outer,
            q_token, q_head, grad_token, grad_head,
            KV_HEADS, GROUP, PART, PARTS, D, VALUES, BLOCK_D, BLOCK_V, ROWS, True, WINDOWED, CAPPED,
        )
        dk, dv = _walk_rows(
            k, v, dk, dv, key, first_query, end_query, Q, GRAD, LSE, DELTA, start + diagonal * BLOCK_T, high - diagonal,
            end, window, inner, outer, q_token, q_head, grad_token, grad_head,
            KV_HEADS, GROUP, PART, PARTS, D, VALUES, BLOCK_D, BLOCK_V, ROWS, False, WINDOWED, CAPPED,
        )
    else:
        dk, dv = _walk_rows(
            k, v, dk, dv, key, first_query, end_query, Q, GRAD, LSE, DELTA, start + low * BLOCK_T, high - low, end,
            window, inner, outer,
            q_token, q_head, grad_token, grad_head,
            KV_HEADS, GROUP, PART, PARTS, D, VALUES, BLOCK_D, BLOCK_V, ROWS, True, WINDOWED, CAPPED,
        )
    # fmt: on
    is_last = True
    if SUMS is not None:
        WIDTH: tl.constexpr = BLOCK_D + BLOCK_V
        at = slot * KV_HEADS + kv_head
        if pieces > 1:
            tl.store(SUMS + _places(at, most, piece, 0, BLOCK_D, KEYS, WIDTH), dk)
            tl.store(SUMS + _places(at, most, piece, BLOCK_D, BLOCK_V, KEYS, WIDTH), dv)
            tl.debug_barrier()  # all threads must have written before one of them counts the piece
            is_last = tl.atomic_add(ARRIVALS + at, 1, sem="acq_rel") == pieces - 1
            tl.debug_barrier()
            if is_last:
                dk = _sum_of_pieces(SUMS, at, most, pieces, 0, BLOCK_D, KEYS, WIDTH)
                dv = _sum_of_pieces(SUMS, at, most, pieces, BLOCK_D, BLOCK_V, KEYS, WIDTH)
    if is_last:
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
    rows: Tensor | None = None,
    arrivals: Tensor | None = None,
    seen_keys: Ranges = CAUSAL,
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

    Returns:
        The gradient ``[T, H, D]``, contiguous and in q's dtype, and delta, float32 ``[T, H]``: for each head, the sum
        of result times gradient.
    """
    tile = chosen(QUERIES, q, v, streams_keys=True)
    part, parts = parts_of(q.shape[1] // k.shape[1])
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    with on_device(q):
        queries_kernel[(slots(cu_seqlens, len(q), tile.rows // part) * k.shape[1] * parts,)](
            q, k, v, out, grad, lse, delta, dq, arrivals, 0 if arrivals is None else len(arrivals), *seen_keys,
            cu_seqlens, rows, cu_seqlens.numel() - 1, *scores.arguments, scores.scale, *_strides(q, k, v, grad),
            **sizes(q, k, v), **scores.flags, **tile.arguments, **early(q),
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
    rows: Tensor | None = None,
    arrivals: Tensor | None = None,
    seeing_queries: Ranges = CAUSAL,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k ``[T, K, D]`` and v ``[T, K, V]``, contiguous in their dtypes.

    The arguments are those of :func:`queries`, which must have set ``arrivals`` to zero, but for the ranges: the first
    query that sees each key, and one past the last.
    """
    tile = chosen(KEYS, q, v, streams_keys=False)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    tiles, constants = slots(cu_seqlens, len(q), tile.keys) * k.shape[1], sizes(q, k, v)
    pieces, sums = 1, None
    if arrivals is not None:
        assert len(arrivals) == tiles
        pieces = pieces_of(tile, tiles, q.device)
        width = constants["BLOCK_D"] + constants["BLOCK_V"]
        sums = torch.empty(tiles, pieces, tile.keys, width, dtype=torch.float32, device=q.device)
    with on_device(q):
        keys_kernel[(tiles * pieces,)](
            q, k, v, grad, lse, delta, dk, dv, sums, arrivals, pieces, *seeing_queries,
            cu_seqlens, rows, cu_seqlens.numel() - 1, *scores.arguments, scores.scale,
            *_strides(q, k, v, grad), **constants, **scores.flags, **tile.arguments, LEAST=LEAST_STEPS, **early(q),
        )  # fmt: skip
    return dk, dv


def make_arrivals(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor | None:
    """Return int32 counters of finished pieces, one for each tile of keys; None if no walk is shared."""
    tile = chosen(KEYS, q, v, streams_keys=False)
    tiles = slots(cu_seqlens, len(q), tile.keys) * k.shape[1]
    if pieces_of(tile, tiles, q.device) == 1:
        return None
    part, _ = parts_of(q.shape[1] // k.shape[1])
    if chosen(QUERIES, q, v, streams_keys=True).rows // part > tile.keys:
        return None  # each program of the first kernel sets one counter to zero, and there are too few programs
    return torch.empty(tiles, dtype=torch.int32, device=q.device)


def pieces_of(tile: AttentionTile, tiles: int, device: torch.device) -> int:
    """Return how many pieces a long walk over queries is cut into, for this number of tiles of keys."""
    return max(1, min(MOST_PIECES, tile.sharing * processors(device) // max(1, tiles)))


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of tokens and of heads."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])
