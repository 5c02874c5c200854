"""Parts of the kernels of Mamba-2's scan, forward and backward: loads, stores, decays.

Shape suffixes as in :mod:`fastpack.ops.kernels.ssd`.
"""

import triton
import triton.language as tl

PRECISION = tl.constexpr("tf32x3")
"""The precision of products in float32: three of TF32, about as exact, on tensor cores. One alone errs by 1e-3."""


@triton.jit
def load_rows(pointer, token, valid, stride, column, SIZE: tl.constexpr):
    """Load ``[L, columns]`` of one head or group, which begins at ``pointer``; missing rows and columns are zeros."""
    at = token.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(pointer + at, mask=valid[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(pointer, value, token, valid, stride, column, SIZE: tl.constexpr):
    """Write ``[L, columns]`` where :func:`load_rows` reads."""
    at = token.to(tl.int64)[:, None] * stride + column[None, :]
    mask = valid[:, None] & (column < SIZE)[None, :]
    tl.store(pointer + at, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_state(STATES, chunk, head, k, v, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Load ``[k, v]`` of a state of ``[M, H, K, V]``; missing entries are zeros."""
    start = STATES + (chunk.to(tl.int64) * HEADS + head) * (K * V)
    return tl.load(start + k[:, None] * V + v[None, :], mask=(k < K)[:, None] & (v < V)[None, :], other=0.0)


@triton.jit
def store_state(STATES, state, chunk, head, k, v, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Write what :func:`load_state` reads."""
    start = STATES + (chunk.to(tl.int64) * HEADS + head) * (K * V)
    mask = (k < K)[:, None] & (v < V)[None, :]
    tl.store(start + k[:, None] * V + v[None, :], state.to(STATES.dtype.element_ty), mask=mask)


@triton.jit
def load_per_token(PER_TOKEN, token, valid, head, HEADS: tl.constexpr):
    """Load ``[L]`` of a contiguous ``[T, H]``."""
    return tl.load(PER_TOKEN + token.to(tl.int64) * HEADS + head, mask=valid, other=0.0)


@triton.jit
def load_sums(SUMS, token, valid, head, tokens, HEADS: tl.constexpr):
    """Load the two parts of the sums of A dt from the chunk's first token on, ``[L]`` each."""
    high = load_per_token(SUMS, token, valid, head, HEADS)
    low = load_per_token(SUMS + tl.cast(tokens, tl.int64) * HEADS, token, valid, head, HEADS)
    return high, low


@triton.jit
def decays_between(high, low, valid, L: tl.constexpr):
    """Return the decay ``[i, j]`` from token j to token i: 0 where j > i, so that no exponent is positive."""
    i = tl.arange(0, L)
    seen = (i[:, None] >= i[None, :]) & valid[:, None]
    exponent = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp(tl.where(seen, exponent, float("-inf")))


@triton.jit
def decays_to_end(SUMS, high, low, valid, head, end, tokens, HEADS: tl.constexpr):
    """Return the decay from each token to the chunk's end ``[L]``, 0 for missing tokens, and of the whole chunk."""
    high_end, low_end = load_sums(SUMS, end - 1, end > 0, head, tokens, HEADS)
    exponent = (high_end - high) + (low_end - low)
    return tl.exp(tl.where(valid, exponent, float("-inf"))), tl.exp(high_end)
