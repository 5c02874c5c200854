"""Packed causal attention, backward: the gradients of keys and values, after :mod:`.attention_queries`.

With the same numbers of tokens and sequences, equal inputs give equal bits.

Shape suffixes as in :mod:`fastpack.ops.kernels.attention`.

This launch takes tiles of keys of one key/value head, and walks over the queries of the whole group that see them. So
gradients of keys and values are written once, in their dtype, without a copy for each query head. If there are few such
programs, the one with the longest sequence takes the most time. Then several programs share a long walk: each writes
its sums, and the program that ends last adds them up, in the order of the queries. No program waits for another.

Each product is laid out as the left factor of the next product, which may stay in registers. Keys are therefore the
rows of every tile.

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
from fastpack.ops.kernels.attention_queries import QUERIES
from fastpack.ops.kernels.launch import early, on_device, processors, rows_that_count, wait_for_inputs

KEYS: dict[int, AttentionTile] = {
    64: AttentionTile(rows=64, keys=64, warps=4, stages=2, sharing=9),
    128: AttentionTile(rows=32, keys=64, warps=4, stages=3, sharing=4),
    256: AttentionTile(rows=32, keys=32, warps=8, stages=1),
}
MOST_PIECES, LEAST_STEPS = 4, 8
"""The most pieces of a long walk over queries, and the fewest steps of a piece."""


@triton.jit
def _walk_rows(
    k, v, dk, dv, key, first_query, end_query, Q, GRAD, LSE, DELTA, start, steps, end, end_key, shift,
    window, inner, outer, q_token, q_head, grad_token, grad_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add ``steps`` tiles of queries from token ``start`` on to ``dk`` and ``dv``, for all parts of the group.

    If ``shift`` is not None, they are the queries of an edge, which see the keys up to ``end_key``.
    """
    for step in tl.range(0, steps * PARTS):
        first, part = start + step // PARTS * (ROWS // PART), step % PARTS
        q = load_rows(Q, first, end, part, q_token, q_head, ROWS, GROUP, PART, D, BLOCK_D)
        token, _, valid = rows_of(first, end, part, ROWS, GROUP, PART)
        lse = tl.load(per_row(LSE, first, part, KV_HEADS * GROUP, ROWS, PART), mask=valid, other=0.0)
        score = bounded(tl.dot(k, tl.trans(q), input_precision="ieee"), inner, CAPPED)
        weight = tl.exp2(score * outer - lse[None, :])
        if MASKED:
            place = key
            if shift is not None:
                place = key - shift
            sees = visible(token[None, :], place[:, None], window, token[None, :], first_query, end_query, WINDOWED)
            if shift is not None:
                sees = sees & (key < end_key)[:, None]
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


@triton.jit
def _queries_of(BRANCHES, edge, first, window, KEYS: tl.constexpr, BLOCK_T: tl.constexpr, WINDOWED: tl.constexpr):
    """Return an edge's first query, the steps with queries that see the tile at ``first``, and the edge's other ends.

    These are one past its last query, one past its last key, and its shift.
    """
    _, end_key, start, end, shift = load_edge(BRANCHES, edge)
    last = end
    if WINDOWED:
        last = tl.minimum(end, tl.minimum(first + KEYS, end_key) - 1 - shift + window)
    steps = tl.where(first < end_key, tl.cdiv(tl.maximum(last - start, 0), BLOCK_T), 0)
    return start, steps, end, end_key, shift


