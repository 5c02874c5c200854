"""The gated delta rule with a decay for each channel of a key: the forward's kernels within a chunk.

A token's decay since another one is ``exp(G_i - G_j)``, a vector. In a matmul it must be a factor of each side, and
neither factor may overflow. So pairs of tokens are taken by levels: at level n, a chunk is cut into blocks of 2^(n+1)
tokens, and the second half of each block sees its first half past the middle, G_m. The factors ``exp(G_i - G_m)`` and
``exp(G_m - G_j)`` are at most 1, and one exponential of ``-|G - G_m|`` per token is both. Each pair has one level.

Suffixes: T tokens, M chunks, C tokens of a chunk, H heads of values, K size of a key, V size of a value.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.chunks import Chunks
from fastpack.ops.kernels.delta_rule_parts import (
    DeltaTile,
    Saved,
    Walk,
    inverse_of_system,
    load_rows,
    locate_chunk,
    per_token,
    product,
    square_of,
    store_rows,
    strides,
    write_u,
)
from fastpack.ops.kernels.launch import early, wait_for_inputs

SOLVE = DeltaTile(block_v=64, warps=4, stages=2, streamed=(0, 1, 0), resident=(3, 0, 0, 4))
MOST_COLUMNS = 32
"""The most channels of a step: within a chunk, channels only meet in sums."""


@triton.jit
def factors_of_level(SUMS, sums, begin, length, head, first, level,
                     HEADS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Return each token's decay from or to the middle of its block ``[C, COLUMNS]``, and whether it is past it."""
    token, column = tl.arange(0, C), first + tl.arange(0, COLUMNS)
    middle = tl.minimum(((token >> (level + 1)) << (level + 1)) + (1 << level), length) - 1
    at = (begin + middle).to(tl.int64) * (HEADS * K) + head * K
    sums_of_middle = tl.load(SUMS + at[:, None] + column[None, :], mask=(column < K)[None, :], other=0.0)
    return tl.exp(-tl.abs(sums - sums_of_middle)), ((token >> level) % 2 == 1)[:, None]


