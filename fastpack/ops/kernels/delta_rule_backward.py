"""The gated delta rule with a decay per head: the kernels of the backward.

With primes for gradients, and n, w, u, A, P, G as in :mod:`fastpack.ops.delta_rule` (q with its scale):

    n' = P^T o' + (k exp(G_last - G)) S'_next
    S' = exp(G_last) S'_next + (q exp(G))^T o' - w^T n'
    [a, b] = (I + A)^-T [w', n'],   w' = -n' S^T
    A' = -(a w^T + b u^T) below the diagonal,   (beta k exp(G))' = a,   (beta v)' = b
    P' = o' n^T up to the diagonal

The first kernel writes w, u and the part of n' within a chunk; the forward's second kernel follows; then one carries S'
through each sequence from its end, and two write the gradients of a chunk: through w and u, and through the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.chunks import Chunks
from fastpack.ops.kernels.delta_rule import (
    OUTPUTS,
    SOLVE,
    STATES,
    DeltaTile,
    Saved,
    block_of,
    load_rows,
    locate_chunk,
    pairwise_decays,
    per_token,
    product,
    readable,
    run_states,
    state_of,
    store_rows,
    strides,
    write_w_and_u,
)
from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs

AGAIN = DeltaTile(block_v=64, warps=4, stages=2, streamed=(0, 2, 0), resident=(2, 0, 0, 2))
STATE_GRADIENTS = DeltaTile(block_v=32, warps=4, stages=2, streamed=(3, 2, 0), resident=(0, 0, 1, 0))
SYSTEM_GRADIENTS = DeltaTile(block_v=32, warps=4, stages=2, streamed=(0, 3, 1), resident=(2, 0, 0, 2))
OUTPUT_GRADIENTS = DeltaTile(block_v=32, warps=4, stages=2, streamed=(0, 2, 2), resident=(2, 0, 0, 1))


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
    INVERSE += (chunk.to(tl.int64) * HEADS + head) * (C * C)
    inverse = tl.load(INVERSE + token[:, None] * C + token[None, :])
    q = load_rows(QUERIES + (head // GROUP).to(tl.int64) * q_head, begin, length, q_token, 0, C, K, BLOCK_K)
    k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, 0, C, K, BLOCK_K)
    write_w_and_u(
        VALUES, W, U, inverse, k, beta, sums, begin, length, head, v_token, v_head,
        HEADS, K, V, BLOCK_K, BLOCK_V, C, PRECISION,
    )  # fmt: skip
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
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the states at the chunks' ends, DSTATES ``[M, H, K, V]``, and complete DNEW.

    Grid: sequences times heads times blocks of V.
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
        sums = tl.load(per_token(SUMS, begin, head, HEADS, C), mask=tl.arange(0, C) < length, other=0.0)
        total = tl.load(SUMS + (begin + length - 1).to(tl.int64) * HEADS + head)
        at, inside = state_of(DSTATES, end_chunk - 1 - back, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        rounded = dstate.to(k.dtype)
        tl.store(at, rounded, mask=inside)
        dnew = local.to(tl.float32) + product(k, rounded, PRECISION) * tl.exp(total - sums)[:, None]
        dnew = dnew.to(k.dtype)
        store_rows(DNEW + head * V, dnew, begin, length, HEADS * V, first, C, V, BLOCK_V)
        decayed = (grad.to(tl.float32) * (tl.exp(sums) * scale)[:, None]).to(q.dtype)
        dstate = dstate * tl.exp(total) + product(tl.trans(q), decayed, PRECISION)
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
    INVERSE += (chunk.to(tl.int64) * HEADS + head) * (C * C)
    inverse = tl.load(INVERSE + token[None, :] * C + token[:, None])  # transposed
    dw = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    dA = tl.zeros((C, C), dtype=tl.float32)
    dbeta = tl.zeros((C,), dtype=tl.float32)
    VALUES += head.to(tl.int64) * v_head
    for first in range(0, V, BLOCK_V):
        at, inside = state_of(STATES, chunk, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        state = tl.load(at, mask=inside, other=0.0)
        dnew = load_rows(DNEW + head * V, begin, length, HEADS * V, first, C, V, BLOCK_V)
        u = load_rows(U + head * V, begin, length, HEADS * V, first, C, V, BLOCK_V)
        v = load_rows(VALUES, begin, length, v_token, first, C, V, BLOCK_V)
        dw -= product(dnew, tl.trans(state), PRECISION)
        drates = product(inverse, dnew, PRECISION)
        dA -= product(drates, tl.trans(u), PRECISION)
        dbeta += tl.sum(drates * v.to(tl.float32), 1)
        store_rows(DV + head * V, drates * beta[:, None], begin, length, HEADS * V, first, C, V, BLOCK_V)

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


@triton.jit(do_not_specialize=["rows"])
def _key_gradients_kernel(
    GRAD, X, INVERSE_LENGTH, OUT, rows, token, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Add up GRAD ``[T, H, K]`` over the heads of a group: OUT ``[T, heads, K]``.

    If there is an INVERSE_LENGTH, X ``[T, heads, K]`` has rows of length 1, and OUT is the gradient before normalising.
    """
    wait_for_inputs(EARLY)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    mask = (row < rows)[:, None] & (column < K)[None, :]
    GRAD += row.to(tl.int64)[:, None] * (GROUP * K) + column[None, :]
    grad = tl.zeros((ROWS, BLOCK_K), dtype=tl.float32)
    for member in tl.static_range(GROUP):
        grad += tl.load(GRAD + member * K, mask=mask, other=0.0).to(tl.float32)
    if INVERSE_LENGTH is not None:
        at = (row // HEADS).to(tl.int64) * token + (row % HEADS).to(tl.int64) * head
        x = tl.load(X + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(INVERSE_LENGTH + row, mask=row < rows, other=0.0)
        grad = (grad - x * tl.sum(grad * x, 1)[:, None]) * inverse[:, None]
    tl.store(OUT + row.to(tl.int64)[:, None] * K + column[None, :], grad.to(OUT.dtype.element_ty), mask=mask)


def fits(k: Tensor, v: Tensor, size: int) -> bool:
    """Return whether chunks of ``size`` tokens fit into the shared memory of this device in every kernel."""
    tiles = (SOLVE, STATES, OUTPUTS, AGAIN, STATE_GRADIENTS, SYSTEM_GRADIENTS, OUTPUT_GRADIENTS)
    return all(tile.options(k, v, size)["num_stages"] for tile in tiles)


def backward(
    grad: Tensor, saved: Saved, chunks: Chunks, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g and beta.

    Args:
        grad: ``[T, H, V]``, the gradient of the result.
        saved: what the forward returned.
        chunks: the chunks of the forward.
        dtype: g's dtype.
    """
    q, k, v, beta, sums, inverse = saved.q, saved.k, saved.v, saved.beta, saved.sums, saved.inverse
    grad = readable(grad)
    (tokens, heads, _), size = v.shape, k.shape[2]
    programs = (len(chunks.begin) * heads,)
    scale = size**-0.5
    w = v.new_empty(tokens, heads, size)
    u, dnew, dv = (torch.empty(v.shape, dtype=v.dtype, device=v.device) for _ in range(3))
    dq, dk = torch.empty_like(w), torch.empty_like(w)
    dg, dsums, dbeta = torch.empty_like(sums, dtype=dtype), torch.empty_like(sums), torch.empty_like(beta)
    with on_device(v):
        _again_kernel[programs](
            q, k, v, beta, sums, inverse, grad, w, u, dnew, chunks.begin, chunks.end, scale, *strides(q, k, v, grad),
            **AGAIN.options(k, v, chunks.size), **early(v),
        )  # fmt: skip
        states, new = run_states(saved, w, u, chunks)
        dstates = torch.empty_like(states)
        walks, options = STATE_GRADIENTS.options_of_walk(k, v, chunks)
        _state_gradients_kernel[(walks,)](
            q, k, sums, w, grad, dnew, dstates, chunks.cu_seqlens, chunks.cu_chunks, scale, *strides(q, k, grad),
            **options, **early(v),
        )  # fmt: skip
        _system_gradients_kernel[programs](
            k, v, beta, sums, inverse, w, u, states, dnew, dk, dv, dsums, dbeta, chunks.begin, chunks.end,
            *strides(k, v), **SYSTEM_GRADIENTS.options(k, v, chunks.size), **early(v),
        )  # fmt: skip
        _output_gradients_kernel[programs](
            q, k, sums, grad, new, states, dstates, dsums, dq, dk, dg, chunks.begin, chunks.end, scale,
            *strides(q, k, grad), **OUTPUT_GRADIENTS.options(k, v, chunks.size), **early(v),
        )  # fmt: skip
        return _of_keys(dq, q, saved.q_lengths), _of_keys(dk, k, saved.k_lengths), dv, dg, dbeta


def _of_keys(grad: Tensor, x: Tensor, inverse_lengths: Tensor | None) -> Tensor:
    """Return the gradient of q or k ``[T, heads, K]`` from that of each head of values ``[T, H, K]``."""
    if inverse_lengths is None and grad.shape == x.shape:
        return grad
    tokens, heads, size = x.shape
    block = block_of(size)
    rows = max(1, 2048 // block)
    out = x.new_empty(x.shape)
    _key_gradients_kernel[(triton.cdiv(tokens * heads, rows),)](
        grad, x, inverse_lengths, out, tokens * heads, *strides(x), heads, grad.shape[1] // heads, size, block, rows,
        **early(x),
    )  # fmt: skip
    return out
