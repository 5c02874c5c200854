"""The parts that the kernels of the gated delta rule share: tiles, loads and stores, the inverse of a chunk's system.

Suffixes: T tokens, M chunks, C tokens of a chunk, H heads of values, K size of a key, V size of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.chunks import Chunks
from fastpack.ops.kernels.launch import stages_that_fit


@dataclass(frozen=True)
class DeltaTile:
    """The tile and the compiler options of a kernel, and what its program holds in shared memory.

    Attributes:
        block_v: the columns of values or of a state that a program or a step takes.
        warps: Triton's, for K up to 128; twice as many for more.
        stages: the most pipeline stages.
        streamed: how many tiles ``[C, K]``, ``[C, BLOCK_V]`` and ``[K, BLOCK_V]`` a step loads.
        resident: how many of these tiles, and how many ``[C, C]``, are held besides.
    """

    block_v: int
    warps: int
    stages: int
    streamed: tuple[int, int, int]
    resident: tuple[int, int, int, int]

    def options(self, k: Tensor, v: Tensor, size: int) -> dict[str, Any]:
        """Return the constants and the compiler options of a launch for chunks of ``size`` tokens.

        ``num_stages`` is 0 if the kernel does not fit into the device's shared memory.
        """
        heads, value = v.shape[1:]
        block_k, block_v = block_of(k.shape[2], v.dtype), min(self.block_v, block_of(value, v.dtype))
        tiles = [size * block_k, size * block_v, block_k * block_v, size * size]
        streamed, resident = (
            sum(count * tile for count, tile in zip(counts, tiles, strict=False)) * v.element_size()
            for counts in (self.streamed, self.resident)
        )
        return {
            "HEADS": heads,
            "GROUP": heads // k.shape[1],
            "K": k.shape[2],
            "V": value,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "C": size,
            "PRECISION": precision_of(v),
            "num_warps": self.warps * (2 if block_k > 128 else 1),
            "num_stages": stages_that_fit(v.device, self.stages, resident, streamed),
        }

    def options_of_walk(self, k: Tensor, v: Tensor, chunks: Chunks) -> tuple[int, dict[str, Any]]:
        """Return the number of programs, and the options, if each takes some columns of values of one sequence."""
        options = self.options(k, v, chunks.size)
        return (len(chunks.cu_seqlens) - 1) * v.shape[1] * triton.cdiv(v.shape[2], options["BLOCK_V"]), options


AGAIN = DeltaTile(block_v=64, warps=4, stages=2, streamed=(0, 2, 0), resident=(2, 0, 0, 2))
"""The tile of the kernels that compute a chunk's W and U again in the backward."""