@triton.jit(do_not_specialize=["most", "sequences", "window"])
def keys_kernel(
    Q, K, V, GRAD, LSE, DELTA, DK, DV, SUMS, ARRIVALS, most, FIRST_QUERY, END_QUERY, BRANCHES, OF_SEGMENT, cu_seqlens,
    count, sequences, window, inner, outer, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    LEAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write DK and DV.

    Grid: slots of ``KEYS`` tokens times pieces times key/value heads. Neighbouring programs take different heads.

    A walk has one piece for each ``LEAST`` steps, but at most ``most`` pieces; without SUMS it has one piece. The first
    tile of a sequence has the longest walk. In a tree, the walk goes on with the queries of the segment's edges in
    BRANCHES, which begin at OF_SEGMENT ``[N + 1]``.
    """
    wait_for_inputs(EARLY)
    BLOCK_T: tl.constexpr = ROWS // PART
    slot = tl.program_id(0) // KV_HEADS
    piece = 0
    if SUMS is not None:
        piece = slot % most
        slot //= most
    kv_head = tl.program_id(0) % KV_HEADS
    sequence, begin, end, tile = locate(cu_seqlens, slot, sequences, KEYS)
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
    all_steps = steps
    if BRANCHES is not None:
        branch, end_branch = tl.load(OF_SEGMENT + sequence), tl.load(OF_SEGMENT + sequence + 1)
        for edge in range(branch, end_branch):
            all_steps += _queries_of(BRANCHES, edge, first, window, KEYS, BLOCK_T, WINDOWED)[1]
    pieces = 1
    if SUMS is not None:
        pieces = tl.where(counts, tl.minimum(tl.maximum(all_steps * PARTS // LEAST, 1), most), 1)
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

    low, high = all_steps * piece // pieces, all_steps * (piece + 1) // pieces
    # fmt: off
    if BRANCHES is not None:
        before = steps
        for edge in range(branch, end_branch):
            start_of_edge, steps_of_edge, end_of_edge, end_key, shift = _queries_of(
                BRANCHES, edge, first, window, KEYS, BLOCK_T, WINDOWED
            )
            skipped = tl.maximum(low - before, 0)
            start_of_edge += skipped * BLOCK_T
            walked = tl.maximum(tl.minimum(high - before, steps_of_edge) - skipped, 0)
            if SPLIT and not WINDOWED:  # queries of an edge see every key of a tile that ends within it
                unmasked = tl.where(first + KEYS <= end_key, walked, 0)
                dk, dv = _walk_rows(
                    k, v, dk, dv, key, None, None, Q, GRAD, LSE, DELTA, start_of_edge, unmasked, end_of_edge, end_key,
                    None, window, inner, outer, q_token, q_head, grad_token, grad_head,
                    KV_HEADS, GROUP, PART, PARTS, D, VALUES, BLOCK_D, BLOCK_V, ROWS, False, WINDOWED, CAPPED,
                )
                walked -= unmasked
            dk, dv = _walk_rows(
                k, v, dk, dv, key, None, None, Q, GRAD, LSE, DELTA, start_of_edge, walked, end_of_edge, end_key, shift,
                window, inner, outer, q_token, q_head, grad_token, grad_head,
                KV_HEADS, GROUP, PART, PARTS, D, VALUES, BLOCK_D, BLOCK_V, ROWS, True, WINDOWED, CAPPED,
            )
            before += steps_of_edge
        high = tl.minimum(high, steps)
    if SPLIT and not WINDOWED:
        partly = tl.cdiv(KEYS, BLOCK_T)  # steps with queries that don't see every key of the tile
        if FIRST_QUERY is not None:
            partly = tl.cdiv(tl.load(FIRST_QUERY + last_key) - start, BLOCK_T)
        diagonal = tl.maximum(tl.minimum(partly, high), low)
        dk, dv = _walk_rows(
            k, v, dk, dv, key, first_query, end_query, Q, GRAD, LSE, DELTA, start + low * BLOCK_T, diagonal - low, end,
            end, None, window, inner, outer,
            q_token, q_head, grad_token, grad_head,
            KV_HEADS, GROUP, PART, PARTS, D, VALUES, BLOCK_D, BLOCK_V, ROWS, True, WINDOWED, CAPPED,
        )
        dk, dv = _walk_rows(
            k, v, dk, dv, key, first_query, end_query, Q, GRAD, LSE, DELTA, start + diagonal * BLOCK_T, high - diagonal,
            end, end, None, window, inner, outer, q_token, q_head, grad_token, grad_head,
            KV_HEADS, GROUP, PART, PARTS, D, VALUES, BLOCK_D, BLOCK_V, ROWS, False, WINDOWED, CAPPED,
        )
    else:
        dk, dv = _walk_rows(
            k, v, dk, dv, key, first_query, end_query, Q, GRAD, LSE, DELTA, start + low * BLOCK_T, high - low, end,
            end, None, window, inner, outer,
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
    branches: Tree = NO_TREE,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k ``[T, K, D]`` and v ``[T, K, V]``, contiguous in their dtypes.

    The arguments are those of :func:`fastpack.ops.kernels.attention_queries.queries`, which must have set ``arrivals``
    to zero, but for the ranges (the first query that sees each key, and one past the last) and the edges (those from
    each segment's keys to their queries).
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
            q, k, v, grad, lse, delta, dk, dv, sums, arrivals, pieces, *seeing_queries, *branches,
            cu_seqlens, rows, cu_seqlens.numel() - 1, *scores.arguments, scores.scale,
            *strides(q, k, v, grad), **constants, **scores.flags, **tile.arguments, LEAST=LEAST_STEPS, **early(q),
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
