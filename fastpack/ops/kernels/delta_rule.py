"""The gated delta rule with a decay per head: the kernels of the forward, and those that both passes use.

:mod:`fastpack.ops.delta_rule` has the formulas. Three kernels compute the forward: the first solves each chunk's system
and writes w and u; the second carries the state through each sequence, chunk by chunk, and writes n and the states at
the chunks' starts; the third writes the result of each chunk. The backward runs the first two again, without solving.

Each program handles one head. Programs of a chunk read only its real tokens, and those of an empty chunk end at once.
The matmuls of half-precision inputs add up in float32; the states are float32 within a program. Float32 inputs are
multiplied as three TF32 parts, which lose no more than float32 does. There are no atomics: the same bits in every run.

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
from fastpack.ops.kernels.launch import early, on_device, processors, stages_that_fit, wait_for_inputs


@dataclass(frozen=True)
class DeltaTile:
    """The tile and the compiler options of a kernel, and what its program holds in shared memory.

    Attributes:
        block_v: the columns of values or of a state that a program or a step takes.
        warps: Triton's.
        stages: the most pipeline stages.
        streamed: how many tiles ``[C, K]``, ``[C, BLOCK_V]`` and ``[K, BLOCK_V]`` a step loads.
        resident: how many of these tiles, and how many ``[C, C]``, are held besides.
    """

    block_v: int
    warps: int
    stages: int
    streamed: tuple[int, int, int]
    resident: tuple[int, int, int, int]

    def options(self, k: Tensor, v: Tensor, size: int, block_v: int | None = None) -> dict[str, Any]:
        """Return the constants and the compiler options of a launch for chunks of ``size`` tokens.

        ``num_stages`` is 0 if the kernel does not fit into the device's shared memory.
        """
        heads, value = v.shape[1:]
        block_k, block_v = block_of(k.shape[2]), min(block_v or self.block_v, block_of(value))
        tiles = [size * block_k, size * block_v, block_k * block_v, size * size]
        streamed, resident = (
            sum(count * tile for count, tile in zip(counts, tiles, strict=False)) * v.element_size()
            for counts in (self.streamed, self.resident)
        )
        return {
            **{"HEADS": heads, "GROUP": heads // k.shape[1], "K": k.shape[2], "V": value},
            **{"BLOCK_K": block_k, "BLOCK_V": block_v, "C": size, "PRECISION": precision_of(v)},
            **{"num_warps": self.warps, "num_stages": stages_that_fit(v.device, self.stages, resident, streamed)},
        }

    def options_of_walk(self, k: Tensor, v: Tensor, chunks: Chunks) -> tuple[int, dict[str, Any]]:
        """Return the number of programs, and the options, if each takes some columns of values of one sequence.

        The fewer sequences there are, the fewer columns a program takes, so that the device is busy.
        """
        walks, block = (len(chunks.cu_seqlens) - 1) * v.shape[1], self.block_v
        while block > 16 and walks * triton.cdiv(v.shape[2], block) < processors(v.device):
            block //= 2
        options = self.options(k, v, chunks.size, block)
        return walks * triton.cdiv(v.shape[2], options["BLOCK_V"]), options


SOLVE = DeltaTile(block_v=64, warps=4, stages=2, streamed=(0, 1, 0), resident=(2, 0, 0, 4))
STATES = DeltaTile(block_v=32, warps=4, stages=2, streamed=(2, 1, 0), resident=(0, 0, 1, 0))
OUTPUTS = DeltaTile(block_v=64, warps=4, stages=2, streamed=(0, 1, 1), resident=(2, 0, 0, 1))

# --- parts of the kernels ---------------------------------------------------------------------------------------------


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
def write_w_and_u(
    VALUES, W, U, inverse, k, beta, sums, begin, length, head, v_token, v_head,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write W ``[T, H, K]`` and U ``[T, H, V]`` of a chunk."""
    decayed = k.to(tl.float32) * (beta * tl.exp(sums))[:, None]
    w = product(inverse, decayed.to(k.dtype), PRECISION)
    store_rows(W + head * K, w, begin, length, HEADS * K, 0, C, K, BLOCK_K)
    VALUES += head.to(tl.int64) * v_head
    for first in range(0, V, BLOCK_V):
        v = load_rows(VALUES, begin, length, v_token, first, C, V, BLOCK_V)
        u = product(inverse, (v.to(tl.float32) * beta[:, None]).to(v.dtype), PRECISION)
        store_rows(U + head * V, u, begin, length, HEADS * V, first, C, V, BLOCK_V)


# --- the forward ------------------------------------------------------------------------------------------------------


