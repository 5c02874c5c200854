"""Mamba-2's scan of packed sequences, forward: sums of decays, the states between chunks, the results.

Formulas in :mod:`fastpack.ops.ssd`. Three launches:

1. Sums of A dt inside each chunk. They are added in float64 and kept as two float32 numbers, so that a difference of
   two sums has float32's precision even between weak decays that follow strong ones.
2. States. A program takes a tile of one head's state and walks over the chunks of one sequence. The state stays in
   registers, and is written before each chunk. The backward uses the same kernel in reverse.
3. Results. A program takes one chunk of one head.

Products take operands in the inputs' dtype and add up in float32, as is everything else. In float32, products are of
three TF32 products each. Offsets of tokens are int64.

Shape suffixes: T tokens, N sequences, M chunks, L tokens of a chunk, H heads, G groups of R heads, K state size, V head
size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.chunks import Chunks
from fastpack.ops.kernels.launch import early, on_device, stages_that_fit, wait_for_inputs
from fastpack.ops.kernels.ssd_parts import (
    PRECISION,
    decays_between,
    decays_to_end,
    load_per_token,
    load_rows,
    load_state,
    load_sums,
    store_rows,
    store_state,
)

MAX_STATE, MAX_HEAD = 256, 128
"""The largest K and V."""
CHUNK_SIZES = (16, 32, 64)
BLOCK_H = 32
"""Heads of a program that adds up decays."""


@triton.jit(do_not_specialize=["tokens"])
def _sums_kernel(
    DT, A, SUMS, BEGIN, END, tokens, HEADS: tl.constexpr, L: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr
):
    """Write SUMS ``[2, T, H]``: the sums of A dt from each chunk's first token on, and what float32 leaves of them."""
    wait_for_inputs(EARLY)
    blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    chunk = tl.program_id(0) // blocks
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    token = tl.load(BEGIN + chunk) + tl.arange(0, L)
    at = token.to(tl.int64)[:, None] * HEADS + head[None, :]
    mask = (token < tl.load(END + chunk))[:, None] & (head < HEADS)[None, :]
    rate = tl.load(A + head, mask=head < HEADS, other=0.0)
    step = tl.load(DT + at, mask=mask, other=0.0) * rate[None, :]
    total = tl.cumsum(step.to(tl.float64), 0)
    high = total.to(tl.float32)
    tl.store(SUMS + at, high, mask=mask)
    tl.store(SUMS + tl.cast(tokens, tl.int64) * HEADS + at, (total - high.to(tl.float64)).to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _states_kernel(
    LEFT, RIGHT, DT, SUMS, STATES, cu_seqlens, cu_chunks, tokens, left_token, left_group, right_token, right_head,
    HEADS: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, REVERSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the state before each chunk; LEFT is B, RIGHT is x.

    In reverse, write the gradient of the state after each chunk; LEFT is C, RIGHT is the gradient of the result.
    """
    wait_for_inputs(EARLY)
    across: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K * across
    tile = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles % HEADS).to(tl.int64)
    sequence = tl.program_id(0) // tiles // HEADS
    k = tile // across * BLOCK_K + tl.arange(0, BLOCK_K)
    v = tile % across * BLOCK_V + tl.arange(0, BLOCK_V)
    begin, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    first = tl.load(cu_chunks + sequence)
    count = tl.load(cu_chunks + sequence + 1) - first
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for step in range(0, count):
        at = step
        if REVERSE:
            at = count - 1 - step
        token = begin + at * L + tl.arange(0, L)
        valid = token < end
        high, low = load_sums(SUMS, token, valid, head, tokens, HEADS)
        last = tl.minimum(begin + at * L + L, end)
        to_end, whole = decays_to_end(SUMS, high, low, valid, head, last, tokens, HEADS)
        if REVERSE:
            factor = tl.exp(high)
        else:
            factor = to_end * load_per_token(DT, token, valid, head, HEADS)
        left = load_rows(LEFT + head // RATIO * left_group, token, valid, left_token, k, K)
        right = load_rows(RIGHT + head * right_head, token, valid, right_token, v, V)
        store_state(STATES, state, first + at, head, k, v, HEADS, K, V)
        right = (right.to(tl.float32) * factor[:, None]).to(left.dtype)
        state = tl.dot(tl.trans(left), right, state * whole, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tokens"])
def _results_kernel(
    X, DT, SUMS, B, C, BEFORE, OUT, BEGIN, END, tokens,
    x_token, x_head, b_token, b_group, c_token, c_group,
    HEADS: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    chunk = tl.program_id(0) // HEADS
    token = tl.load(BEGIN + chunk) + tl.arange(0, L)
    valid = token < tl.load(END + chunk)
    v = tl.arange(0, BLOCK_V)
    high, low = load_sums(SUMS, token, valid, head, tokens, HEADS)
    score = tl.zeros((L, L), tl.float32)
    out = tl.zeros((L, BLOCK_V), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        b = load_rows(B + head // RATIO * b_group, token, valid, b_token, k, K)
        c = load_rows(C + head // RATIO * c_group, token, valid, c_token, k, K)
        before = load_state(BEFORE, chunk, head, k, v, HEADS, K, V)
        score = tl.dot(c, tl.trans(b), score, input_precision=PRECISION)
        out = tl.dot(c, before, out, input_precision=PRECISION)
    x = load_rows(X + head * x_head, token, valid, x_token, v, V)
    dt = load_per_token(DT, token, valid, head, HEADS)
    weight = score * decays_between(high, low, valid, L) * dt[None, :]
    out = tl.dot(weight.to(x.dtype), x, out * tl.exp(high)[:, None], input_precision=PRECISION)
    store_rows(OUT + head * V, out, token, valid, HEADS * V, v, V)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The scan's inputs, as kernels read them.

    Attributes:
        x: ``[T, H, V]``, the last dimension contiguous.
        dt: float32 ``[T, H]``, contiguous.
        A: float32 ``[H]``, contiguous.
        B: ``[T, G, K]`` in x's dtype, the last dimension contiguous.
        C: the same.
        chunks: the sequences' chunks.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    chunks: Chunks

    @classmethod
    def of(cls, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunks: Chunks) -> Inputs:
        """Copy what kernels can't read as it is."""
        dt, A = dt.float().contiguous(), A.float().contiguous()
        return cls(columns(x), dt, A, columns(B), columns(C), chunks)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that kernels are compiled for."""
        heads, groups = self.x.shape[1], self.B.shape[1]
        k, v = self.B.shape[2], self.x.shape[2]
        return {"HEADS": heads, "RATIO": heads // groups, "K": k, "V": v, "L": self.chunks.size}

    @property
    def tile(self) -> dict[str, int]:
        """The tile ``[BLOCK_K, BLOCK_V]`` of a state in kernels that take all of V at once."""
        most = 32 if self.x.dtype == torch.float32 else 64
        return {"BLOCK_K": block(self.B.shape[2], most), "BLOCK_V": block(self.x.shape[2], MAX_HEAD)}

    def options(self, streamed: int, warps: int) -> dict[str, int]:
        """Return the tile, the warps and the stages of a kernel that takes all of V at once.

        Args:
            streamed: bytes that a stage loads, beside a few vectors. As many stages are used as fit.
            warps: for V up to 64; a wider one needs 8.
        """
        size, rows, wide = self.x.element_size(), self.chunks.size, self.tile["BLOCK_V"]
        resident = rows * (4 * rows + (4 + 2 * size) * wide)  # measured by compiling: this is enough without stages
        more = stages_that_fit(self.x.device, 2, resident, streamed + 32 * rows)
        return {**self.tile, "num_stages": 1 + more, "num_warps": warps if wide <= 64 else 8}

    def new_states(self) -> Tensor:
        """Allocate a state for each chunk, ``[M, H, K, V]`` in x's dtype, as products take it."""
        return self.x.new_empty(len(self.chunks.begin), self.x.shape[1], self.B.shape[2], self.x.shape[2])


def columns(x: Tensor) -> Tensor:
    """Return ``[T, heads, size]`` with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def block(size: int, most: int) -> int:
    """Return a power of two that holds ``size``, from 16 to ``most``."""
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(inputs: Inputs) -> Tensor:
    """Return the results, float32 ``[T, H, V]``."""
    x, chunks = inputs.x, inputs.chunks
    sums = sums_of_decays(inputs)
    before = states(inputs, sums)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    k, v = inputs.tile.values()
    options = inputs.options(x.element_size() * k * (2 * chunks.size + v), warps=4)
    with on_device(x):
        _results_kernel[(len(chunks.begin) * x.shape[1],)](
            *(x, inputs.dt, sums, inputs.B, inputs.C, before, out, chunks.begin, chunks.end, len(x)),
            *(*x.stride()[:2], *inputs.B.stride()[:2], *inputs.C.stride()[:2]),
            **inputs.sizes,
            **options,
            **early(x),
        )
    return out


def sums_of_decays(inputs: Inputs) -> Tensor:
    """Return the sums of A dt inside each chunk in two parts, float32 ``[2, T, H]``."""
    dt, chunks = inputs.dt, inputs.chunks
    sums = dt.new_empty(2, *dt.shape)
    with on_device(dt):
        _sums_kernel[(len(chunks.begin) * triton.cdiv(dt.shape[1], BLOCK_H),)](
            *(dt, inputs.A, sums, chunks.begin, chunks.end, len(dt), dt.shape[1], chunks.size, BLOCK_H), **early(dt)
        )
    return sums


def states(inputs: Inputs, sums: Tensor, grad: Tensor | None = None) -> Tensor:
    """Return the state before each chunk, ``[M, H, K, V]``; with the result's gradient, that of the state after it."""
    chunks = inputs.chunks
    left, right = (inputs.B, inputs.x) if grad is None else (inputs.C, grad)
    out, sizes = inputs.new_states(), inputs.sizes
    tile = {"BLOCK_K": block(sizes["K"], 64), "BLOCK_V": block(sizes["V"], 64)}
    tiles = triton.cdiv(sizes["K"], tile["BLOCK_K"]) * triton.cdiv(sizes["V"], tile["BLOCK_V"])
    streamed = chunks.size * (left.element_size() * tile["BLOCK_K"] + right.element_size() * tile["BLOCK_V"])
    stages = 1 + stages_that_fit(left.device, 2, 4 * tile["BLOCK_K"] * 2 * chunks.size, streamed + 32 * chunks.size)
    with on_device(left):
        _states_kernel[((len(chunks.cu_seqlens) - 1) * sizes["HEADS"] * tiles,)](
            *(left, right, inputs.dt, sums, out, chunks.cu_seqlens, chunks.cu_chunks, len(left)),
            *(*left.stride()[:2], *right.stride()[:2]),
            **sizes,
            **tile,
            REVERSE=grad is not None,
            num_stages=stages,
            **early(left),
        )
    return out
