"""Triton kernels of :func:`fastpack.ops.rope.norm_rope`, built from the parts of :mod:`fastpack.ops.kernels.rope`.

In the backward each program keeps a sum for each element of its tile. At its end it adds them up to one row of partial
sums. The rows of all programs are then added in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs
from fastpack.ops.kernels.rope import (
    NORM_TILE,
    compute_dtype,
    launch_shape,
    load_angles,
    load_pairs,
    load_unrotated,
    load_weight,
    normalise,
    rotate_kernel,
    share_of,
    store_pairs,
    store_unrotated,
)
from fastpack.ops.kernels.row_sums import sum_rows

NORM_BACKWARD_TILE = NORM_TILE._replace(of_a_warp=512)  # registers hold x, its gradient and a sum for each element
BACKWARD_PROGRAMS = 1024  # about the most rows of partial sums


class NormConstants(NamedTuple):
    """The settings of :func:`norm_rotate`: its arguments that aren't tensors."""

    eps: float
    unit_offset: bool
    interleaved: bool


@triton.jit
def _over_rows(x):
    """Return the sum over tokens and heads, ``[1, 1, columns]``."""
    return tl.sum(tl.sum(x, axis=0, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def _norm_rotate_backward(
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
    UNROTATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_UNROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Write ``dx`` (contiguous), and this program's sum of ``dy n`` to ``partial`` ``[D]``; either may be None."""
    D: tl.constexpr = 2 * HALF + UNROTATED
    w_first, w_second, w_unrotated = load_weight(
        weight, HALF, UNROTATED, BLOCK, BLOCK_UNROTATED, INTERLEAVED, UNIT_OFFSET, COMPUTE
    )
    if partial is not None:
        sum_first = tl.zeros([BLOCK_T, BLOCK_H, BLOCK], COMPUTE)
        sum_second = tl.zeros([BLOCK_T, BLOCK_H, BLOCK], COMPUTE)
        sum_unrotated = tl.zeros([BLOCK_T, BLOCK_H, BLOCK_UNROTATED], COMPUTE)
    for block in range(blocks):
        token, head, exists, valid = share_of(program * blocks + block, tokens, HEADS, BLOCK_T, BLOCK_H)
        rows = x + token * x_token + head * x_head
        x_first, x_second = load_pairs(rows, valid, HALF, BLOCK, INTERLEAVED)
        x_unrotated = load_unrotated(rows, valid, 2 * HALF, UNROTATED, BLOCK_UNROTATED)
        rows = grad + token * grad_token + head * grad_head
        g_first, g_second = load_pairs(rows, valid, HALF, BLOCK, INTERLEAVED)
        g_unrotated = load_unrotated(rows, valid, 2 * HALF, UNROTATED, BLOCK_UNROTATED)
        c, s = load_angles(cos, sin, positions, cos_row, sin_row, token, exists, HALF, BLOCK, INTERLEAVED, COMPUTE)
        n_first, n_second, n_unrotated, rstd = normalise(x_first, x_second, x_unrotated, D, EPS, COMPUTE)
        g_first, g_second, dy_unrotated = g_first.to(COMPUTE), g_second.to(COMPUTE), g_unrotated.to(COMPUTE)
        dy_first, dy_second = g_first * c + g_second * s, g_second * c - g_first * s
        if partial is not None:
            sum_first += dy_first * n_first
            sum_second += dy_second * n_second
            sum_unrotated += dy_unrotated * n_unrotated
        if dx is not None:
            dn_first, dn_second, dn_unrotated = dy_first * w_first, dy_second * w_second, dy_unrotated * w_unrotated
            slope = tl.sum(dn_first * n_first + dn_second * n_second, axis=2, keep_dims=True)
            slope = (slope + tl.sum(dn_unrotated * n_unrotated, axis=2, keep_dims=True)) / D
            rows = dx + (token * HEADS + head) * D
            first, second = (dn_first - n_first * slope) * rstd, (dn_second - n_second * slope) * rstd
            store_pairs(rows, valid, first, second, HALF, BLOCK, INTERLEAVED)
            store_unrotated(
                rows, valid, (dn_unrotated - n_unrotated * slope) * rstd, 2 * HALF, UNROTATED, BLOCK_UNROTATED
            )
    if partial is not None:
        row = partial + tl.zeros([1, 1, 1], tl.int32)
        valid = tl.zeros([1, 1, 1], tl.int32) == 0
        store_pairs(row, valid, _over_rows(sum_first), _over_rows(sum_second), HALF, BLOCK, INTERLEAVED)
        store_unrotated(row, valid, _over_rows(sum_unrotated), 2 * HALF, UNROTATED, BLOCK_UNROTATED)


@triton.jit(do_not_specialize=["blocks", "q_programs", "tokens"])
def _norm_rotate_backward_kernel(
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
    UNROTATED: tl.constexpr,
    Q_BLOCK_T: tl.constexpr,
    Q_BLOCK_H: tl.constexpr,
    K_BLOCK_T: tl.constexpr,
    K_BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_UNROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: ``q_programs`` programs of q, then those of k; each walks over ``blocks`` blocks of tokens and heads."""
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    row = partial
    if partial is not None:
        row = partial + program.to(tl.int64) * (2 * HALF + UNROTATED)
    # fmt: off
    if program < q_programs:
        _norm_rotate_backward(
            q, q_grad, dq, row, q_weight, cos, sin, positions, program, blocks,
            tokens, q_token, q_head, q_grad_token, q_grad_head, cos_row, sin_row,
            Q_HEADS, HALF, UNROTATED, Q_BLOCK_T, Q_BLOCK_H, BLOCK, BLOCK_UNROTATED,
            INTERLEAVED, UNIT_OFFSET, EPS, COMPUTE,
        )
    elif K_HEADS > 0:
        _norm_rotate_backward(
            k, k_grad, dk, row, k_weight, cos, sin, positions, program - q_programs, blocks,
            tokens, k_token, k_head, k_grad_token, k_grad_head, cos_row, sin_row,
            K_HEADS, HALF, UNROTATED, K_BLOCK_T, K_BLOCK_H, BLOCK, BLOCK_UNROTATED,
            INTERLEAVED, UNIT_OFFSET, EPS, COMPUTE,
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
    constants: NormConstants,
) -> None:
    """Normalise and rotate q ``[T, H, D]`` and k ``[T, K, D]`` into ``q_out`` and ``k_out``.

    Last dimensions have stride 1. The other arguments are those of :func:`fastpack.ops.rope.norm_rope`.
    """
    tokens, q_heads, head_dim = q.shape
    shape = launch_shape(q_heads, k.shape[1], head_dim, cos.shape[1], NORM_TILE)
    with on_device(q):
        rotate_kernel[(sum(shape.programs(tokens)),)](
            *(q, k, q_out, k_out, q_weight, k_weight, cos, sin, positions, tokens),
            *(*q.stride()[:2], *k.stride()[:2], *q_out.stride()[:2], *k_out.stride()[:2]),
            *(cos.stride(0), sin.stride(0)),
            INTERLEAVED=constants.interleaved,
            INVERSE=False,
            UNIT_OFFSET=constants.unit_offset,
            EPS=constants.eps,
            COMPUTE=compute_dtype(q),
            **shape.constants,
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
    constants: NormConstants,
    of_weights: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Write the gradients of :func:`norm_rotate` into ``dq`` and ``dk`` (contiguous, or None).

    Returns:
        The gradients of the weights, ``[D]`` in their dtypes, if ``of_weights``; else None twice.
    """
    tokens, q_heads, head_dim = q.shape
    shape = launch_shape(q_heads, k.shape[1], head_dim, cos.shape[1], NORM_BACKWARD_TILE)
    q_shares, k_shares = shape.programs(tokens)
    blocks = max(1, (q_shares + k_shares) // BACKWARD_PROGRAMS)
    q_programs, k_programs = -(-q_shares // blocks), -(-k_shares // blocks)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    partial = q.new_empty((q_programs + k_programs, head_dim), dtype=compute) if of_weights else None
    with on_device(q):
        _norm_rotate_backward_kernel[(q_programs + k_programs,)](
            *(q, k, q_grad, k_grad, dq, dk, partial, q_weight, k_weight, cos, sin, positions),
            *(blocks, q_programs, tokens),
            *(*q.stride()[:2], *k.stride()[:2], *q_grad.stride()[:2], *k_grad.stride()[:2]),
            *(cos.stride(0), sin.stride(0)),
            INTERLEAVED=constants.interleaved,
            UNIT_OFFSET=constants.unit_offset,
            EPS=constants.eps,
            COMPUTE=compute_dtype(q),
            **shape.constants,
            **early(q),
        )
    if partial is None:
        return None, None
    of_q, of_k = sum_rows((partial[:q_programs], partial[q_programs:]), (q_weight.dtype, k_weight.dtype))
    return of_q, of_k
