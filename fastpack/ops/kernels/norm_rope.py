"""Triton kernels of :func:`fastpack.ops.rope.norm_rope`: the parts are those of :mod:`fastpack.ops.kernels.rope`.

The backward keeps a sum for each element of its tile, and adds them up once, at its end: each program writes a row of
partial sums, which are added in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs
from fastpack.ops.kernels.rope import (
    NORM,
    compute_dtype,
    load_angles,
    load_pairs,
    load_tail,
    load_weight,
    normalise,
    plan_of,
    share_of,
    store_pairs,
    store_tail,
    turn_kernel,
)
from fastpack.ops.kernels.row_sums import sum_rows

NORM_BACKWARD = NORM._replace(of_a_warp=512)  # x, its gradient and a sum for each
BACKWARD_PROGRAMS = 1024  # at most about so many partial sums of the weights' gradients


class Norm(NamedTuple):
    """What :func:`norm_rotate` computes: all that is no tensor."""

    eps: float
    unit_offset: bool
    interleaved: bool


@triton.jit
def _over_rows(x):
    """Sum over tokens and heads, ``[1, 1, columns]``."""
    return tl.sum(tl.sum(x, axis=0, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def _norm_turn_backward(
    x,
    grad,
    dx,
    partial,
    weight,
    cos,
    sin,
    positions,
    program,
    blocks,
    tokens,
    x_token,
    x_head,
    grad_token,
    grad_head,
    cos_row,
    sin_row,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """``dx`` (contiguous), and in ``partial`` ``[D]`` this program's sum of ``dy n``; either may be None."""
    D: tl.constexpr = 2 * HALF + TAIL
    w_first, w_second, w_tail = load_weight(weight, HALF, TAIL, BLOCK, BLOCK_TAIL, INTERLEAVED, UNIT_OFFSET, COMPUTE)
    if partial is not None:
        sum_first = tl.zeros([BLOCK_T, BLOCK_H, BLOCK], COMPUTE)
        sum_second = tl.zeros([BLOCK_T, BLOCK_H, BLOCK], COMPUTE)
        sum_tail = tl.zeros([BLOCK_T, BLOCK_H, BLOCK_TAIL], COMPUTE)
    for block in range(blocks):
        token, head, exists, kept = share_of(program * blocks + block, tokens, HEADS, BLOCK_T, BLOCK_H)
        rows = x + token * x_token + head * x_head
        x_first, x_second = load_pairs(rows, kept, HALF, BLOCK, INTERLEAVED)
        x_tail = load_tail(rows, kept, 2 * HALF, TAIL, BLOCK_TAIL)
        rows = grad + token * grad_token + head * grad_head
        g_first, g_second = load_pairs(rows, kept, HALF, BLOCK, INTERLEAVED)
        g_tail = load_tail(rows, kept, 2 * HALF, TAIL, BLOCK_TAIL)
        c, s = load_angles(cos, sin, positions, cos_row, sin_row, token, exists, HALF, BLOCK, INTERLEAVED, COMPUTE)
        n_first, n_second, n_tail, rstd = normalise(x_first, x_second, x_tail, D, EPS, COMPUTE)
        g_first, g_second, dy_tail = g_first.to(COMPUTE), g_second.to(COMPUTE), g_tail.to(COMPUTE)
        dy_first, dy_second = g_first * c + g_second * s, g_second * c - g_first * s
        if partial is not None:
            sum_first += dy_first * n_first
            sum_second += dy_second * n_second
            sum_tail += dy_tail * n_tail
        if dx is not None:
            dn_first, dn_second, dn_tail = dy_first * w_first, dy_second * w_second, dy_tail * w_tail
            slope = tl.sum(dn_first * n_first + dn_second * n_second, axis=2, keep_dims=True)
            slope = (slope + tl.sum(dn_tail * n_tail, axis=2, keep_dims=True)) / D
            rows = dx + (token * HEADS + head) * D
            first, second = (dn_first - n_first * slope) * rstd, (dn_second - n_second * slope) * rstd
            store_pairs(rows, kept, first, second, HALF, BLOCK, INTERLEAVED)
            store_tail(rows, kept, (dn_tail - n_tail * slope) * rstd, 2 * HALF, TAIL, BLOCK_TAIL)
    if partial is not None:
        row = partial + tl.zeros([1, 1, 1], tl.int32)
        kept = tl.zeros([1, 1, 1], tl.int32) == 0
        store_pairs(row, kept, _over_rows(sum_first), _over_rows(sum_second), HALF, BLOCK, INTERLEAVED)
        store_tail(row, kept, _over_rows(sum_tail), 2 * HALF, TAIL, BLOCK_TAIL)


