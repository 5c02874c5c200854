"""Mamba-2's scan of packed sequences, backward: only the inputs are kept, and states are computed again.

With g the gradient of y, h the state before a chunk, D the gradient of the state after it, e the chunk's last token,
L[i, j] the decay from token j to i (L[i, 0] from the chunk's begin), and for j <= i:

    P[i, j] = L[i, j] dt[j] (g[i] . x[j])
    du[j]   = sum_i L[i, j] (C[i] . B[j]) g[i] + L[e, j] D^T B[j]
    dx[j]   = dt[j] du[j]
    dC[i]   = sum over heads of sum_j P[i, j] B[j] + L[i, 0] h g[i]
    dB[j]   = sum over heads of sum_i P[i, j] C[i] + L[e, j] dt[j] D x[j]

A step a_k = A dt_k decays what passes from a token before k (or the state h) to a token from k on (or the state after
the chunk). Its gradient is the sum of just these products, so that nothing cancels:

    da[k]   = sum over j < k <= i of P[i, j] (C[i] . B[j])  +  sum over k <= i of L[i, 0] g[i] . (h^T C[i])
              + sum over j < k of L[e, j] dt[j] x[j] . (D^T B[j])  +  L[e, 0] <h, D>
    ddt[k]  = x[k] . du[k] + A da[k],  dA = sum over k of dt[k] da[k]

D runs through the chunks in reverse, by the kernel of the states. Then one launch takes a chunk of a head, for dx, ddt
and dA; and one takes a chunk of a group and walks over its heads, for dB and dC. If there are few such programs,
several share a group's heads, and their sums are added afterwards, in a fixed order.

Shape suffixes as in :mod:`fastpack.ops.kernels.ssd`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import UNPIPELINED, early, on_device, processors, wait_for_inputs
from fastpack.ops.kernels.ssd import Inputs, columns, states, sums_of_decays
from fastpack.ops.kernels.ssd_parts import (
    PRECISION,
    decays_between,
    decays_to_end,
    load_per_token,
    load_rows,
    load_state,
    load_sums,
    store_rows,
)

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

WARPS = 8
"""With half as many, registers spill."""
WAVES = 4
"""Programs per multiprocessor, for dB and dC, above which none of them share a group's heads."""