@dataclass(frozen=True, eq=False)
class Saved:
    """The tensors that the backward reads.

    Attributes:
        q: ``[T, heads, K]``, of length 1 if they were normalised.
        k: ``[T, heads, K]``, too.
        v: ``[T, H, V]``.
        beta: ``[T, H]``.
        sums: float32 ``[T, H]`` or ``[T, H, K]``, the sums of g from the chunk's start.
        inverse: ``[M, H, C, C]``, each chunk's ``(I + A)^-1``.
        scores: ``[M, H, C, C]``, each chunk's P; None if the decay is one per head.
        q_lengths: float32 ``[T, heads]``, one over the lengths that q had; None if they were not normalised.
        k_lengths: float32 ``[T, heads]``, one over the lengths that k had, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    sums: Tensor
    inverse: Tensor
    scores: Tensor | None
    q_lengths: Tensor | None
    k_lengths: Tensor | None

    @property
    def by_channel(self) -> bool:
        """True if the decay is one per channel."""
        return self.scores is not None


@dataclass(frozen=True, eq=False)
class Walk:
    """The tensors that the state meets on its way through the chunks.

    Attributes:
        q: ``[T, heads, K]``; with a decay for each channel ``[T, H, K]``, decayed from the chunk's start.
        k: ``[T, heads, K]``; with a decay for each channel ``[T, H, K]``, decayed to the chunk's end.
        w: ``[T, H, K]``.
        u: ``[T, H, V]``.
    """

    q: Tensor
    k: Tensor
    w: Tensor
    u: Tensor

    @classmethod
    def empty(cls, saved: Saved) -> Walk:
        """Allocate memory for what is computed."""
        v = saved.v
        u = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        w = v.new_empty(*v.shape[:2], saved.k.shape[2])
        if saved.by_channel:
            return cls(torch.empty_like(w), torch.empty_like(w), w, u)
        return cls(saved.q, saved.k, w, u)


@triton.jit
def locate_chunk(BEGIN, END, HEADS: tl.constexpr):
    """Return this program's chunk, its head, the chunk's first token and its length; the length may be 0."""
    chunk = tl.program_id(0) // HEADS
    begin = tl.load(BEGIN + chunk)
    return chunk, tl.program_id(0) % HEADS, begin, tl.load(END + chunk) - begin


@triton.jit
def load_rows(X, begin, length, stride, first, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load the columns from ``first`` on of ``length`` tokens, ``[ROWS, BLOCK]``, with zeros outside of X."""
    row, column = tl.arange(0, ROWS), first + tl.arange(0, BLOCK)
    at = begin.to(tl.int64) * stride + row[:, None] * stride + column[None, :]
    return tl.load(X + at, mask=(row < length)[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(X, x, begin, length, stride, first, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store what :func:`load_rows` loads."""
    row, column = tl.arange(0, ROWS), first + tl.arange(0, BLOCK)
    at = begin.to(tl.int64) * stride + row[:, None] * stride + column[None, :]
    tl.store(X + at, x.to(X.dtype.element_ty), mask=(row < length)[:, None] & (column < SIZE)[None, :])


@triton.jit
def per_token(X, begin, head, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return pointers to ROWS tokens' numbers of a head, in X ``[T, H]``."""
    return X + begin.to(tl.int64) * HEADS + tl.arange(0, ROWS) * HEADS + head


@triton.jit
def state_of(X, chunk, head, first, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
             BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """Return pointers to columns of a state, ``[BLOCK_K, BLOCK_V]``, in X ``[M, H, K, V]``, and their mask."""
    row, column = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_V)
    X += (chunk.to(tl.int64) * HEADS + head) * (K * V)
    return X + row[:, None] * V + column[None, :], (row < K)[:, None] & (column < V)[None, :]


@triton.jit
def square_of(X, chunk, head, HEADS: tl.constexpr, C: tl.constexpr):
    """Return pointers to a chunk's matrix ``[C, C]`` in X ``[M, H, C, C]``."""
    token = tl.arange(0, C)
    X += (chunk.to(tl.int64) * HEADS + head) * (C * C)
    return X + token[:, None] * C + token[None, :]


@triton.jit
def load_total(SUMS, token, head, HEADS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the sums of a token, ``[BLOCK_K]``, from SUMS ``[T, H, K]``."""
    column = tl.arange(0, BLOCK_K)
    return tl.load(SUMS + (token.to(tl.int64) * HEADS + head) * K + column, mask=column < K, other=0.0)


@triton.jit
def pairwise_decays(sums, length, C: tl.constexpr):
    """Return the decay from each token to each later one or itself, ``exp(sums_i - sums_j)``, else 0: ``[C, C]``."""
    token = tl.arange(0, C)
    kept = (token[:, None] >= token[None, :]) & (token < length)[:, None]
    return tl.exp(tl.where(kept, sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """Return ``x @ y`` in float32; x is rounded to y's dtype."""
    return tl.dot(x.to(y.dtype), y, input_precision=PRECISION)


@triton.jit
def write_u(
    VALUES, U, inverse, beta, begin, length, head, v_token, v_head,
    HEADS: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write U ``[T, H, V]`` of a chunk."""
    VALUES += head.to(tl.int64) * v_head
    for first in range(0, V, BLOCK_V):
        v = load_rows(VALUES, begin, length, v_token, first, C, V, BLOCK_V)
        u = product(inverse, (v.to(tl.float32) * beta[:, None]).to(v.dtype), PRECISION)
        store_rows(U + head * V, u, begin, length, HEADS * V, first, C, V, BLOCK_V)


@triton.jit
def write_value_gradients(
    VALUES, U, STATES, DNEW, DV, inverse, beta, chunk, begin, length, head, v_token, v_head,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write DV ``[T, H, V]`` of a chunk, and return the gradient of w, and what u gives to those of A and beta.

    ``inverse`` is transposed.
    """
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
    return dw, dA, dbeta


@triton.jit
def inverse_of_system(A, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``(I + A)^-1`` of a strictly lower triangular A ``[C, C]``, in float32.

    The inverses of the blocks on the diagonal are joined in pairs: with X the inverse of ``[[P, 0], [B, Q]]`` for
    B = 0, the inverse is ``X - X B X``. As in forward substitution, no power of A is formed, which could be large.
    """
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        below = tl.where((row >> level == (column >> level) + 1) & ((row >> level) % 2 == 1), A, 0.0)
        if level == 0:
            inverse -= below
        else:
            inverse -= product(product(inverse, below, PRECISION), inverse, PRECISION)
    return inverse


def readable(x: Tensor) -> Tensor:
    """Return ``x [T, heads, size]``, or a copy if its last dimension has a stride other than 1."""
    return x if x.stride(2) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of tokens and of heads."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def block_of(size: int, dtype: torch.dtype) -> int:
    """Return the width of a tile that holds ``size`` columns.

    Matrix units take 16 at least. In half precision, tiles of 64 x 16 read memory that is not theirs on Hopper (Triton
    3.6): keys and values of 16. Heads of 64 to 256 were run there.
    """
    return max(16 if dtype == torch.float32 else 64, triton.next_power_of_2(size))


def precision_of(x: Tensor) -> str:
    """Return how float32 values are multiplied: as exactly as the inputs are."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"
