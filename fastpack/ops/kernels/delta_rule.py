"""The gated delta rule: the kernels of the forward.

:mod:`fastpack.ops.delta_rule` has the formulas. Three kernels compute the forward: the first solves each chunk's system
and writes w and u; the second carries the state through each sequence, chunk by chunk, and writes n and the states at
the chunks' starts; the third writes the result of each chunk. The first is another one with a decay for each channel
(:mod:`fastpack.ops.kernels.delta_rule_channels`). The backward runs the first two again, without solving.

Each program handles one head. Programs of a chunk read only its real tokens, and those of an empty chunk end at once.
The matmuls of half-precision inputs add up in float32; the states are float32 within a program. Float32 inputs are
multiplied as three TF32 parts, which lose no more than float32 does. There are no atomics: the same bits in every run.

Suffixes: T tokens, M chunks, C tokens of a chunk, H heads of values, K size of a key, V size of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.chunks import Chunks
from fastpack.ops.kernels import delta_rule_channels as channels
from fastpack.ops.kernels.delta_rule_parts import (
    DeltaTile,
    Saved,
    Walk,
    inverse_of_system,
    load_rows,
    load_total,
    locate_chunk,
    pairwise_decays,
    per_token,
    product,
    readable,
    square_of,
    state_of,
    store_rows,
    strides,
    write_u,
)
from fastpack.ops.kernels.delta_rule_units import to_unit_length
from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs

SOLVE = DeltaTile(block_v=64, warps=4, stages=2, streamed=(0, 1, 0), resident=(2, 0, 0, 4))
STATES = DeltaTile(block_v=32, warps=4, stages=2, streamed=(2, 1, 0), resident=(0, 0, 1, 0))
OUTPUTS = DeltaTile(block_v=64, warps=4, stages=2, streamed=(0, 1, 1), resident=(2, 0, 0, 1))


@triton.jit
def write_w(
    W, inverse, k, beta, sums, begin, length, head,
    HEADS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write W ``[T, H, K]`` of a chunk."""
    decayed = k.to(tl.float32) * (beta * tl.exp(sums))[:, None]
    w = product(inverse, decayed.to(k.dtype), PRECISION)
    store_rows(W + head * K, w, begin, length, HEADS * K, 0, C, K, BLOCK_K)


@triton.jit
def _solve_kernel(
    KEYS, VALUES, G, BETA, SUMS, INVERSE, W, U, BEGIN, END, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write the SUMS of g ``[T, H]``, INVERSE ``[M, H, C, C]``, which is ``(I + A)^-1``, W and U."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    token = tl.arange(0, C)
    real = token < length
    g = tl.load(per_token(G, begin, head, HEADS, C), mask=real, other=0.0).to(tl.float32)
    beta = tl.load(per_token(BETA, begin, head, HEADS, C), mask=real, other=0.0).to(tl.float32)
    sums = tl.cumsum(g, 0)
    tl.store(per_token(SUMS, begin, head, HEADS, C), sums, mask=real)
    k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, 0, C, K, BLOCK_K)
    A = product(k, tl.trans(k), PRECISION) * pairwise_decays(sums, length, C) * beta[:, None]
    inverse = inverse_of_system(tl.where(token[:, None] > token[None, :], A, 0.0), C, LEVELS, PRECISION).to(k.dtype)
    tl.store(square_of(INVERSE, chunk, head, HEADS, C), inverse)
    write_w(W, inverse, k, beta, sums, begin, length, head, HEADS, K, BLOCK_K, C, PRECISION)
    write_u(VALUES, U, inverse, beta, begin, length, head, v_token, v_head, HEADS, V, BLOCK_V, C, PRECISION)