@triton.jit
def pairs_of_level(level, C: tl.constexpr):
    """Return which pairs of tokens belong to a level, ``[C, C]``."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return ((row >> level) == (column >> level) + 1) & ((row >> level) % 2 == 1)


@triton.jit
def write_decayed(
    QUERIES, KEYS, SUMS, W, GROWN, LEFT, inverse, beta, begin, length, head, q_token, q_head, k_token, k_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write W, GROWN and LEFT ``[T, H, K]`` of a chunk: queries decayed from its start, and keys decayed to its end."""
    QUERIES += (head // GROUP).to(tl.int64) * q_head
    KEYS += (head // GROUP).to(tl.int64) * k_head
    for first in range(0, K, COLUMNS):
        q = load_rows(QUERIES, begin, length, q_token, first, C, K, COLUMNS)
        k = load_rows(KEYS, begin, length, k_token, first, C, K, COLUMNS)
        sums = load_rows(SUMS + head * K, begin, length, HEADS * K, first, C, K, COLUMNS)
        total = load_rows(SUMS + head * K, begin + length - 1, 1, HEADS * K, first, 1, K, COLUMNS)
        grown = tl.exp(sums)
        w = product(inverse, (k.to(tl.float32) * grown * beta[:, None]).to(k.dtype), PRECISION)
        store_rows(W + head * K, w, begin, length, HEADS * K, first, C, K, COLUMNS)
        store_rows(GROWN + head * K, q.to(tl.float32) * grown, begin, length, HEADS * K, first, C, K, COLUMNS)
        left = k.to(tl.float32) * tl.exp(total - sums)
        store_rows(LEFT + head * K, left, begin, length, HEADS * K, first, C, K, COLUMNS)


@triton.jit
def _sums_kernel(
    G, SUMS, BEGIN, END,
    HEADS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the SUMS of G ``[T, H, K]`` from each chunk's start."""
    wait_for_inputs(EARLY)
    _, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    for first in range(0, K, COLUMNS):
        g = load_rows(G + head * K, begin, length, HEADS * K, first, C, K, COLUMNS)
        sums = tl.cumsum(g.to(tl.float32), 0)
        store_rows(SUMS + head * K, sums, begin, length, HEADS * K, first, C, K, COLUMNS)


@triton.jit
def _solve_kernel(
    QUERIES, KEYS, VALUES, BETA, SUMS, INVERSE, SCORES, W, U, GROWN, LEFT, BEGIN, END,
    q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, LEVELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write INVERSE and SCORES ``[M, H, C, C]``, which are ``(I + A)^-1`` and P, W, U, GROWN and LEFT."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    token = tl.arange(0, C)
    A = tl.zeros((C, C), dtype=tl.float32)
    scores = tl.zeros((C, C), dtype=tl.float32)
    for first in range(0, K, COLUMNS):
        q = load_rows(QUERIES + (head // GROUP).to(tl.int64) * q_head, begin, length, q_token, first, C, K, COLUMNS)
        k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, first, C, K, COLUMNS)
        sums = load_rows(SUMS + head * K, begin, length, HEADS * K, first, C, K, COLUMNS)
        own = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        scores += tl.where(token[:, None] == token[None, :], own[:, None], 0.0)
        for level in tl.range(0, LEVELS, num_stages=1):
            factors, late = factors_of_level(SUMS, sums, begin, length, head, first, level, HEADS, K, COLUMNS, C)
            decayed = (k.to(tl.float32) * factors).to(k.dtype)
            before = tl.trans(tl.where(late, 0.0, decayed).to(k.dtype))
            pairs = pairs_of_level(level, C)
            A += tl.where(pairs, product(decayed, before, PRECISION), 0.0)
            scores += tl.where(pairs, product(q.to(tl.float32) * factors, before, PRECISION), 0.0)
    beta = tl.load(per_token(BETA, begin, head, HEADS, C), mask=token < length, other=0.0).to(tl.float32)
    inverse = inverse_of_system(A * beta[:, None], C, LEVELS, PRECISION).to(INVERSE.dtype.element_ty)
    tl.store(square_of(INVERSE, chunk, head, HEADS, C), inverse)
    tl.store(square_of(SCORES, chunk, head, HEADS, C), scores.to(SCORES.dtype.element_ty))
    write_decayed(
        QUERIES, KEYS, SUMS, W, GROWN, LEFT, inverse, beta, begin, length, head, q_token, q_head, k_token, k_head,
        HEADS, GROUP, K, COLUMNS, C, PRECISION,
    )  # fmt: skip
    write_u(VALUES, U, inverse, beta, begin, length, head, v_token, v_head, HEADS, V, BLOCK_V, C, PRECISION)


def columns_of(options: dict[str, int]) -> dict[str, int]:
    """Return the options of a kernel that walks over channels."""
    return {**options, "COLUMNS": min(MOST_COLUMNS, options["BLOCK_K"])}


def solve(saved: Saved, walk: Walk, g: Tensor, chunks: Chunks) -> None:
    """Write the sums of g, the inverses, the scores, decayed queries and keys, w and u."""
    q, k, v = saved.q, saved.k, saved.v
    programs = (len(chunks.begin) * v.shape[1],)
    options = columns_of(SOLVE.options(k, v, chunks.size))
    names = ("HEADS", "K", "COLUMNS", "C")
    _sums_kernel[programs](
        g, saved.sums, chunks.begin, chunks.end, **{name: options[name] for name in names}, **early(v)
    )
    _solve_kernel[programs](
        q, k, v, saved.beta, saved.sums, saved.inverse, saved.scores, walk.w, walk.u, walk.q, walk.k,
        chunks.begin, chunks.end, *strides(q, k, v), LEVELS=chunks.size.bit_length() - 1, **options, **early(v),
    )  # fmt: skip