@triton.jit(do_not_specialize=["tokens"])
def _heads_kernel(
    X, DT, SUMS, A, B, C, GRAD, BEFORE, AFTER, DX, DDT, DA, BEGIN, END, tokens,
    x_token, x_head, b_token, b_group, c_token, c_group, grad_token, grad_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write DX ``[T, H, V]``, DDT ``[T, H]`` and each chunk's part of dA, ``[M, H]``."""
    wait_for_inputs(EARLY)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    chunk = tl.program_id(0) // HEADS
    end = tl.load(END + chunk)
    token = tl.load(BEGIN + chunk) + tl.arange(0, L)
    valid = token < end
    v = tl.arange(0, BLOCK_V)
    score = tl.zeros((L, L), tl.float32)
    read = tl.zeros((L, BLOCK_V), tl.float32)
    du = tl.zeros((L, BLOCK_V), tl.float32)
    passed = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        b = load_rows(B + head // RATIO * b_group, token, valid, b_token, k, K)
        c = load_rows(C + head // RATIO * c_group, token, valid, c_token, k, K)
        before = load_state(BEFORE, chunk, head, k, v, HEADS, K, V)
        after = load_state(AFTER, chunk, head, k, v, HEADS, K, V)
        score = tl.dot(c, tl.trans(b), score, input_precision=PRECISION)
        read = tl.dot(c, before, read, input_precision=PRECISION)
        du = tl.dot(b, after, du, input_precision=PRECISION)
        passed += tl.sum(before.to(tl.float32) * after.to(tl.float32), 0)

    high, low = load_sums(SUMS, token, valid, head, tokens, HEADS)
    to_end, whole = decays_to_end(SUMS, high, low, valid, head, end, tokens, HEADS)
    dt = load_per_token(DT, token, valid, head, HEADS)
    x = load_rows(X + head * x_head, token, valid, x_token, v, V)
    grad = load_rows(GRAD + head * grad_head, token, valid, grad_token, v, V).to(x.dtype)
    score *= decays_between(high, low, valid, L)
    du *= to_end[:, None]
    kept = dt * tl.sum(x.to(tl.float32) * du, 1)
    read_sum = tl.exp(high) * tl.sum(grad.to(tl.float32) * read, 1)
    du = tl.dot(tl.trans(score.to(x.dtype)), grad, du, input_precision=PRECISION)

    i = tl.arange(0, L)
    pairs = score * tl.dot(grad, tl.trans(x), input_precision=PRECISION) * dt[None, :]
    from_k_on = tl.cumsum(pairs, 0, reverse=True) + kept[None, :]
    da = tl.sum(tl.where(i[None, :] < i[:, None], from_k_on, 0.0), 1)
    da += tl.cumsum(read_sum, 0, reverse=True) + whole * tl.sum(passed, 0)
    da = tl.where(valid, da, 0.0)

    store_rows(DX + head * V, du * dt[:, None], token, valid, HEADS * V, v, V)
    ddt = tl.sum(x.to(tl.float32) * du, 1) + tl.load(A + head) * da
    tl.store(DDT + token.to(tl.int64) * HEADS + head, ddt, mask=valid)
    tl.store(DA + chunk * HEADS + head, tl.sum(dt * da, 0))


@triton.jit(do_not_specialize=["tokens", "parts", "heads"])
def _groups_kernel(
    X, DT, SUMS, B, C, GRAD, BEFORE, AFTER, DB, DC, BEGIN, END, tokens, parts, heads,
    x_token, x_head, b_token, b_group, c_token, c_group, grad_token, grad_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write DB and DC ``[parts, T, G, K]``, sums over up to ``heads`` heads of a group."""
    wait_for_inputs(EARLY)
    across: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    groups: tl.constexpr = HEADS // RATIO
    k = tl.program_id(0) % across * BLOCK_K + tl.arange(0, BLOCK_K)
    group = (tl.program_id(0) // across % groups).to(tl.int64)
    part = tl.program_id(0) // across // groups % parts
    chunk = tl.program_id(0) // across // groups // parts
    end = tl.load(END + chunk)
    token = tl.load(BEGIN + chunk) + tl.arange(0, L)
    valid = token < end
    v = tl.arange(0, BLOCK_V)
    pairs = tl.zeros((L, L), tl.float32)
    db = tl.zeros((L, BLOCK_K), tl.float32)
    dc = tl.zeros((L, BLOCK_K), tl.float32)
    for member in range(part * heads, tl.minimum(part * heads + heads, RATIO)):
        head = group * RATIO + member
        high, low = load_sums(SUMS, token, valid, head, tokens, HEADS)
        to_end, _ = decays_to_end(SUMS, high, low, valid, head, end, tokens, HEADS)
        dt = load_per_token(DT, token, valid, head, HEADS)
        x = load_rows(X + head * x_head, token, valid, x_token, v, V)
        grad = load_rows(GRAD + head * grad_head, token, valid, grad_token, v, V)
        before = load_state(BEFORE, chunk, head, k, v, HEADS, K, V)
        after = load_state(AFTER, chunk, head, k, v, HEADS, K, V)
        product = tl.dot(grad.to(x.dtype), tl.trans(x), input_precision=PRECISION)
        pairs += product * decays_between(high, low, valid, L) * dt[None, :]
        grad = (grad.to(tl.float32) * tl.exp(high)[:, None]).to(x.dtype)
        dc = tl.dot(grad, tl.trans(before), dc, input_precision=PRECISION)
        x = (x.to(tl.float32) * (to_end * dt)[:, None]).to(x.dtype)
        db = tl.dot(x, tl.trans(after), db, input_precision=PRECISION)
    b = load_rows(B + group * b_group, token, valid, b_token, k, K)
    c = load_rows(C + group * c_group, token, valid, c_token, k, K)
    pairs = pairs.to(b.dtype)
    dc = tl.dot(pairs, b, dc, input_precision=PRECISION)
    db = tl.dot(tl.trans(pairs), c, db, input_precision=PRECISION)
    at = (tl.cast(part, tl.int64) * tokens * groups + group) * K
    store_rows(DB + at, db, token, valid, groups * K, k, K)
    store_rows(DC + at, dc, token, valid, groups * K, k, K)


def backward(inputs: Inputs, grad: Tensor) -> Gradients:
    """Return the gradients of x, dt, A, B and C; those of dt and A in float32.

    Args:
        inputs: what the forward got.
        grad: ``[T, H, V]``, the gradient of its result.
    """
    grad, x, chunks, sizes = columns(grad), inputs.x, inputs.chunks, inputs.sizes
    sums = sums_of_decays(inputs)
    before, after = states(inputs, sums), states(inputs, sums, grad)
    dx, ddt = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(inputs.dt)
    count = len(chunks.begin)
    da = inputs.A.new_empty(count, sizes["HEADS"])
    strides = [n for y in (x, inputs.B, inputs.C, grad) for n in y.stride()[:2]]
    k, v = inputs.tile.values()
    size, both = x.element_size(), 2 * k * v  # two states
    options = inputs.options(size * (2 * k * chunks.size + both), WARPS)
    with on_device(x):
        _heads_kernel[(count * sizes["HEADS"],)](
            *(x, inputs.dt, sums, inputs.A, inputs.B, inputs.C, grad, before, after, dx, ddt, da),
            *(chunks.begin, chunks.end, len(x), *strides),
            **sizes,
            **{**options, "num_stages": UNPIPELINED},
            **early(x),
        )
        programs = count * inputs.B.shape[1] * triton.cdiv(sizes["K"], k)
        parts = min(sizes["RATIO"], triton.cdiv(WAVES * processors(x.device), programs))
        heads = triton.cdiv(sizes["RATIO"], parts)
        parts = triton.cdiv(sizes["RATIO"], heads)
        options = inputs.options((size + grad.element_size()) * v * chunks.size + size * both, WARPS)
        dtype = x.dtype if parts == 1 else torch.float32
        db, dc = (torch.empty(parts, *inputs.B.shape, dtype=dtype, device=x.device) for _ in range(2))
        _groups_kernel[(programs * parts,)](
            *(x, inputs.dt, sums, inputs.B, inputs.C, grad, before, after, db, dc),
            *(chunks.begin, chunks.end, len(x), parts, heads, *strides),
            **sizes,
            **options,
            **early(x),
        )
    db, dc = (y[0] if parts == 1 else y.sum(0).to(x.dtype) for y in (db, dc))
    return dx, ddt, da.sum(0), db, dc
