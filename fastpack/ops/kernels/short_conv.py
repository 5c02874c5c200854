"""The short causal convolution of packed sequences: forward and backward, each in one launch.

A program takes a tile of tokens and channels. It loads a window, the tile once for each shift of its tokens, which
caches serve. Meanwhile it finds its tokens' sequences by a binary search in ``cu_seqlens``, and clears what is not
theirs. The backward computes the values before the activation again, for the tokens ahead, too: so it reads x and the
gradient, and writes dx, and keeps nothing else.

If the weight is trained, a program walks over tiles that follow each other. It has its own sums for weight and bias,
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
BACKWARD = {"BLOCK_T": 8, "BLOCK_C": 64, "num_warps": 4}
WAVES = 32
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
def _load_taps(WEIGHT, channel, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Return the factors ``[1, BLOCK_C]`` of each token, of the one before, and so on."""
    taps = ()
    for back in tl.static_range(TAPS):
        tap = tl.load(WEIGHT + channel * TAPS + (TAPS - 1 - back), mask=channel < CHANNELS, other=0.0)
        taps = taps + (tap.to(tl.float32)[None, :],)
    return taps


@triton.jit
def _load_window(X, token, tokens, stride, channel, CHANNELS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Return x of the tokens ``FIRST`` to ``LAST`` ahead, a tile each."""
    window = ()
    for ahead in tl.static_range(FIRST, LAST + 1):
        row = token + ahead
        mask = ((row >= 0) & (row < tokens))[:, None] & (channel < CHANNELS)[None, :]
        at = row.to(tl.int64)[:, None] * stride + channel[None, :]
        window = window + (tl.load(X + at, mask=mask, other=0.0),)
    return window


@triton.jit
def _inside(window, token, begin, end, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Return a window with 0 outside of the token's sequence ``[begin, end)``."""
    inside = ()
    for i in tl.static_range(LAST + 1 - FIRST):
        row = token + FIRST + i
        inside = inside + (tl.where(((row >= begin) & (row < end))[:, None], window[i], 0.0),)
    return inside


@triton.jit
def _convolved(window, taps, bias, PLACE: tl.constexpr, TAPS: tl.constexpr):
    """Return z ``[BLOCK_T, BLOCK_C]`` of the tokens of a window's tile at ``PLACE``."""
    z = window[PLACE].to(tl.float32) * taps[0] + bias
    for back in tl.static_range(1, TAPS):
        z += window[PLACE - back].to(tl.float32) * taps[back]
    return z


@triton.jit
def _load_bias(BIAS, channel, CHANNELS: tl.constexpr):
    bias = tl.zeros_like(channel).to(tl.float32)
    if BIAS is not None:
        bias = tl.load(BIAS + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    return bias[None, :]


@triton.jit(do_not_specialize=["tokens", "sequences", "steps"])
def _forward_kernel(
    X, WEIGHT, BIAS, OUT, cu_seqlens, tokens, sequences, steps, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    window = _load_window(X, token, tokens, x_stride, channel, CHANNELS, 1 - TAPS, 0)
    taps = _load_taps(WEIGHT, channel, CHANNELS, TAPS)
    begin, end = _sequences(cu_seqlens, token, sequences, steps)
    window = _inside(window, token, begin, end, 1 - TAPS, 0)
    z = _convolved(window, taps, _load_bias(BIAS, channel, CHANNELS), TAPS - 1, TAPS)
    if SILU:
        z *= tl.sigmoid(z)
    at = token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    mask = (token < end)[:, None] & (channel < CHANNELS)[None, :]
    tl.store(OUT + at, z.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "sequences", "steps", "tiles", "walk"])
def _backward_kernel(
    GRAD, X, WEIGHT, BIAS, DX, SUMS, cu_seqlens, tokens, sequences, steps, tiles, walk, grad_stride, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write DX, if there is one, and this program's SUMS ``[TAPS + 1, CHANNELS]``, the last row for the bias."""
    wait_for_inputs(EARLY)
    AHEAD: tl.constexpr = TAPS if DX is not None else 1
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    taps = _load_taps(WEIGHT, channel, CHANNELS, TAPS)
    bias = _load_bias(BIAS, channel, CHANNELS)
    sums = ()
    for _ in tl.static_range(TAPS + 1):
        sums = sums + (tl.zeros((BLOCK_T, BLOCK_C), tl.float32),)
    first = tl.program_id(0) * walk
    for tile in range(first, min(first + walk, tiles)):
        token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        window = _load_window(X, token, tokens, x_stride, channel, CHANNELS, 1 - TAPS, AHEAD - 1)
        grads = _load_window(GRAD, token, tokens, grad_stride, channel, CHANNELS, 0, AHEAD - 1)
        begin, end = _sequences(cu_seqlens, token, sequences, steps)
        window = _inside(window, token, begin, end, 1 - TAPS, AHEAD - 1)
        grads = _inside(grads, token, begin, end, 0, AHEAD - 1)
        dx = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for ahead in tl.static_range(AHEAD):
            slope = grads[ahead].to(tl.float32)
            if SILU:
                z = _convolved(window, taps, bias, TAPS - 1 + ahead, TAPS)
                gate = tl.sigmoid(z)
                slope *= gate * (1.0 + z * (1.0 - gate))
            dx += slope * taps[ahead]
            if SUMS is not None and ahead == 0:
                added = ()
                for back in tl.static_range(TAPS):
                    added = added + (sums[back] + slope * window[TAPS - 1 - back].to(tl.float32),)
                sums = added + (sums[TAPS] + slope,)
        if DX is not None:
            at = token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
            mask = (token < end)[:, None] & (channel < CHANNELS)[None, :]
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
    if SUMS is not None:
        at = tl.program_id(0) * (TAPS + 1) * CHANNELS + channel
        for back in tl.static_range(TAPS):
            tl.store(SUMS + at + (TAPS - 1 - back) * CHANNELS, tl.sum(sums[back], 0), mask=channel < CHANNELS)
        tl.store(SUMS + at + TAPS * CHANNELS, tl.sum(sums[TAPS], 0), mask=channel < CHANNELS)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, silu: bool) -> Tensor:
    """Return the convolution ``[T, C]`` in x's dtype."""
    (tokens, channels), taps = x.shape, weight.shape[1]
    x, x_stride = in_rows(x, channels)
    out = x.new_empty(tokens, channels)
    grid = triton.cdiv(tokens, FORWARD["BLOCK_T"]), triton.cdiv(channels, FORWARD["BLOCK_C"])
    with on_device(x):
        _forward_kernel[grid](
            *(x, weight.contiguous(), _dense(bias), out, cu_seqlens, tokens, *_search(cu_seqlens), x_stride),
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
    walk = max(1, triton.cdiv(tiles * across, WAVES * processors(x.device))) if of_weight else 1
    programs = triton.cdiv(tiles, walk)
    dx = x.new_empty(tokens, channels) if of_x else None
    sums = x.new_empty(programs, taps + 1, channels, dtype=torch.float32) if of_weight else None
    with on_device(x):
        _backward_kernel[programs, across](
            *(grad, x, weight.contiguous(), _dense(bias), dx, sums),
            *(cu_seqlens, tokens, *_search(cu_seqlens), tiles, walk),
            *(grad_stride, x_stride, channels, taps, silu),
            **BACKWARD,
            **early(x),
        )
    if sums is None:
        return dx, None, None
    total = sums.sum(0)
    dbias = None if bias is None else total[taps].to(bias.dtype)
    return dx, total[:taps].t().to(weight.dtype, copy=True, memory_format=torch.contiguous_format), dbias


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _search(cu_seqlens: Tensor) -> tuple[int, int]:
    """Return the number of sequences, and how many steps find one of them."""
    sequences = len(cu_seqlens) - 1
    return sequences, sequences.bit_length()
