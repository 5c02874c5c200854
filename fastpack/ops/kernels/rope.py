"""Triton kernels of :mod:`fastpack.ops.rope`, which holds their definition.

Rotating is nothing but memory traffic: each head is read and written once. The first programs of a launch take q, the
others k. A program takes some heads of one token, which share its angles, or all heads of a few tokens. It keeps
accesses of 16 bytes in flight. Everything is computed in float32 (float64 for float64) and rounded once.

The dimensions of a tile are tokens, heads, pairs. The elements of a head after its rotated ones are called unrotated:
they are copied. Offsets are int64. Kernels are never specialised on the number of tokens, so a new number compiles
nothing.
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


class RopeTile(NamedTuple):
    """The number of elements that a program and a warp take.

    Attributes:
        elements: the elements of a program.
        most: the most elements of a program that holds many heads.
        of_a_warp: the elements of a warp.
    """

    elements: int
    most: int
    of_a_warp: int


ROTATE_TILE = RopeTile(1024, 1024, 512)
"""With 4,096 tokens, these small programs are 3 % faster than programs of 4,096 elements; with 16,384, as fast."""
NORM_TILE = RopeTile(4096, 8192, 1024)


# --- parts of kernels -------------------------------------------------------------------------------------------------


@triton.jit
def share_of(program, tokens, HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return a program's tokens ``[tokens, 1, 1]``, heads ``[1, heads, 1]``, and the masks of tokens and of both."""
    SHARES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (program // SHARES).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    head = (program % SHARES).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :, None]
    exists = token < tokens
    return token, head, exists, exists & (head < HEADS)


@triton.jit
def load_pairs(rows, valid, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load both elements of each pair; the rows begin at the pointers ``[tokens, heads, 1]``."""
    if INTERLEAVED:
        # a contiguous load, split in registers
        columns = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.load(rows + columns, mask=valid & (columns < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(both, (rows.shape[0], rows.shape[1], BLOCK, 2)))
    else:
        columns = tl.arange(0, BLOCK)[None, None, :]
        first = tl.load(rows + columns, mask=valid & (columns < HALF), other=0.0)
        second = tl.load(rows + HALF + columns, mask=valid & (columns < HALF), other=0.0)
    return first, second


@triton.jit
def store_pairs(rows, valid, first, second, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store both elements of each pair where :func:`load_pairs` reads them."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK)[None, None, :]
        dtype = rows.dtype.element_ty
        both = tl.reshape(tl.join(first.to(dtype), second.to(dtype)), (first.shape[0], first.shape[1], 2 * BLOCK))
        tl.store(rows + columns, both, mask=valid & (columns < 2 * HALF))
    else:
        columns = tl.arange(0, BLOCK)[None, None, :]
        tl.store(rows + columns, first, mask=valid & (columns < HALF))
        tl.store(rows + HALF + columns, second, mask=valid & (columns < HALF))


@triton.jit
def load_unrotated(rows, valid, ROTARY: tl.constexpr, UNROTATED: tl.constexpr, BLOCK_UNROTATED: tl.constexpr):
    """Load the elements that are not rotated; return a zero if there are none."""
    if UNROTATED > 0:
        columns = tl.arange(0, BLOCK_UNROTATED)[None, None, :]
        unrotated = tl.load(rows + ROTARY + columns, mask=valid & (columns < UNROTATED), other=0.0)
    else:
        unrotated = tl.zeros([1, 1, 1], tl.float32)
    return unrotated


@triton.jit
def store_unrotated(
    rows, valid, unrotated, ROTARY: tl.constexpr, UNROTATED: tl.constexpr, BLOCK_UNROTATED: tl.constexpr
):
    """Store the elements that are not rotated."""
    if UNROTATED > 0:
        columns = tl.arange(0, BLOCK_UNROTATED)[None, None, :]
        tl.store(rows + ROTARY + columns, unrotated, mask=valid & (columns < UNROTATED))


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
    """Load cos and sin, ``[tokens, 1, pairs]``: both elements of a pair share them."""
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
    UNROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_UNROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Load the weight ``[D]``, split like a head into three parts ``[1, 1, columns]``."""
    row = weight + tl.zeros([1, 1, 1], tl.int32)
    valid = tl.zeros([1, 1, 1], tl.int32) == 0
    first, second = load_pairs(row, valid, HALF, BLOCK, INTERLEAVED)
    unrotated = load_unrotated(row, valid, 2 * HALF, UNROTATED, BLOCK_UNROTATED)
    first, second, unrotated = first.to(COMPUTE), second.to(COMPUTE), unrotated.to(COMPUTE)
    if UNIT_OFFSET:
        first, second, unrotated = first + 1.0, second + 1.0, unrotated + 1.0
    return first, second, unrotated


@triton.jit
def normalise(first, second, unrotated, D: tl.constexpr, EPS: tl.constexpr, COMPUTE: tl.constexpr):
    """Divide the parts of each head by its root mean square; also return the reciprocal, ``[tokens, heads, 1]``."""
    first, second, unrotated = first.to(COMPUTE), second.to(COMPUTE), unrotated.to(COMPUTE)
    squares = tl.sum(first * first + second * second, axis=2, keep_dims=True)
    squares += tl.sum(unrotated * unrotated, axis=2, keep_dims=True)
    rstd = tl.rsqrt(squares / D + EPS)
    return first * rstd, second * rstd, unrotated * rstd, rstd


# --- one side: q or k -------------------------------------------------------------------------------------------------


@triton.jit
def _rotate(
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
    UNROTATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_UNROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Rotate the heads of q or k; if there is a weight, normalise them first."""
    token, head, exists, valid = share_of(program, tokens, HEADS, BLOCK_T, BLOCK_H)
    rows = x + token * x_token + head * x_head
    first, second = load_pairs(rows, valid, HALF, BLOCK, INTERLEAVED)
    unrotated = load_unrotated(rows, valid, 2 * HALF, UNROTATED, BLOCK_UNROTATED)
    c, s = load_angles(cos, sin, positions, cos_row, sin_row, token, exists, HALF, BLOCK, INTERLEAVED, COMPUTE)
    if INVERSE:
        s = -s
    if weight is not None:
        w_first, w_second, w_unrotated = load_weight(
            weight, HALF, UNROTATED, BLOCK, BLOCK_UNROTATED, INTERLEAVED, UNIT_OFFSET, COMPUTE
        )
        first, second, unrotated, _ = normalise(first, second, unrotated, 2 * HALF + UNROTATED, EPS, COMPUTE)
        first, second, unrotated = first * w_first, second * w_second, unrotated * w_unrotated
    first, second = first.to(COMPUTE), second.to(COMPUTE)
    rows = out + token * out_token + head * out_head
    store_pairs(rows, valid, first * c - second * s, second * c + first * s, HALF, BLOCK, INTERLEAVED)
    store_unrotated(rows, valid, unrotated, 2 * HALF, UNROTATED, BLOCK_UNROTATED)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def rotate_kernel(
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
    UNROTATED: tl.constexpr,
    Q_BLOCK_T: tl.constexpr,
    Q_BLOCK_H: tl.constexpr,
    K_BLOCK_T: tl.constexpr,
    K_BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_UNROTATED: tl.constexpr,
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
        _rotate(
            q, q_out, q_weight, cos, sin, positions, program,
            tokens, q_token, q_head, q_out_token, q_out_head, cos_row, sin_row,
            Q_HEADS, HALF, UNROTATED, Q_BLOCK_T, Q_BLOCK_H, BLOCK, BLOCK_UNROTATED,
            INTERLEAVED, INVERSE, UNIT_OFFSET, EPS, COMPUTE,
        )
    elif K_HEADS > 0:
        _rotate(
            k, k_out, k_weight, cos, sin, positions, program - q_programs,
            tokens, k_token, k_head, k_out_token, k_out_head, cos_row, sin_row,
            K_HEADS, HALF, UNROTATED, K_BLOCK_T, K_BLOCK_H, BLOCK, BLOCK_UNROTATED,
            INTERLEAVED, INVERSE, UNIT_OFFSET, EPS, COMPUTE,
        )
    # fmt: on


# --- launchers --------------------------------------------------------------------------------------------------------


class LaunchShape(NamedTuple):
    """The constants of a kernel, and how q and k are split over programs.

    Attributes:
        constants: the constants that the kernel is specialised on.
        q_tokens, k_tokens: tokens of a block.
        q_shares, k_shares: programs that share the heads of a block.
    """

    constants: dict[str, int]
    q_tokens: int
    q_shares: int
    k_tokens: int
    k_shares: int

    def programs(self, tokens: int) -> tuple[int, int]:
        """Return the number of programs for q and for k."""
        return -(-tokens // self.q_tokens) * self.q_shares, -(-tokens // self.k_tokens) * self.k_shares


@functools.cache
def launch_shape(q_heads: int, k_heads: int, head_dim: int, rotary: int, tile: RopeTile) -> LaunchShape:
    """Return how a kernel is launched for these sizes of heads."""
    half, unrotated = rotary // 2, head_dim - rotary
    block, block_unrotated = triton.next_power_of_2(half), triton.next_power_of_2(unrotated) if unrotated else 1
    width = 2 * block + (block_unrotated if unrotated else 0)
    q_tokens, q_block = _blocks(q_heads, width, tile)
    k_tokens, k_block = _blocks(k_heads, width, tile)
    elements = width * max(q_tokens * q_block, k_tokens * k_block)
    constants = {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HALF": half,
        "UNROTATED": unrotated,
        "Q_BLOCK_T": q_tokens,
        "Q_BLOCK_H": q_block,
        "K_BLOCK_T": k_tokens,
        "K_BLOCK_H": k_block,
        "BLOCK": block,
        "BLOCK_UNROTATED": block_unrotated,
        "num_warps": min(8, _power_of_2_within(elements // tile.of_a_warp)),
    }
    return LaunchShape(constants, q_tokens, -(-q_heads // q_block), k_tokens, -(-k_heads // k_block))


def _blocks(heads: int, width: int, tile: RopeTile) -> tuple[int, int]:
    """Return the tokens and the heads of a program, for heads of ``width`` elements.

    A program takes as many heads as fit, if at most a fifth of all places for heads stay empty. Tokens fill the room
    that is left.
    """
    block = triton.next_power_of_2(max(1, heads))
    while block > 1 and (block * width > tile.most or -(-heads // block) * block > 1.25 * heads):
        block //= 2
    return _power_of_2_within(tile.elements // (block * width)), block


def _power_of_2_within(n: int) -> int:
    """Return the largest power of two that is at most n; 1 for 0."""
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

    Last dimensions have stride 1. The other arguments are those of :func:`fastpack.ops.rope.apply_rope`.
    """
    (q, q_out), (k, k_out) = pairs[0], pairs[-1]
    tokens, q_heads, head_dim = q.shape
    shape = launch_shape(q_heads, k.shape[1] if len(pairs) == 2 else 0, head_dim, cos.shape[1], ROTATE_TILE)
    with on_device(q):
        rotate_kernel[(sum(shape.programs(tokens)),)](
            *(q, k, q_out, k_out, None, None, cos, sin, positions, tokens),
            *(*q.stride()[:2], *k.stride()[:2], *q_out.stride()[:2], *k_out.stride()[:2]),
            *(cos.stride(0), sin.stride(0)),
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            UNIT_OFFSET=False,
            EPS=0.0,
            COMPUTE=compute_dtype(q),
            **shape.constants,
            **early(q),
        )


def compute_dtype(x: Tensor) -> Any:
    """Return the Triton dtype to compute in for elements of ``x``."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32
