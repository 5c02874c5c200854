"""The short causal convolution of packed sequences: forward and backward, each in one launch.

A program takes a tile of tokens and channels. It finds its tokens' sequences by a binary search in ``cu_seqlens``, and
loads the tile once for each tap, shifted, which caches serve. The backward computes the values before the activation
again, for the tokens ahead, too: so it reads x and the gradient, and writes dx, and keeps nothing else.

If the weight is trained, a fixed number of programs walk over the tiles. Each has its own sums for weight and bias,
which are added afterwards in a fixed order: the same bits in every run.

Suffixes: T tokens, C channels, W taps, N sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, in_rows, on_device, processors, wait_for_inputs

MAX_TAPS = 8
"""The most taps: the backward is unrolled over pairs of them."""
FORWARD = {"BLOCK_T": 32, "BLOCK_C": 128, "num_warps": 4}
BACKWARD = {"BLOCK_T": 16, "BLOCK_C": 128, "num_warps": 4}
WAVES = 8
"""Programs per multiprocessor of a backward with sums for the weight."""


@triton.jit
def _sequences(cu_seqlens, token, sequences, steps):
    """Return the first token and the end of each token's sequence, ``[TOKENS]``."""
    low = token * 0
    high = low + sequences
    for _ in range(0, steps):
        middle = (low + high) // 2
        begins = tl.load(cu_seqlens + middle) <= token
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    return tl.load(cu_seqlens + low), tl.load(cu_seqlens + low + 1)


@triton.jit
def _load(X, token, stride, channel, mask, CHANNELS: tl.constexpr):
    at = token.to(tl.int64)[:, None] * stride + channel[None, :]
    return tl.load(X + at, mask=mask[:, None] & (channel < CHANNELS)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _load_tap(WEIGHT, channel, back: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Return the factors ``[1, BLOCK_C]`` of the tokens ``back`` before."""
    tap = tl.load(WEIGHT + channel * TAPS + (TAPS - 1 - back), mask=channel < CHANNELS, other=0.0)
    return tap.to(tl.float32)[None, :]


@triton.jit
def _convolved(X, WEIGHT, BIAS, token, begin, end, x_stride, channel, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Return z ``[BLOCK_T, BLOCK_C]`` of these tokens, whose sequences are ``[begin, end)``."""
    z = _load(X, token, x_stride, channel, token < end, CHANNELS) * _load_tap(WEIGHT, channel, 0, CHANNELS, TAPS)
    for back in tl.static_range(1, TAPS):
        inside = (token - back >= begin) & (token < end)
        x = _load(X, token - back, x_stride, channel, inside, CHANNELS)
        z += x * _load_tap(WEIGHT, channel, back, CHANNELS, TAPS)
    if BIAS is not None:
        z += tl.load(BIAS + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit(do_not_specialize=["sequences", "steps"])
def _forward_kernel(
    X, WEIGHT, BIAS, OUT, cu_seqlens, sequences, steps, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin, end = _sequences(cu_seqlens, token, sequences, steps)
    z = _convolved(X, WEIGHT, BIAS, token, begin, end, x_stride, channel, CHANNELS, TAPS)
    if SILU:
        z *= tl.sigmoid(z)
    at = token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    mask = (token < end)[:, None] & (channel < CHANNELS)[None, :]
    tl.store(OUT + at, z.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sequences", "steps", "tiles"])
def _backward_kernel(
    GRAD, X, WEIGHT, BIAS, DX, SUMS, cu_seqlens, sequences, steps, tiles, grad_stride, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write DX, if there is one, and this program's SUMS ``[TAPS + 1, CHANNELS]``, the last row for the bias."""
    wait_for_inputs(EARLY)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.arange(0, BLOCK_W)
    sums = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        begin, end = _sequences(cu_seqlens, token, sequences, steps)
        dx = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for ahead in tl.static_range(TAPS):
            if DX is not None or ahead == 0:
                later = token + ahead
                slope = _load(GRAD, later, grad_stride, channel, later < end, CHANNELS)
                if SILU:
                    z = _convolved(X, WEIGHT, BIAS, later, begin, end, x_stride, channel, CHANNELS, TAPS)
                    gate = tl.sigmoid(z)
                    slope *= gate * (1.0 + z * (1.0 - gate))
                dx += slope * _load_tap(WEIGHT, channel, ahead, CHANNELS, TAPS)
                if SUMS is not None and ahead == 0:
                    for back in tl.static_range(TAPS):
                        inside = (token - back >= begin) & (token < end)
                        x = _load(X, token - back, x_stride, channel, inside, CHANNELS)
                        sums += tl.where(row[:, None] == TAPS - 1 - back, tl.sum(slope * x, 0)[None, :], 0.0)
                    sums += tl.where(row[:, None] == TAPS, tl.sum(slope, 0)[None, :], 0.0)
        if DX is not None:
            at = token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
            mask = (token < end)[:, None] & (channel < CHANNELS)[None, :]
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
    if SUMS is not None:
        at = (tl.program_id(0) * (TAPS + 1) + row)[:, None] * CHANNELS + channel[None, :]
        tl.store(SUMS + at, sums, mask=(row <= TAPS)[:, None] & (channel < CHANNELS)[None, :])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, silu: bool) -> Tensor:
    """Return the convolution ``[T, C]`` in x's dtype."""
    (tokens, channels), taps = x.shape, weight.shape[1]
    x, x_stride = in_rows(x, channels)
    out = x.new_empty(tokens, channels)
    grid = triton.cdiv(tokens, FORWARD["BLOCK_T"]), triton.cdiv(channels, FORWARD["BLOCK_C"])
    with on_device(x):
        _forward_kernel[grid](
            *(x, weight.contiguous(), bias, out, cu_seqlens, *_search(cu_seqlens), x_stride),
            *(channels, taps, silu),
            **FORWARD,
            **early(x),
        )
    return out


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    silu: bool,
    *,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x ``[T, C]``, and of weight ``[C, W]`` and bias ``[C]``, those that are asked for."""
    (tokens, channels), taps = x.shape, weight.shape[1]
    (grad, grad_stride), (x, x_stride) = in_rows(grad, channels), in_rows(x, channels)
    tiles, across = triton.cdiv(tokens, BACKWARD["BLOCK_T"]), triton.cdiv(channels, BACKWARD["BLOCK_C"])
    programs = min(tiles, triton.cdiv(WAVES * processors(x.device), across)) if of_weight else tiles
    dx = x.new_empty(tokens, channels) if of_x else None
    sums = x.new_empty(programs, taps + 1, channels, dtype=torch.float32) if of_weight else None
    with on_device(x):
        _backward_kernel[programs, across](
            *(grad, x, weight.contiguous(), bias, dx, sums, cu_seqlens, *_search(cu_seqlens), tiles),
            *(grad_stride, x_stride, channels, taps, silu),
            BLOCK_W=triton.next_power_of_2(taps + 1),
            **BACKWARD,
            **early(x),
        )
    if sums is None:
        return dx, None, None
    total = sums.sum(0)
    dbias = None if bias is None else total[taps].to(bias.dtype)
    return dx, total[:taps].t().to(weight.dtype, copy=True, memory_format=torch.contiguous_format), dbias


def _search(cu_seqlens: Tensor) -> tuple[int, int]:
    """Return the number of sequences, and how many steps find one of them."""
    sequences = len(cu_seqlens) - 1
    return sequences, sequences.bit_length()