@triton.jit(do_not_specialize=["blocks", "q_programs", "tokens"])
def _norm_turn_backward_kernel(
    q,
    k,
    q_grad,
    k_grad,
    dq,
    dk,
    partial,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    blocks,
    q_programs,
    tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    q_grad_token,
    q_grad_head,
    k_grad_token,
    k_grad_head,
    cos_row,
    sin_row,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    Q_BLOCK_T: tl.constexpr,
    Q_BLOCK_H: tl.constexpr,
    K_BLOCK_T: tl.constexpr,
    K_BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: ``q_programs``, then those of k; each takes ``blocks`` such shares, one after another."""
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    row = partial
    if partial is not None:
        row = partial + program.to(tl.int64) * (2 * HALF + TAIL)
    # fmt: off
    if program < q_programs:
        _norm_turn_backward(
            q, q_grad, dq, row, q_weight, cos, sin, positions, program, blocks,
            tokens, q_token, q_head, q_grad_token, q_grad_head, cos_row, sin_row,
            Q_HEADS, HALF, TAIL, Q_BLOCK_T, Q_BLOCK_H, BLOCK, BLOCK_TAIL, INTERLEAVED, UNIT_OFFSET, EPS, COMPUTE,
        )
    elif K_HEADS > 0:
        _norm_turn_backward(
            k, k_grad, dk, row, k_weight, cos, sin, positions, program - q_programs, blocks,
            tokens, k_token, k_head, k_grad_token, k_grad_head, cos_row, sin_row,
            K_HEADS, HALF, TAIL, K_BLOCK_T, K_BLOCK_H, BLOCK, BLOCK_TAIL, INTERLEAVED, UNIT_OFFSET, EPS, COMPUTE,
        )
    # fmt: on


def norm_rotate(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    norm: Norm,
) -> None:
    """Normalise and rotate q ``[T, H, D]`` and k ``[T, K, D]`` into others of their shapes.

    Last dimensions have stride 1. Arguments otherwise as of :func:`fastpack.ops.rope.norm_rope`.
    """
    tokens, q_heads, head_dim = q.shape
    plan = plan_of(q_heads, k.shape[1], head_dim, cos.shape[1], NORM)
    with on_device(q):
        turn_kernel[(sum(plan.programs(tokens)),)](
            *(q, k, q_out, k_out, q_weight, k_weight, cos, sin, positions, tokens),
            *(*q.stride()[:2], *k.stride()[:2], *q_out.stride()[:2], *k_out.stride()[:2]),
            *(cos.stride(0), sin.stride(0)),
            INTERLEAVED=norm.interleaved,
            INVERSE=False,
            UNIT_OFFSET=norm.unit_offset,
            EPS=norm.eps,
            COMPUTE=compute_dtype(q),
            **plan.constants,
            **early(q),
        )


def norm_rotate_backward(
    q: Tensor,
    k: Tensor,
    q_grad: Tensor,
    k_grad: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    norm: Norm,
    of_weights: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of :func:`norm_rotate`: into ``dq`` and ``dk`` (contiguous, or None), from ``q_grad`` and ``k_grad``.

    Returns:
        Those of the weights, ``[D]`` in their dtypes, if ``of_weights``.
    """
    tokens, q_heads, head_dim = q.shape
    plan = plan_of(q_heads, k.shape[1], head_dim, cos.shape[1], NORM_BACKWARD)
    q_shares, k_shares = plan.programs(tokens)
    blocks = max(1, (q_shares + k_shares) // BACKWARD_PROGRAMS)
    q_programs, k_programs = -(-q_shares // blocks), -(-k_shares // blocks)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    partial = q.new_empty((q_programs + k_programs, head_dim), dtype=compute) if of_weights else None
    with on_device(q):
        _norm_turn_backward_kernel[(q_programs + k_programs,)](
            *(q, k, q_grad, k_grad, dq, dk, partial, q_weight, k_weight, cos, sin, positions),
            *(blocks, q_programs, tokens),
            *(*q.stride()[:2], *k.stride()[:2], *q_grad.stride()[:2], *k_grad.stride()[:2]),
            *(cos.stride(0), sin.stride(0)),
            INTERLEAVED=norm.interleaved,
            UNIT_OFFSET=norm.unit_offset,
            EPS=norm.eps,
            COMPUTE=compute_dtype(q),
            **plan.constants,
            **early(q),
        )
    if partial is None:
        return None, None
    of_q, of_k = sum_rows((partial[:q_programs], partial[q_programs:]), (q_weight.dtype, k_weight.dtype))
    return of_q, of_k
