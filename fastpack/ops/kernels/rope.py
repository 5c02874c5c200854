"""Triton kernels of :mod:`fastpack.ops.rope`, which holds their definition.

Rotating is nothing but memory traffic: each head is read and written once. The first programs of a launch take q, the
others k; each takes a share of a token's heads, which have its angles in common, or all heads of a few tokens, with
accesses of 16 bytes in flight. Everything is computed in float32 (float64 for float64) and rounded once.

In a tile the dimensions are tokens, heads, pairs. Offsets are int64. The number of tokens is never specialised on: a
new one compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs


class Tile(NamedTuple):
    """Elements of a program, at most where heads are many, and of a warp."""

    elements: int
    most: int
    of_a_warp: int


TURN = Tile(1024, 1024, 512)
"""Small programs, of which many are under way: 3 % faster than 4,096 elements at 4,096 tokens, as fast at 16,384."""
NORM = Tile(4096, 8192, 1024)


# --- parts of kernels -------------------------------------------------------------------------------------------------


@triton.jit
def share_of(program, tokens, HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Tokens ``[tokens, 1, 1]`` and heads ``[1, heads, 1]`` of a program, and masks: of tokens, of both."""
    SHARES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (program // SHARES).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    head = (program % SHARES).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :, None]
    exists = token < tokens
    return token, head, exists, exists & (head < HEADS)


@triton.jit
def load_pairs(rows, kept, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of each pair, of rows that begin at the pointers ``[tokens, heads, 1]``."""
    if INTERLEAVED:
        # contiguous, and taken apart in registers
        columns = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.load(rows + columns, mask=kept & (columns < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(both, (rows.shape[0], rows.shape[1], BLOCK, 2)))
    else:
        columns = tl.arange(0, BLOCK)[None, None, :]
        first = tl.load(rows + columns, mask=kept & (columns < HALF), other=0.0)
        second = tl.load(rows + HALF + columns, mask=kept & (columns < HALF), other=0.0)
    return first, second


@triton.jit
def store_pairs(rows, kept, first, second, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK)[None, None, :]
        dtype = rows.dtype.element_ty
        both = tl.reshape(tl.join(first.to(dtype), second.to(dtype)), (first.shape[0], first.shape[1], 2 * BLOCK))
        tl.store(rows + columns, both, mask=kept & (columns < 2 * HALF))
    else:
        columns = tl.arange(0, BLOCK)[None, None, :]
        tl.store(rows + columns, first, mask=kept & (columns < HALF))
        tl.store(rows + HALF + columns, second, mask=kept & (columns < HALF))


@triton.jit
def load_tail(rows, kept, ROTARY: tl.constexpr, TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr):
    """The elements that are not rotated; a zero where there are none."""
    if TAIL > 0:
        columns = tl.arange(0, BLOCK_TAIL)[None, None, :]
        tail = tl.load(rows + ROTARY + columns, mask=kept & (columns < TAIL), other=0.0)
    else:
        tail = tl.zeros([1, 1, 1], tl.float32)
    return tail


@triton.jit
def store_tail(rows, kept, tail, ROTARY: tl.constexpr, TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr):
    if TAIL > 0:
        columns = tl.arange(0, BLOCK_TAIL)[None, None, :]
        tl.store(rows + ROTARY + columns, tail, mask=kept & (columns < TAIL))


@triton.jit
def load_angles(
    cos,
    sin,
    positions,
    cos_row,
    sin_row,
    token,
    exists,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """cos and sin ``[tokens, 1, pairs]``: those of the first of each pair, which the second shares."""
    row = token
    if positions is not None:
        row = tl.load(positions + token, mask=exists, other=0).to(tl.int64)
    if INTERLEAVED:
        c, _ = load_pairs(cos + row * cos_row, exists, HALF, BLOCK, True)
        s, _ = load_pairs(sin + row * sin_row, exists, HALF, BLOCK, True)
    else:
        columns = tl.arange(0, BLOCK)[None, None, :]
        c = tl.load(cos + row * cos_row + columns, mask=exists & (columns < HALF), other=0.0)
        s = tl.load(sin + row * sin_row + columns, mask=exists & (columns < HALF), other=0.0)
    return c.to(COMPUTE), s.to(COMPUTE)


@triton.jit
def load_weight(
    weight,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """The weight ``[D]`` in the parts of a head, each ``[1, 1, columns]``."""
    row = weight + tl.zeros([1, 1, 1], tl.int32)
    kept = tl.zeros([1, 1, 1], tl.int32) == 0
    first, second = load_pairs(row, kept, HALF, BLOCK, INTERLEAVED)
    tail = load_tail(row, kept, 2 * HALF, TAIL, BLOCK_TAIL)
    first, second, tail = first.to(COMPUTE), second.to(COMPUTE), tail.to(COMPUTE)
    if UNIT_OFFSET:
        first, second, tail = first + 1.0, second + 1.0, tail + 1.0
    return first, second, tail


@triton.jit
def normalise(first, second, tail, D: tl.constexpr, EPS: tl.constexpr, COMPUTE: tl.constexpr):
    """The parts of each head over its root mean square, and one over that, ``[tokens, heads, 1]``."""
    first, second, tail = first.to(COMPUTE), second.to(COMPUTE), tail.to(COMPUTE)
    squares = tl.sum(first * first + second * second, axis=2, keep_dims=True)
    squares += tl.sum(tail * tail, axis=2, keep_dims=True)
    rstd = tl.rsqrt(squares / D + EPS)
    return first * rstd, second * rstd, tail * rstd, rstd


# --- one side: q or k -------------------------------------------------------------------------------------------------


@triton.jit
def _turn(
    x,
    out,
    weight,
    cos,
    sin,
    positions,
    program,
    tokens,
    x_token,
    x_head,
    out_token,
    out_head,
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
    INVERSE: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Rotate, normalised before where there is a weight."""
    token, head, exists, kept = share_of(program, tokens, HEADS, BLOCK_T, BLOCK_H)
    rows = x + token * x_token + head * x_head
    first, second = load_pairs(rows, kept, HALF, BLOCK, INTERLEAVED)
    tail = load_tail(rows, kept, 2 * HALF, TAIL, BLOCK_TAIL)
    c, s = load_angles(cos, sin, positions, cos_row, sin_row, token, exists, HALF, BLOCK, INTERLEAVED, COMPUTE)
    if INVERSE:
        s = -s
    if weight is not None:
        w_first, w_second, w_tail = load_weight(
            weight, HALF, TAIL, BLOCK, BLOCK_TAIL, INTERLEAVED, UNIT_OFFSET, COMPUTE
        )
        first, second, tail, _ = normalise(first, second, tail, 2 * HALF + TAIL, EPS, COMPUTE)
        first, second, tail = first * w_first, second * w_second, tail * w_tail
    first, second = first.to(COMPUTE), second.to(COMPUTE)
    rows = out + token * out_token + head * out_head
    store_pairs(rows, kept, first * c - second * s, second * c + first * s, HALF, BLOCK, INTERLEAVED)
    store_tail(rows, kept, tail, 2 * HALF, TAIL, BLOCK_TAIL)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def turn_kernel(
    q,
    k,
    q_out,
    k_out,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    q_out_token,
    q_out_head,
    k_out_token,
    k_out_head,
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
    INVERSE: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: the programs of q, then those of k; each takes ``BLOCK_T`` tokens and ``BLOCK_H`` of their heads."""
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    q_programs = tl.cdiv(tokens, Q_BLOCK_T) * tl.cdiv(Q_HEADS, Q_BLOCK_H)
    # fmt: off
    if program < q_programs:
        _turn(
            q, q_out, q_weight, cos, sin, positions, program,
            tokens, q_token, q_head, q_out_token, q_out_head, cos_row, sin_row,
            Q_HEADS, HALF, TAIL, Q_BLOCK_T, Q_BLOCK_H, BLOCK, BLOCK_TAIL,
            INTERLEAVED, INVERSE, UNIT_OFFSET, EPS, COMPUTE,
        )
    elif K_HEADS > 0:
        _turn(
            k, k_out, k_weight, cos, sin, positions, program - q_programs,
            tokens, k_token, k_head, k_out_token, k_out_head, cos_row, sin_row,
            K_HEADS, HALF, TAIL, K_BLOCK_T, K_BLOCK_H, BLOCK, BLOCK_TAIL,
            INTERLEAVED, INVERSE, UNIT_OFFSET, EPS, COMPUTE,
        )
    # fmt: on


# --- launchers --------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What a kernel is specialised on, and how q and k are shared out: tokens of a block, programs a block."""

    constants: dict[str, int]
    q_tokens: int
    q_shares: int
    k_tokens: int
    k_shares: int

    def programs(self, tokens: int) -> tuple[int, int]:
        """Of q and of k."""
        return -(-tokens // self.q_tokens) * self.q_shares, -(-tokens // self.k_tokens) * self.k_shares


@functools.cache
def plan_of(q_heads: int, k_heads: int, head_dim: int, rotary: int, tile: Tile) -> Plan:
    half, tail = rotary // 2, head_dim - rotary
    block, block_tail = triton.next_power_of_2(half), triton.next_power_of_2(tail) if tail else 1
    width = 2 * block + (block_tail if tail else 0)
    q_tokens, q_block = _blocks(q_heads, width, tile)
    k_tokens, k_block = _blocks(k_heads, width, tile)
    elements = width * max(q_tokens * q_block, k_tokens * k_block)
    constants = {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HALF": half,
        "TAIL": tail,
        "Q_BLOCK_T": q_tokens,
        "Q_BLOCK_H": q_block,
        "K_BLOCK_T": k_tokens,
        "K_BLOCK_H": k_block,
        "BLOCK": block,
        "BLOCK_TAIL": block_tail,
        "num_warps": min(8, _power_of_2_within(elements // tile.of_a_warp)),
    }
    return Plan(constants, q_tokens, -(-q_heads // q_block), k_tokens, -(-k_heads // k_block))


def _blocks(heads: int, width: int, tile: Tile) -> tuple[int, int]:
    """Tokens and heads of a program, for heads of ``width`` elements.

    As many heads as fit at most without wasting more than a fifth of it on heads that do not exist, then as many tokens
    as there is room for.
    """
    block = triton.next_power_of_2(max(1, heads))
    while block > 1 and (block * width > tile.most or -(-heads // block) * block > 1.25 * heads):
        block //= 2
    return _power_of_2_within(tile.elements // (block * width)), block


def _power_of_2_within(n: int) -> int:
    """The largest that is at most n; 1 for 0."""
    return 1 << (max(1, n).bit_length() - 1)


def rotate(
    pairs: Sequence[tuple[Tensor, Tensor]],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    *,
    interleaved: bool,
    inverse: bool,
) -> None:
    """Rotate one or two tensors ``[T, heads, D]``, each into the other of its pair.

    Last dimensions have stride 1. Arguments otherwise as of :func:`fastpack.ops.rope.apply_rope`.
    """
    (q, q_out), (k, k_out) = pairs[0], pairs[-1]
    tokens, q_heads, head_dim = q.shape
    plan = plan_of(q_heads, k.shape[1] if len(pairs) == 2 else 0, head_dim, cos.shape[1], TURN)
    with on_device(q):
        turn_kernel[(sum(plan.programs(tokens)),)](
            *(q, k, q_out, k_out, None, None, cos, sin, positions, tokens),
            *(*q.stride()[:2], *k.stride()[:2], *q_out.stride()[:2], *k_out.stride()[:2]),
            *(cos.stride(0), sin.stride(0)),
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            UNIT_OFFSET=False,
            EPS=0.0,
            COMPUTE=compute_dtype(q),
            **plan.constants,
            **early(q),
        )


def compute_dtype(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