@triton.jit
def _states_kernel(
    KEYS, W, U, SUMS, STATES, NEW, CU_SEQLENS, CU_CHUNKS, k_token, k_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    BY_CHANNEL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the STATES at the chunks' starts ``[M, H, K, V]``, and NEW ``[T, H, V]``, which is n.

    Grid: sequences times heads times blocks of V. With a decay for each channel, KEYS are decayed to the chunk's end.
    """
    wait_for_inputs(EARLY)
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    first = tl.program_id(0) % BLOCKS * BLOCK_V
    head = tl.program_id(0) // BLOCKS % HEADS
    sequence = tl.program_id(0) // (BLOCKS * HEADS)
    begin, end = tl.load(CU_SEQLENS + sequence), tl.load(CU_SEQLENS + sequence + 1)
    KEYS += (head // GROUP).to(tl.int64) * k_head
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    first_chunk, end_chunk = tl.load(CU_CHUNKS + sequence), tl.load(CU_CHUNKS + sequence + 1)
    for place in range(0, end_chunk - first_chunk):
        length = tl.minimum(end - begin, C)
        k = load_rows(KEYS, begin, length, k_token, 0, C, K, BLOCK_K)
        w = load_rows(W + head * K, begin, length, HEADS * K, 0, C, K, BLOCK_K)
        u = load_rows(U + head * V, begin, length, HEADS * V, first, C, V, BLOCK_V)
        at, inside = state_of(STATES, first_chunk + place, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        rounded = state.to(w.dtype)
        tl.store(at, rounded, mask=inside)
        new = u.to(tl.float32) - product(w, rounded, PRECISION)
        store_rows(NEW + head * V, new, begin, length, HEADS * V, first, C, V, BLOCK_V)
        if BY_CHANNEL:
            total = load_total(SUMS, begin + length - 1, head, HEADS, K, BLOCK_K)[:, None]
        else:
            sums = tl.load(per_token(SUMS, begin, head, HEADS, C), mask=tl.arange(0, C) < length, other=0.0)
            total = tl.load(SUMS + (begin + length - 1).to(tl.int64) * HEADS + head)
            new *= tl.exp(total - sums)[:, None]
        state = state * tl.exp(total) + product(tl.trans(k), new.to(k.dtype), PRECISION)
        begin += C


@triton.jit
def _outputs_kernel(
    QUERIES, KEYS, SUMS, SCORES, STATES, NEW, OUT, BEGIN, END, scale, q_token, q_head, k_token, k_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    BY_CHANNEL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write OUT ``[T, H, V]``.

    With a decay for each channel, QUERIES are decayed from the chunk's start, and SCORES ``[M, H, C, C]`` are P.
    """
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    q = load_rows(QUERIES + (head // GROUP).to(tl.int64) * q_head, begin, length, q_token, 0, C, K, BLOCK_K)
    if BY_CHANNEL:
        scores = tl.load(square_of(SCORES, chunk, head, HEADS, C))
    else:
        k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, 0, C, K, BLOCK_K)
        sums = tl.load(per_token(SUMS, begin, head, HEADS, C), mask=tl.arange(0, C) < length, other=0.0)
        scores = (product(q, tl.trans(k), PRECISION) * pairwise_decays(sums, length, C)).to(q.dtype)
    for first in range(0, V, BLOCK_V):
        at, inside = state_of(STATES, chunk, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        state = tl.load(at, mask=inside, other=0.0)
        new = load_rows(NEW + head * V, begin, length, HEADS * V, first, C, V, BLOCK_V)
        out = product(q, state, PRECISION)
        if not BY_CHANNEL:
            out *= tl.exp(sums)[:, None]
        out += product(scores, new, PRECISION)
        store_rows(OUT + head * V, out * scale, begin, length, HEADS * V, first, C, V, BLOCK_V)


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, eps: float | None
) -> tuple[Tensor, Saved]:
    """Return the result ``[T, H, V]``, and what the backward reads.

    Args:
        q: ``[T, heads, K]``, in v's dtype.
        k: ``[T, heads, K]``, in v's dtype.
        v: ``[T, H, V]``.
        g: ``[T, H]`` or ``[T, H, K]``, at most 0.
        beta: ``[T, H]``.
        chunks: the chunks of the sequences; C is 16, 32 or 64.
        eps: added to the squared lengths of q and k, by which they are divided; None to take them as they are.
    """
    q_lengths, k_lengths = None, None
    if eps is not None:
        (q, q_lengths), (k, k_lengths) = (to_unit_length(x, eps) for x in (q, k))
    q, k, v, g = readable(q), readable(k), readable(v), g.contiguous()
    inverse = v.new_empty(len(chunks.begin), v.shape[1], chunks.size, chunks.size)
    scores = torch.empty_like(inverse) if g.ndim == 3 else None
    sums = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    saved = Saved(q, k, v, beta.contiguous(), sums, inverse, scores, q_lengths, k_lengths)
    walk, out = Walk.empty(saved), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    with on_device(v):
        (channels.solve if saved.by_channel else _solve)(saved, walk, g, chunks)
        states, new = run_states(saved, walk, chunks)
        _outputs_kernel[(len(chunks.begin) * v.shape[1],)](
            walk.q, walk.k, sums, scores, states, new, out, chunks.begin, chunks.end, k.shape[2] ** -0.5,
            *strides(walk.q, walk.k), BY_CHANNEL=saved.by_channel, **OUTPUTS.options(walk.k, v, chunks.size),
            **early(v),
        )  # fmt: skip
    return out, saved


def _solve(saved: Saved, walk: Walk, g: Tensor, chunks: Chunks) -> None:
    """Write the sums of g, the inverses, w and u."""
    k, v = saved.k, saved.v
    _solve_kernel[(len(chunks.begin) * v.shape[1],)](
        k, v, g, saved.beta, saved.sums, saved.inverse, walk.w, walk.u, chunks.begin, chunks.end, *strides(k, v),
        LEVELS=chunks.size.bit_length() - 1, **SOLVE.options(k, v, chunks.size), **early(v),
    )  # fmt: skip


def run_states(saved: Saved, walk: Walk, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Return the states at the chunks' starts ``[M, H, K, V]``, in v's dtype, and n ``[T, H, V]``."""
    k, u = walk.k, walk.u
    states = u.new_empty(len(chunks.begin), u.shape[1], k.shape[2], u.shape[2])
    new = torch.empty_like(u)
    programs, options = STATES.options_of_walk(k, u, chunks)
    _states_kernel[(programs,)](
        k, walk.w, u, saved.sums, states, new, chunks.cu_seqlens, chunks.cu_chunks, *strides(k),
        BY_CHANNEL=saved.by_channel, **options, **early(u),
    )  # fmt: skip
    return states, new
