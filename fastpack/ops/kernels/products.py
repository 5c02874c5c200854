"""Sums of matrix products over the first rows, as many as the device says: Triton kernel of
:mod:`fastpack.ops.products`, which holds its definition.

One program for each processor walks over tiles of the output. The terms of a tile are summed in registers, what they
are added to is read at its end, and a tile behind the last row that counts has no terms. How many tiles there are, only
the device knows: those of a last round that half of the programs or fewer would share are taken in halves. Tiles come
into shared memory through tensor descriptors (Hopper's TMA), which also put zeros where a tile sticks out.

Shape suffixes: T rows, K summed over, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpack.ops.kernels.launch import early, on_device, processors, rows_that_count, wait_for_inputs
from fastpack.ops.products import TERMS

BLOCK_T, BLOCK_N, BLOCK_K = 128, 256, 64
GROUP = 32
"""Tiles below each other that are made at the same time: they share what they read of the second factors."""
STAGES, WARPS = 3, 8
"""All measured on an H200, with the shapes of an 8B model and 2,944 tokens."""


@triton.jit
def _add_term(sums, x, m, length, row, column, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr):
    for at in range(0, length, BLOCK):
        left = x.load([row, at])
        if TRANSPOSED:
            right = m.load([column, at]).T
        else:
            right = m.load([at, column])
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton.jit
def _store(sums, base, out, bias, row, column, columns, WIDTH: tl.constexpr, BASE: tl.constexpr, BIAS: tl.constexpr):
    if BIAS:
        places = column + tl.arange(0, WIDTH)
        sums += tl.load(bias + places, mask=places < columns, other=0.0).to(tl.float32)[None, :]
    if BASE:
        sums += base.load([row, column]).to(tl.float32)
    out.store([row, column], sums.to(out.dtype))


@triton.jit
def _sum_terms(
    x0, m0, length0, x1, m1, length1, x2, m2, length2, x3, m3, length3, row, column,
    NUMBER: tl.constexpr, BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, BLOCK3: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sums = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    sums = _add_term(sums, x0, m0, length0, row, column, BLOCK0, T0)
    if NUMBER > 1:
        sums = _add_term(sums, x1, m1, length1, row, column, BLOCK1, T1)
    if NUMBER > 2:
        sums = _add_term(sums, x2, m2, length2, row, column, BLOCK2, T2)
    if NUMBER > 3:
        sums = _add_term(sums, x3, m3, length3, row, column, BLOCK3, T3)
    return sums


@triton.jit
def _place(tile, down, across, GROUP: tl.constexpr):
    """Which tile from the top and from the left is the one of this number, of ``down`` times ``across``."""
    first = tile // (GROUP * across) * GROUP
    together = tl.minimum(down - first, GROUP)
    return first + tile % (GROUP * across) % together, tile % (GROUP * across) // together


@triton.jit(do_not_specialize=["tokens"])
def _products_kernel(
    count, tokens, columns,
    x0, m0, half0, length0, x1, m1, half1, length1, x2, m2, half2, length2, x3, m3, half3, length3, base, bias, out,
    NUMBER: tl.constexpr, BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, BLOCK3: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, BASE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    down = tl.cdiv(rows_that_count(count, tokens), BLOCK_T)
    across = tl.cdiv(columns, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2

    # what does not go round: in halves, if there is a program for each
    left = down * across % PROGRAMS
    left = tl.where(2 * left <= PROGRAMS, left, 0)
    whole = down * across - left
    for tile in range(program, whole, PROGRAMS):
        below, beside = _place(tile, down, across, GROUP)
        row, column = below * BLOCK_T, beside * BLOCK_N
        sums = _sum_terms(
            x0, m0, length0, x1, m1, length1, x2, m2, length2, x3, m3, length3, row, column,
            NUMBER, BLOCK0, BLOCK1, BLOCK2, BLOCK3, T0, T1, T2, T3, BLOCK_T, BLOCK_N,
        )  # fmt: skip
        # in halves here too: all at once takes the shared memory of a stage
        low, high = tl.split(tl.permute(tl.reshape(sums, (BLOCK_T, 2, HALF)), (0, 2, 1)))
        _store(low, base, out, bias, row, column, columns, HALF, BASE, BIAS)
        _store(high, base, out, bias, row, column + HALF, columns, HALF, BASE, BIAS)
    for half in range(program, 2 * left, PROGRAMS):
        below, beside = _place(whole + half // 2, down, across, GROUP)
        row, column = below * BLOCK_T, beside * BLOCK_N + half % 2 * HALF
        sums = _sum_terms(
            x0, half0, length0, x1, half1, length1, x2, half2, length2, x3, half3, length3, row, column,
            NUMBER, BLOCK0, BLOCK1, BLOCK2, BLOCK3, T0, T1, T2, T3, BLOCK_T, HALF,
        )  # fmt: skip
        _store(sums, base, out, bias, row, column, columns, HALF, BASE, BIAS)

    nothing = tl.zeros((BLOCK_T, HALF), dtype=tl.float32)
    for half in range(program, 2 * (tl.cdiv(tokens, BLOCK_T) - down) * across, PROGRAMS):
        row, column = (down + half // (2 * across)) * BLOCK_T, half % (2 * across) * HALF
        _store(nothing, base, out, bias, row, column, columns, HALF, BASE, BIAS)


def _block(length: int) -> int:
    return BLOCK_K if length >= BLOCK_K else max(16, triton.next_power_of_2(length))


def sum_products(
    terms: Sequence[tuple[Tensor, Tensor]], rows: Tensor, base: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    """``sum of x_i [T, K_i] @ m_i [K_i, N]`` with ``base [T, N]`` and ``bias [N]`` into ``out [T, N]``.

    Args:
        terms: one to :data:`TERMS`; rows of each x, and rows or columns of each m, have stride 1.
        rows: int32 ``[1]``: how many rows count. Tiles behind them hold the base and the bias alone.
        base: may be ``out``.
    """
    arguments: list[object] = []
    blocks: dict[str, int | bool] = {}
    half = BLOCK_N // 2
    for place in range(TERMS):
        x, m = terms[min(place, len(terms) - 1)]
        transposed, block = m.stride(1) != 1, _block(x.shape[1])
        arguments.append(TensorDescriptor.from_tensor(x, [BLOCK_T, block]))
        for width in (BLOCK_N, half):
            tile = [width, block] if transposed else [block, width]
            arguments.append(TensorDescriptor.from_tensor(m.t() if transposed else m, tile))
        arguments.append(x.shape[1])
        blocks |= {f"BLOCK{place}": block, f"T{place}": transposed}
    tokens, columns = out.shape
    target = TensorDescriptor.from_tensor(out, [BLOCK_T, half])
    source = target if base is None or base is out else TensorDescriptor.from_tensor(base, [BLOCK_T, half])
    programs = min(processors(out.device), 2 * tiles(tokens, columns))
    with on_device(out):
        _products_kernel[(programs,)](
            rows, tokens, columns, *arguments, source, rows if bias is None else bias.contiguous(), target,
            NUMBER=len(terms), **blocks, BASE=base is not None, BIAS=bias is not None, BLOCK_T=BLOCK_T, BLOCK_N=BLOCK_N,
            GROUP=GROUP, PROGRAMS=programs, num_stages=STAGES, num_warps=WARPS, **early(out),
        )  # fmt: skip


def is_aligned(x: Tensor) -> bool:
    """Whether a tensor descriptor can hold ``x [*, *]``: rows of stride 1, a multiple of 16 bytes apart."""
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def tiles(tokens: int, columns: int) -> int:
    """How many tiles an output of this shape has."""
    return triton.cdiv(tokens, BLOCK_T) * triton.cdiv(columns, BLOCK_N)