@triton.jit
def _inverse(A, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
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


@triton.jit
def _solve_kernel(
    KEYS, VALUES, G, BETA, SUMS, INVERSE, W, U, BEGIN, END, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write the SUMS of g ``[T, H]``, INVERSE ``[M, H, C, C]``, which is ``(I + A)^-1``, W and U."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    token = tl.arange(0, C)
    real = token < length
    g = tl.load(per_token(G, begin, head, HEADS, C), mask=real, other=0.0).to(tl.float32)
    beta = tl.load(per_token(BETA, begin, head, HEADS, C), mask=real, other=0.0).to(tl.float32)
    sums = tl.cumsum(g, 0)
    tl.store(per_token(SUMS, begin, head, HEADS, C), sums, mask=real)
    k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, 0, C, K, BLOCK_K)
    A = product(k, tl.trans(k), PRECISION) * pairwise_decays(sums, length, C) * beta[:, None]
    inverse = _inverse(tl.where(token[:, None] > token[None, :], A, 0.0), C, LEVELS, PRECISION).to(k.dtype)
    INVERSE += (chunk.to(tl.int64) * HEADS + head) * (C * C)
    tl.store(INVERSE + token[:, None] * C + token[None, :], inverse)
    write_w_and_u(
        VALUES, W, U, inverse, k, beta, sums, begin, length, head, v_token, v_head,
        HEADS, K, V, BLOCK_K, BLOCK_V, C, PRECISION,
    )  # fmt: skip


@triton.jit
def _states_kernel(
    KEYS, W, U, SUMS, STATES, NEW, CU_SEQLENS, CU_CHUNKS, k_token, k_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the STATES at the chunks' starts ``[M, H, K, V]``, and NEW ``[T, H, V]``, which is n.

    Grid: sequences times heads times blocks of V.
    """
    wait_for_inputs(EARLY)
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    first = tl.program_id(0) % BLOCKS * BLOCK_V
    head = tl.program_id(0) // BLOCKS % HEADS
    sequence = tl.program_id(0) // (BLOCKS * HEADS)
    begin, end = tl.load(CU_SEQLENS + sequence), tl.load(CU_SEQLENS + sequence + 1)
    KEYS += (head // GROUP).to(tl.int64) * k_head
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    first_chunk, end_chunk = tl.load(CU_CHUNKS + sequence), tl.load(CU_CHUNKS + sequence + 1)
    for place in range(0, end_chunk - first_chunk):
        length = tl.minimum(end - begin, C)
        k = load_rows(KEYS, begin, length, k_token, 0, C, K, BLOCK_K)
        w = load_rows(W + head * K, begin, length, HEADS * K, 0, C, K, BLOCK_K)
        u = load_rows(U + head * V, begin, length, HEADS * V, first, C, V, BLOCK_V)
        sums = tl.load(per_token(SUMS, begin, head, HEADS, C), mask=tl.arange(0, C) < length, other=0.0)
        total = tl.load(SUMS + (begin + length - 1).to(tl.int64) * HEADS + head)
        at, inside = state_of(STATES, first_chunk + place, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        rounded = state.to(w.dtype)
        tl.store(at, rounded, mask=inside)
        new = u.to(tl.float32) - product(w, rounded, PRECISION)
        store_rows(NEW + head * V, new, begin, length, HEADS * V, first, C, V, BLOCK_V)
        decayed = (new * tl.exp(total - sums)[:, None]).to(k.dtype)
        state = state * tl.exp(total) + product(tl.trans(k), decayed, PRECISION)
        begin += C


@triton.jit
def _outputs_kernel(
    QUERIES, KEYS, SUMS, STATES, NEW, OUT, BEGIN, END, scale, q_token, q_head, k_token, k_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write OUT ``[T, H, V]``."""
    wait_for_inputs(EARLY)
    chunk, head, begin, length = locate_chunk(BEGIN, END, HEADS)
    if length == 0:
        return
    q = load_rows(QUERIES + (head // GROUP).to(tl.int64) * q_head, begin, length, q_token, 0, C, K, BLOCK_K)
    k = load_rows(KEYS + (head // GROUP).to(tl.int64) * k_head, begin, length, k_token, 0, C, K, BLOCK_K)
    sums = tl.load(per_token(SUMS, begin, head, HEADS, C), mask=tl.arange(0, C) < length, other=0.0)
    scores = (product(q, tl.trans(k), PRECISION) * pairwise_decays(sums, length, C)).to(q.dtype)
    for first in range(0, V, BLOCK_V):
        at, inside = state_of(STATES, chunk, head, first, HEADS, K, V, BLOCK_K, BLOCK_V)
        state = tl.load(at, mask=inside, other=0.0)
        new = load_rows(NEW + head * V, begin, length, HEADS * V, first, C, V, BLOCK_V)
        out = product(q, state, PRECISION) * tl.exp(sums)[:, None] + product(scores, new, PRECISION)
        store_rows(OUT + head * V, out * scale, begin, length, HEADS * V, first, C, V, BLOCK_V)


# --- queries and keys of length 1 -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _unit_kernel(
    X, OUT, INVERSE_LENGTH, rows, token, head, eps,
    HEADS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write X ``[T, heads, K]`` with each row divided by its length, and one over these lengths ``[T, heads]``."""
    wait_for_inputs(EARLY)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    mask = (row < rows)[:, None] & (column < K)[None, :]
    at = (row // HEADS).to(tl.int64) * token + (row % HEADS).to(tl.int64) * head
    x = tl.load(X + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) + eps)
    tl.store(INVERSE_LENGTH + row, inverse, mask=row < rows)
    out = (x * inverse[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + row.to(tl.int64)[:, None] * K + column[None, :], out, mask=mask)


# --- launchers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Saved:
    """The tensors that the backward reads.

    Attributes:
        q: ``[T, heads, K]``, of length 1 if they were normalised.
        k: ``[T, heads, K]``, too.
        v: ``[T, H, V]``.
        beta: ``[T, H]``.
        sums: float32 ``[T, H]``, the sums of g from the chunk's start.
        inverse: ``[M, H, C, C]``, each chunk's ``(I + A)^-1``.
        q_lengths: float32 ``[T, heads]``, one over the lengths that q had; None if they were not normalised.
        k_lengths: float32 ``[T, heads]``, one over the lengths that k had, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    sums: Tensor
    inverse: Tensor
    q_lengths: Tensor | None
    k_lengths: Tensor | None


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, eps: float | None
) -> tuple[Tensor, Saved]:
    """Return the result ``[T, H, V]``, and what the backward reads.

    Args:
        q: ``[T, heads, K]``, in v's dtype.
        k: ``[T, heads, K]``, in v's dtype.
        v: ``[T, H, V]``.
        g: ``[T, H]``, at most 0.
        beta: ``[T, H]``.
        chunks: the chunks of the sequences; C is 16, 32 or 64.
        eps: added to the squared lengths of q and k, by which they are divided; None to take them as they are.
    """
    q_lengths, k_lengths = None, None
    if eps is not None:
        (q, q_lengths), (k, k_lengths) = (_unit(x, eps) for x in (q, k))
    q, k, v = (readable(x) for x in (q, k, v))
    heads, count, size = v.shape[1], len(chunks.begin), chunks.size
    sums = torch.empty(v.shape[:2], dtype=torch.float32, device=v.device)
    saved = Saved(q, k, v, beta.contiguous(), sums, v.new_empty(count, heads, size, size), q_lengths, k_lengths)
    w, u = v.new_empty(*v.shape[:2], k.shape[2]), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    with on_device(v):
        _solve_kernel[(count * heads,)](
            k, v, g.contiguous(), saved.beta, sums, saved.inverse, w, u, chunks.begin, chunks.end, *strides(k, v),
            LEVELS=size.bit_length() - 1, **SOLVE.options(k, v, size), **early(v),
        )  # fmt: skip
        states, new = run_states(saved, w, u, chunks)
        out = torch.empty_like(u)
        _outputs_kernel[(count * heads,)](
            q, k, sums, states, new, out, chunks.begin, chunks.end, k.shape[2] ** -0.5, *strides(q, k),
            **OUTPUTS.options(k, v, size), **early(v),
        )  # fmt: skip
    return out, saved


def run_states(saved: Saved, w: Tensor, u: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Return the states at the chunks' starts ``[M, H, K, V]``, in v's dtype, and n ``[T, H, V]``."""
    k = saved.k
    states = u.new_empty(len(chunks.begin), u.shape[1], k.shape[2], u.shape[2])
    new = torch.empty_like(u)
    programs, options = STATES.options_of_walk(k, u, chunks)
    _states_kernel[(programs,)](
        k, w, u, saved.sums, states, new, chunks.cu_seqlens, chunks.cu_chunks, *strides(k), **options, **early(u)
    )
    return states, new


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rows ``[T, heads, K]`` divided by their lengths, and one over these, float32 ``[T, heads]``."""
    tokens, heads, size = x.shape
    x = readable(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
    block = block_of(size)
    rows = max(1, 2048 // block)
    with on_device(x):
        _unit_kernel[(triton.cdiv(tokens * heads, rows),)](
            x, out, inverse, tokens * heads, *strides(x), eps, heads, size, block, rows, **early(x)
        )
    return out, inverse


def readable(x: Tensor) -> Tensor:
    """Return ``x [T, heads, size]``, or a copy if its last dimension has a stride other than 1."""
    return x if x.stride(2) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of tokens and of heads."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def block_of(size: int) -> int:
    """Return the width of a tile that holds ``size`` columns; matrix units take 16 at least."""
    return max(16, triton.next_power_of_2(size))


def precision_of(x: Tensor) -> str:
    """Return how float32 values are multiplied: as exactly as the inputs are."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"
