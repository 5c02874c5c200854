"""The gated delta rule with a decay for each channel of a key: the backward's kernels within a chunk.

:mod:`fastpack.ops.kernels.delta_rule_backward` has the formulas, and :mod:`fastpack.ops.kernels.delta_rule_channels`
the levels. With x' and y' the gradients of the rows' and the columns' vectors in a sum of pairs with decays, the sums'
gradient is ``x x'`` for rows and ``-y y'`` for columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.chunks import Chunks
from fastpack.ops.kernels.delta_rule_channels import (
    SOLVE,
    columns_of,
    factors_of_level,
    pairs_of_level,
    write_decayed,
)
from fastpack.ops.kernels.delta_rule_parts import (
    AGAIN,
    DeltaTile,
    Saved,
    Walk,
    load_rows,
    load_total,
    locate_chunk,
    per_token,
    product,
    square_of,
    state_of,
    store_rows,
    strides,
    write_u,
    write_value_gradients,
)
from fastpack.ops.kernels.launch import UNPIPELINED, early, wait_for_inputs

SYSTEM_GRADIENTS = DeltaTile(block_v=32, warps=8, stages=2, streamed=(0, 3, 1), resident=(2, 0, 0, 2))
OUTPUT_GRADIENTS = DeltaTile(block_v=64, warps=8, stages=UNPIPELINED, streamed=(0, 2, 2), resident=(2, 0, 0, 1))
PAIR_GRADIENTS = DeltaTile(block_v=16, warps=8, stages=1, streamed=(0, 1, 0), resident=(3, 0, 0, 4))
TILES = (SOLVE, AGAIN, SYSTEM_GRADIENTS, OUTPUT_GRADIENTS, PAIR_GRADIENTS)


@triton.jit
def _again_kernel(
    QUERIES, KEYS, VALUES, BETA, SUMS, INVERSE, SCORES, GRAD, W, U, GROWN, LEFT, DNEW, BEGIN, END, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write W, U, GROWN, LEFT and ``P^T o'`` into DNEW ``[T, H, V]``."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    beta = tl.load(per_token(BETA, begin, head, HEADS, C), mask=tl.arange(0, C) < length, other=0.0).to(tl.float32)
    inverse = tl.load(square_of(INVERSE, chunk, head, HEADS, C))
    write_decayed(
        QUERIES, KEYS, SUMS, W, GROWN, LEFT, inverse, beta, begin, length, head, q_token, q_head, k_token, k_head,
        HEADS, GROUP, K, COLUMNS, C, PRECISION,
    )  # fmt: skip
    write_u(VALUES, U, inverse, beta, begin, length, head, v_token, v_head, HEADS, V, BLOCK_V, C, PRECISION)
    scores = tl.trans(tl.load(square_of(SCORES, chunk, head, HEADS, C)))
    GRAD += head.to(tl.int64) * grad_head
    for first in range(0, V, BLOCK_V):
        grad = load_rows(GRAD, begin, length, grad_token, first, C, V, BLOCK_V)
        dnew = product(scores, grad, PRECISION) * scale
        store_rows(DNEW + head * V, dnew, begin, length, HEADS * V, first, C, V, BLOCK_V)


@triton.jit
def _system_gradients_kernel(
    KEYS, VALUES, BETA, SUMS, INVERSE, W, U, STATES, DNEW, DK, DV, DSUMS, DBETA, DA, BEGIN, END,
    k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write DV and DA ``[M, H, C, C]``, and what w and u give to DK and DSUMS ``[T, H, K]`` and to DBETA ``[T, H]``."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    token = tl.arange(0, C)
    beta = tl.load(per_token(BETA, begin, head, HEADS, C), mask=token < length, other=0.0).to(tl.float32)
    inverse = tl.trans(tl.load(square_of(INVERSE, chunk, head, HEADS, C)))
    dw, dA, dbeta = write_value_gradients(
        VALUES, U, STATES, DNEW, DV, inverse, beta, chunk, begin, length, head, v_token, v_head,
        HEADS, K, V, BLOCK_K, BLOCK_V, C, PRECISION,
    )  # fmt: skip

    w = load_rows(W + head * K, begin, length, HEADS * K, 0, C, K, BLOCK_K)
    drates = product(inverse, dw.to(w.dtype), PRECISION)
    dA -= product(drates, tl.trans(w), PRECISION)
    dA = tl.where(token[:, None] > token[None, :], dA, 0.0)
    tl.store(square_of(DA, chunk, head, HEADS, C), dA.to(DA.dtype.element_ty))
    k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, 0, C, K, BLOCK_K)
    drates *= tl.exp(load_rows(SUMS + head * K, begin, length, HEADS * K, 0, C, K, BLOCK_K))
    along = drates * k.to(tl.float32)
    dbeta += tl.sum(along, 1)
    store_rows(DK + head * K, drates * beta[:, None], begin, length, HEADS * K, 0, C, K, BLOCK_K)
    store_rows(DSUMS + head * K, along * beta[:, None], begin, length, HEADS * K, 0, C, K, BLOCK_K)
    tl.store(per_token(DBETA, begin, head, HEADS, C), dbeta, mask=token < length)


@triton.jit
def _output_gradients_kernel(
    QUERIES, KEYS, SUMS, GRAD, NEW, STATES, DSTATES, DQ, DK, DSUMS, DSCORES, BEGIN, END, scale,
    q_token, q_head, k_token, k_head, grad_token, grad_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write DSCORES ``[M, H, C, C]``, and what states and outputs give to DQ, DK and DSUMS ``[T, H, K]``."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    token = tl.arange(0, C)
    dq = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    dk = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    dscores = tl.zeros((C, C), dtype=tl.float32)
    dlast = tl.zeros((BLOCK_K,), dtype=tl.float32)
    GRAD += head.to(tl.int64) * grad_head
    for first in range(0, V, BLOCK_V):
        at, inside = state_of(STATES, chunk, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        state = tl.load(at, mask=inside, other=0.0)
        at, inside = state_of(DSTATES, chunk, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        dstate = tl.load(at, mask=inside, other=0.0)
        grad = load_rows(GRAD, begin, length, grad_token, first, C, V, BLOCK_V)
        new = load_rows(NEW + head * V, begin, length, HEADS * V, first, C, V, BLOCK_V)
        dlast += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        dq += product(grad, tl.trans(state), PRECISION)
        dk += product(new, tl.trans(dstate), PRECISION)
        dscores += product(grad, tl.trans(new), PRECISION)
    dscores = tl.where((token[:, None] >= token[None, :]) & (token < length)[:, None], dscores * scale, 0.0)
    tl.store(square_of(DSCORES, chunk, head, HEADS, C), dscores.to(DSCORES.dtype.element_ty))

    sums = load_rows(SUMS + head * K, begin, length, HEADS * K, 0, C, K, BLOCK_K)
    total = load_total(SUMS, begin + length - 1, head, HEADS, K, BLOCK_K)
    k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, 0, C, K, BLOCK_K)
    dk *= tl.exp(total[None, :] - sums)
    through = dk * k.to(tl.float32)
    dlast = dlast * tl.exp(total) + tl.sum(through, 0)
    dk += load_rows(DK + head * K, begin, length, HEADS * K, 0, C, K, BLOCK_K).to(tl.float32)
    store_rows(DK + head * K, dk, begin, length, HEADS * K, 0, C, K, BLOCK_K)
    q = load_rows(QUERIES + (head // GROUP).to(tl.int64) * q_head, begin, length, q_token, 0, C, K, BLOCK_K)
    dq *= tl.exp(sums) * scale
    store_rows(DQ + head * K, dq, begin, length, HEADS * K, 0, C, K, BLOCK_K)
    dsums = load_rows(DSUMS + head * K, begin, length, HEADS * K, 0, C, K, BLOCK_K)
    dsums += dq * q.to(tl.float32) - through + tl.where((token == length - 1)[:, None], dlast[None, :], 0.0)
    store_rows(DSUMS + head * K, dsums, begin, length, HEADS * K, 0, C, K, BLOCK_K)


@triton.jit
def _pair_gradients_kernel(
    QUERIES, KEYS, BETA, SUMS, DA, DSCORES, DQ, DK, DSUMS, DG, DBETA, BEGIN, END, q_token, q_head, k_token, k_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, LEVELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Complete DQ, DK and DBETA with what A and P give, and write DG ``[T, H, K]``."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    token = tl.arange(0, C)
    real = token < length
    beta = tl.load(per_token(BETA, begin, head, HEADS, C), mask=real, other=0.0).to(tl.float32)
    dbeta = tl.load(per_token(DBETA, begin, head, HEADS, C), mask=real, other=0.0)
    dA = tl.load(square_of(DA, chunk, head, HEADS, C))
    dscores = tl.load(square_of(DSCORES, chunk, head, HEADS, C))
    own = tl.sum(tl.where(token[:, None] == token[None, :], dscores.to(tl.float32), 0.0), 1)[:, None]
    for first in range(0, K, COLUMNS):
        q = load_rows(QUERIES + (head // GROUP).to(tl.int64) * q_head, begin, length, q_token, first, C, K, COLUMNS)
        k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, first, C, K, COLUMNS)
        sums = load_rows(SUMS + head * K, begin, length, HEADS * K, first, C, K, COLUMNS)
        dtype = k.dtype
        q, k = q.to(tl.float32), k.to(tl.float32)
        of_rates = tl.zeros((C, COLUMNS), dtype=tl.float32)  # the gradients of beta k, of q, and of k as columns
        of_queries = tl.zeros((C, COLUMNS), dtype=tl.float32)
        of_columns = tl.zeros((C, COLUMNS), dtype=tl.float32)
        for level in tl.range(0, LEVELS, num_stages=1):
            factors, late = factors_of_level(SUMS, sums, begin, length, head, first, level, HEADS, K, COLUMNS, C)
            pairs = pairs_of_level(level, C)
            dA_now = tl.where(pairs, dA, 0.0).to(dtype)
            dscores_now = tl.where(pairs, dscores, 0.0).to(dtype)
            before = tl.where(late, 0.0, k * factors).to(dtype)
            of_rates += tl.where(late, factors * product(dA_now, before, PRECISION), 0.0)
            of_queries += tl.where(late, factors * product(dscores_now, before, PRECISION), 0.0)
            columns = product(tl.trans(dA_now), (k * beta[:, None] * factors).to(dtype), PRECISION)
            columns += product(tl.trans(dscores_now), (q * factors).to(dtype), PRECISION)
            of_columns += tl.where(late, 0.0, factors * columns)
        dbeta += tl.sum(of_rates * k, 1)
        of_rates *= beta[:, None]
        dsums = load_rows(DSUMS + head * K, begin, length, HEADS * K, first, C, K, COLUMNS)
        dsums += of_queries * q + (of_rates - of_columns) * k
        dg = tl.sum(dsums, 0)[None, :] - tl.cumsum(dsums, 0) + dsums
        store_rows(DG + head * K, dg, begin, length, HEADS * K, first, C, K, COLUMNS)
        dq = load_rows(DQ + head * K, begin, length, HEADS * K, first, C, K, COLUMNS).to(tl.float32)
        dq += of_queries + own * k
        store_rows(DQ + head * K, dq, begin, length, HEADS * K, first, C, K, COLUMNS)
        dk = load_rows(DK + head * K, begin, length, HEADS * K, first, C, K, COLUMNS).to(tl.float32)
        dk += of_rates + of_columns + own * q
        store_rows(DK + head * K, dk, begin, length, HEADS * K, first, C, K, COLUMNS)
    tl.store(per_token(DBETA, begin, head, HEADS, C), dbeta, mask=real)


def again(saved: Saved, walk: Walk, grad: Tensor, dnew: Tensor, chunks: Chunks) -> None:
    """Write w, u, decayed queries and keys, and the part of n' within a chunk."""
    q, k, v = saved.q, saved.k, saved.v
    _again_kernel[(len(chunks.begin) * v.shape[1],)](
        q, k, v, saved.beta, saved.sums, saved.inverse, saved.scores, grad, walk.w, walk.u, walk.q, walk.k, dnew,
        chunks.begin, chunks.end, k.shape[2] ** -0.5, *strides(q, k, v, grad),
        **columns_of(AGAIN.options(k, v, chunks.size)), **early(v),
    )  # fmt: skip


