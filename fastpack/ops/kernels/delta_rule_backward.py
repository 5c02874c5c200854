"""The gated delta rule: the kernels of the backward.

With primes for gradients, and n, w, u, A, P, G as in :mod:`fastpack.ops.delta_rule` (q with its scale):

    n' = P^T o' + (k exp(G_last - G)) S'_next
    S' = exp(G_last) S'_next + (q exp(G))^T o' - w^T n'
    [a, b] = (I + A)^-T [w', n'],   w' = -n' S^T
    A' = -(a w^T + b u^T) below the diagonal,   (beta k exp(G))' = a,   (beta v)' = b
    P' = o' n^T up to the diagonal

The first kernel writes w, u and the part of n' within a chunk; the forward's second kernel follows; then one carries S'
through each sequence from its end, and two write the gradients of a chunk: through w and u, and through the result.
With a decay for each channel, other kernels work within a chunk
(:mod:`fastpack.ops.kernels.delta_rule_channels_backward`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.chunks import Chunks
from fastpack.ops.kernels import delta_rule_channels_backward as channels
from fastpack.ops.kernels.delta_rule import OUTPUTS, SOLVE, STATES, run_states, write_w
from fastpack.ops.kernels.delta_rule_parts import (
    AGAIN,
    DeltaTile,
    Saved,
    Walk,
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
    write_value_gradients,
)
from fastpack.ops.kernels.delta_rule_units import gradient_of_keys
from fastpack.ops.kernels.launch import UNPIPELINED, early, on_device, wait_for_inputs

STATE_GRADIENTS = DeltaTile(block_v=32, warps=4, stages=2, streamed=(3, 2, 0), resident=(0, 0, 1, 0))
SYSTEM_GRADIENTS = DeltaTile(block_v=32, warps=4, stages=2, streamed=(0, 3, 1), resident=(2, 0, 0, 2))
OUTPUT_GRADIENTS = DeltaTile(block_v=64, warps=4, stages=UNPIPELINED, streamed=(0, 2, 2), resident=(2, 0, 0, 1))


@triton.jit
def _again_kernel(
    QUERIES, KEYS, VALUES, BETA, SUMS, INVERSE, GRAD, W, U, DNEW, BEGIN, END, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write W, U and ``P^T o'`` into DNEW ``[T, H, V]``."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    token = tl.arange(0, C)
    beta = tl.load(per_token(BETA, begin, head, HEADS, C), mask=token < length, other=0.0).to(tl.float32)
    sums = tl.load(per_token(SUMS, begin, head, HEADS, C), mask=token < length, other=0.0)
    inverse = tl.load(square_of(INVERSE, chunk, head, HEADS, C))
    q = load_rows(QUERIES + (head // GROUP).to(tl.int64) * q_head, begin, length, q_token, 0, C, K, BLOCK_K)
    k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, 0, C, K, BLOCK_K)
    write_w(W, inverse, k, beta, sums, begin, length, head, HEADS, K, BLOCK_K, C, PRECISION)
    write_u(VALUES, U, inverse, beta, begin, length, head, v_token, v_head, HEADS, V, BLOCK_V, C, PRECISION)
    scores = product(q, tl.trans(k), PRECISION) * pairwise_decays(sums, length, C) * scale
    scores = tl.trans(scores.to(q.dtype))
    GRAD += head.to(tl.int64) * grad_head
    for first in range(0, V, BLOCK_V):
        grad = load_rows(GRAD, begin, length, grad_token, first, C, V, BLOCK_V)
        dnew = product(scores, grad, PRECISION)
        store_rows(DNEW + head * V, dnew, begin, length, HEADS * V, first, C, V, BLOCK_V)


@triton.jit
def _state_gradients_kernel(
    QUERIES, KEYS, SUMS, W, GRAD, DNEW, DSTATES, CU_SEQLENS, CU_CHUNKS, scale,
    q_token, q_head, k_token, k_head, grad_token, grad_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    BY_CHANNEL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the states at the chunks' ends, DSTATES ``[M, H, K, V]``, and complete DNEW.

    Grid: sequences times heads times blocks of V. With a decay for each channel, QUERIES and KEYS are decayed.
    """
    wait_for_inputs(EARLY)
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    first = tl.program_id(0) % BLOCKS * BLOCK_V
    head = tl.program_id(0) // BLOCKS % HEADS
    sequence = tl.program_id(0) // (BLOCKS * HEADS)
    end = tl.load(CU_SEQLENS + sequence + 1)
    first_chunk, end_chunk = tl.load(CU_CHUNKS + sequence), tl.load(CU_CHUNKS + sequence + 1)
    begin = tl.load(CU_SEQLENS + sequence) + (end_chunk - first_chunk) * C
    QUERIES += (head // GROUP).to(tl.int64) * q_head
    KEYS += (head // GROUP).to(tl.int64) * k_head
    GRAD += head.to(tl.int64) * grad_head
    dstate = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    for back in range(0, end_chunk - first_chunk):
        begin -= C
        length = tl.minimum(end - begin, C)
        q = load_rows(QUERIES, begin, length, q_token, 0, C, K, BLOCK_K)
        k = load_rows(KEYS, begin, length, k_token, 0, C, K, BLOCK_K)
        w = load_rows(W + head * K, begin, length, HEADS * K, 0, C, K, BLOCK_K)
        grad = load_rows(GRAD, begin, length, grad_token, first, C, V, BLOCK_V)
        local = load_rows(DNEW + head * V, begin, length, HEADS * V, first, C, V, BLOCK_V)
        at, inside = state_of(DSTATES, end_chunk - 1 - back, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        rounded = dstate.to(k.dtype)
        tl.store(at, rounded, mask=inside)
        through = product(k, rounded, PRECISION)
        grad = grad.to(tl.float32) * scale
        if BY_CHANNEL:
            total = load_total(SUMS, begin + length - 1, head, HEADS, K, BLOCK_K)[:, None]
        else:
            sums = tl.load(per_token(SUMS, begin, head, HEADS, C), mask=tl.arange(0, C) < length, other=0.0)
            total = tl.load(SUMS + (begin + length - 1).to(tl.int64) * HEADS + head)
            through *= tl.exp(total - sums)[:, None]
            grad *= tl.exp(sums)[:, None]
        dnew = (local.to(tl.float32) + through).to(k.dtype)
        store_rows(DNEW + head * V, dnew, begin, length, HEADS * V, first, C, V, BLOCK_V)
        dstate = dstate * tl.exp(total) + product(tl.trans(q), grad.to(q.dtype), PRECISION)
        dstate -= product(tl.trans(w), dnew, PRECISION)


@triton.jit
def _system_gradients_kernel(
    KEYS, VALUES, BETA, SUMS, INVERSE, W, U, STATES, DNEW, DK, DV, DSUMS, DBETA, BEGIN, END,
    k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write what w and u give to the gradients: all of DV and DBETA, parts of DK ``[T, H, K]`` and DSUMS ``[T, H]``."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    token = tl.arange(0, C)
    real = token < length
    beta = tl.load(per_token(BETA, begin, head, HEADS, C), mask=real, other=0.0).to(tl.float32)
    inverse = tl.trans(tl.load(square_of(INVERSE, chunk, head, HEADS, C)))
    dw, dA, dbeta = write_value_gradients(
        VALUES, U, STATES, DNEW, DV, inverse, beta, chunk, begin, length, head, v_token, v_head,
        HEADS, K, V, BLOCK_K, BLOCK_V, C, PRECISION,
    )  # fmt: skip

    sums = tl.load(per_token(SUMS, begin, head, HEADS, C), mask=real, other=0.0)
    grown = tl.exp(sums)
    k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, 0, C, K, BLOCK_K)
    w = load_rows(W + head * K, begin, length, HEADS * K, 0, C, K, BLOCK_K)
    drates = product(inverse, dw.to(k.dtype), PRECISION)
    dA -= product(drates, tl.trans(w), PRECISION)
    along = tl.sum(drates * k.to(tl.float32), 1) * grown
    dbeta += along
    dsums = along * beta

    dA = tl.where(token[:, None] > token[None, :], dA * pairwise_decays(sums, length, C), 0.0)
    similar = dA * product(k, tl.trans(k), PRECISION)
    along = tl.sum(similar, 1)
    dbeta += along
    dsums += along * beta - tl.sum(similar * beta[:, None], 0)
    dA *= beta[:, None]
    dk = drates * (beta * grown)[:, None] + product(dA + tl.trans(dA), k, PRECISION)
    store_rows(DK + head * K, dk, begin, length, HEADS * K, 0, C, K, BLOCK_K)
    tl.store(per_token(DSUMS, begin, head, HEADS, C), dsums, mask=real)
    tl.store(per_token(DBETA, begin, head, HEADS, C), dbeta.to(DBETA.dtype.element_ty), mask=real)


@triton.jit
def _output_gradients_kernel(
    QUERIES, KEYS, SUMS, GRAD, NEW, STATES, DSTATES, DSUMS, DQ, DK, DG, BEGIN, END, scale,
    q_token, q_head, k_token, k_head, grad_token, grad_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write DQ ``[T, H, K]`` of each head of values, complete DK, and write DG ``[T, H]``."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    token = tl.arange(0, C)
    real = token < length
    sums = tl.load(per_token(SUMS, begin, head, HEADS, C), mask=real, other=0.0)
    total = tl.load(SUMS + (begin + length - 1).to(tl.int64) * HEADS + head)
    dsums = tl.load(per_token(DSUMS, begin, head, HEADS, C), mask=real, other=0.0)
    dq = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    dk = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    dscores = tl.zeros((C, C), dtype=tl.float32)
    dlast = 0.0
    GRAD += head.to(tl.int64) * grad_head
    for first in range(0, V, BLOCK_V):
        at, inside = state_of(STATES, chunk, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        state = tl.load(at, mask=inside, other=0.0)
        at, inside = state_of(DSTATES, chunk, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        dstate = tl.load(at, mask=inside, other=0.0)
        grad = load_rows(GRAD, begin, length, grad_token, first, C, V, BLOCK_V)
        new = load_rows(NEW + head * V, begin, length, HEADS * V, first, C, V, BLOCK_V)
        dlast += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
        dq += product(grad, tl.trans(state), PRECISION)
        dk += product(new, tl.trans(dstate), PRECISION)
        dscores += product(grad, tl.trans(new), PRECISION)

    k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, 0, C, K, BLOCK_K)
    dk *= tl.exp(total - sums)[:, None]
    through = tl.sum(dk * k.to(tl.float32), 1)
    dsums -= through
    dlast = dlast * tl.exp(total) + tl.sum(through, 0)

    q = load_rows(QUERIES + (head // GROUP).to(tl.int64) * q_head, begin, length, q_token, 0, C, K, BLOCK_K)
    dscores *= pairwise_decays(sums, length, C) * scale
    dk += product(tl.trans(dscores), q, PRECISION)
    dk += load_rows(DK + head * K, begin, length, HEADS * K, 0, C, K, BLOCK_K).to(tl.float32)
    store_rows(DK + head * K, dk, begin, length, HEADS * K, 0, C, K, BLOCK_K)
    similar = dscores * product(q, tl.trans(k), PRECISION)
    dsums += tl.sum(similar, 1) - tl.sum(similar, 0)
    dq *= (tl.exp(sums) * scale)[:, None]
    dsums += tl.sum(dq * q.to(tl.float32), 1)
    dq += product(dscores, k, PRECISION)
    store_rows(DQ + head * K, dq, begin, length, HEADS * K, 0, C, K, BLOCK_K)
    dg = tl.sum(tl.where(token[:, None] >= token[None, :], dsums[:, None], 0.0), 0) + dlast
    tl.store(per_token(DG, begin, head, HEADS, C), dg.to(DG.dtype.element_ty), mask=real)


def fits(k: Tensor, v: Tensor, chunks: Chunks, *, by_channel: bool) -> bool:
    """Return whether these chunks fit into the shared memory of this device in every kernel."""
    within = channels.TILES if by_channel else (SOLVE, AGAIN, SYSTEM_GRADIENTS, OUTPUT_GRADIENTS)
    tiles = (*within, STATES, OUTPUTS, STATE_GRADIENTS)
    return all(tile.options(k, v, chunks.size)["num_stages"] for tile in tiles)


def backward(grad: Tensor, saved: Saved, chunks: Chunks, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g and beta.

    Args:
        grad: ``[T, H, V]``, the gradient of the result.
        saved: what the forward returned.
        chunks: the chunks of the forward.
        dtype: g's dtype.
    """
    grad, v, walk = readable(grad), saved.v, Walk.empty(saved)
    dnew, dv = torch.empty_like(walk.u), torch.empty_like(walk.u)
    dq, dk = torch.empty_like(walk.w), torch.empty_like(walk.w)
    dsums = torch.empty_like(saved.sums)
    dg, dbeta = torch.empty_like(dsums, dtype=dtype), torch.empty_like(saved.beta)
    with on_device(v):
        (channels.again if saved.by_channel else _again)(saved, walk, grad, dnew, chunks)
        states, new = run_states(saved, walk, chunks)
        dstates = torch.empty_like(states)
        programs, options = STATE_GRADIENTS.options_of_walk(walk.k, v, chunks)
        _state_gradients_kernel[(programs,)](
            walk.q, walk.k, saved.sums, walk.w, grad, dnew, dstates, chunks.cu_seqlens, chunks.cu_chunks,
            walk.k.shape[2] ** -0.5, *strides(walk.q, walk.k, grad), BY_CHANNEL=saved.by_channel, **options, **early(v),
        )  # fmt: skip
        (channels.gradients if saved.by_channel else _gradients)(
            saved, walk, grad, (states, dstates), (new, dnew), (dq, dk, dv, dg, dbeta), dsums, chunks
        )
        dq = gradient_of_keys(dq, saved.q, saved.q_lengths)
        dk = gradient_of_keys(dk, saved.k, saved.k_lengths)
    return dq, dk, dv, dg, dbeta


def _again(saved: Saved, walk: Walk, grad: Tensor, dnew: Tensor, chunks: Chunks) -> None:
    """Write w, u and the part of n' within a chunk."""
    q, k, v = saved.q, saved.k, saved.v
    _again_kernel[(len(chunks.begin) * v.shape[1],)](
        q, k, v, saved.beta, saved.sums, saved.inverse, grad, walk.w, walk.u, dnew, chunks.begin, chunks.end,
        k.shape[2] ** -0.5, *strides(q, k, v, grad), **AGAIN.options(k, v, chunks.size), **early(v),
    )  # fmt: skip


def _gradients(
    saved: Saved,
    walk: Walk,
    grad: Tensor,
    states: tuple[Tensor, Tensor],
    news: tuple[Tensor, Tensor],
    grads: tuple[Tensor, ...],
    dsums: Tensor,
    chunks: Chunks,
) -> None:
    """Write the gradients of q and k for each head of values, and those of v, g and beta."""
    q, k, v, sums = saved.q, saved.k, saved.v, saved.sums
    dq, dk, dv, dg, dbeta = grads
    programs = (len(chunks.begin) * v.shape[1],)
    _system_gradients_kernel[programs](
        k, v, saved.beta, sums, saved.inverse, walk.w, walk.u, states[0], news[1], dk, dv, dsums, dbeta,
        chunks.begin, chunks.end, *strides(k, v), **SYSTEM_GRADIENTS.options(k, v, chunks.size), **early(v),
    )  # fmt: skip
    _output_gradients_kernel[programs](
        q, k, sums, grad, news[0], *states, dsums, dq, dk, dg, chunks.begin, chunks.end, k.shape[2] ** -0.5,
        *strides(q, k, grad), **OUTPUT_GRADIENTS.options(k, v, chunks.size), **early(v),
    )  # fmt: skip