def gradients(
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
    q, k, v, beta, sums = saved.q, saved.k, saved.v, saved.beta, saved.sums
    dq, dk, dv, dg, dbeta = grads
    dA, dscores = saved.inverse.new_empty(2, *saved.inverse.shape)
    of_beta = sums.new_empty(beta.shape)
    programs, edges, size = (len(chunks.begin) * v.shape[1],), (chunks.begin, chunks.end), chunks.size
    _system_gradients_kernel[programs](
        k, v, beta, sums, saved.inverse, walk.w, walk.u, states[0], news[1], dk, dv, dsums, of_beta, dA,
        *edges, *strides(k, v), **SYSTEM_GRADIENTS.options(k, v, size), **early(v),
    )  # fmt: skip
    _output_gradients_kernel[programs](
        q, k, sums, grad, news[0], *states, dq, dk, dsums, dscores, *edges, k.shape[2] ** -0.5,
        *strides(q, k, grad), **OUTPUT_GRADIENTS.options(k, v, size), **early(v),
    )  # fmt: skip
    _pair_gradients_kernel[programs](
        q, k, beta, sums, dA, dscores, dq, dk, dsums, dg, of_beta, *edges, *strides(q, k),
        LEVELS=size.bit_length() - 1, **columns_of(PAIR_GRADIENTS.options(k, v, size)), **early(v),
    )  # fmt: skip
    dbeta.copy_(of_beta)
