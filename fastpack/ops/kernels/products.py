"""Sums of matrix products over the first rows, as many as the device says: Triton kernel of
:mod:`fastpack.ops.products`, which holds its definition.

One program for each processor walks over tiles of the output. The terms of a tile are summed in registers, what they
are added to is read at its end, and a tile behind the last row that counts has no terms. How many tiles there are,
only the device knows: those of a last round in which many programs would have none are shared, by teams of one program
more than they have tiles, or of several for one tile, each of which takes as many steps of their sums as the next
(Osama et al., "Stream-K", arXiv:2301.03598, section 4, where all programs are one team; teams read the same operands
at the same time). Tiles come into shared memory through tensor descriptors (Hopper's TMA), which also put zeros where
a tile sticks out. The tiles of several outputs lie beside each other, and are shared as those of one.

Shape suffixes: T rows, K summed over, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpack.ops.kernels.launch import MOST, early, filled, on_device, processors, rows_that_count, wait_for_inputs
from fastpack.ops.products import TERMS, Sum

BLOCK_T, BLOCK_N, BLOCK_K = 128, 256, 64
GROUP = 32
"""Tiles below each other that are made at the same time: they share what they read of the second factors."""
LEAST_SAVED, MORE_SAVED, MOST_MEMBERS = 20, 6, 8
"""Steps of a sum, of which a program has to be spared so many for its part to be written, read and added up, and so
many for each part more; and the programs that share a tile, at most."""
STAGES, WARPS = 3, 8
"""All measured on an H200, with the shapes of an 8B model and 2,944 tokens."""


@triton.jit
def _add_term(sums, x, m, begin, end, row, column, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr):
    for at in range(begin, end, BLOCK):
        left = x.load([row, at])
        if TRANSPOSED:
            right = m.load([column, at]).T
        else:
            right = m.load([at, column])
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton.jit
def _add_steps(sums, x, m, begin, end, before, length, row, column, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr,
               WHOLE: tl.constexpr):  # fmt: skip
    """Those of a term that are among steps ``begin`` to ``end`` of the sum, of which ``before`` are other terms'."""
    if WHOLE:
        return _add_term(sums, x, m, 0, length, row, column, BLOCK, TRANSPOSED)
    first, last = tl.maximum(begin - before, 0), tl.minimum(end - before, tl.cdiv(length, BLOCK))
    return _add_term(sums, x, m, first * BLOCK, last * BLOCK, row, column, BLOCK, TRANSPOSED)


@triton.jit
def _add_terms(
    sums, begin, end, row, column, x0, m0, length0, x1, m1, length1, x2, m2, length2, x3, m3, length3,
    NUMBER: tl.constexpr, BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, BLOCK3: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Steps ``begin`` to ``end`` of a tile, or where that is WHOLE all of them."""
    sums = _add_steps(sums, x0, m0, begin, end, 0, length0, row, column, BLOCK0, T0, WHOLE)
    if NUMBER > 1:
        before = tl.cdiv(length0, BLOCK0)
        sums = _add_steps(sums, x1, m1, begin, end, before, length1, row, column, BLOCK1, T1, WHOLE)
    if NUMBER > 2:
        before = tl.cdiv(length0, BLOCK0) + tl.cdiv(length1, BLOCK1)
        sums = _add_steps(sums, x2, m2, begin, end, before, length2, row, column, BLOCK2, T2, WHOLE)
    if NUMBER > 3:
        before = tl.cdiv(length0, BLOCK0) + tl.cdiv(length1, BLOCK1) + tl.cdiv(length2, BLOCK2)
        sums = _add_steps(sums, x3, m3, begin, end, before, length3, row, column, BLOCK3, T3, WHOLE)
    return sums


@triton.jit
def _halves(sums, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Left and right: what is done with all at once takes the shared memory of a stage, or too many registers."""
    return tl.split(tl.permute(tl.reshape(sums, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def _store_half(sums, base, out, bias, row, column, columns, WIDTH: tl.constexpr, BASE: tl.constexpr,
                BIAS: tl.constexpr):  # fmt: skip
    if BIAS:
        places = column + tl.arange(0, WIDTH)
        sums += tl.load(bias + places, mask=places < columns, other=0.0).to(tl.float32)[None, :]
    if BASE:
        sums += base.load([row, column]).to(tl.float32)
    out.store([row, column], sums.to(out.dtype))


@triton.jit
def _store_rest(
    base, out, bias, program, tokens, down, columns, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr, BASE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Tiles of an output, below the first ``down``, that have no sums."""
    nothing = tl.zeros((BLOCK_T, WIDTH), dtype=tl.float32)
    halves = tl.cdiv(columns, WIDTH)
    for half in range(program, (tl.cdiv(tokens, BLOCK_T) - down) * halves, PROGRAMS):
        row, column = (down + half // halves) * BLOCK_T, half % halves * WIDTH
        _store_half(nothing, base, out, bias, row, column, columns, WIDTH, BASE, BIAS)


@triton.jit
def _place(tile, down, across, GROUP: tl.constexpr):
    """Which tile from the top and from the left is the one of this number, of ``down`` times ``across``."""
    first = tile // (GROUP * across) * GROUP
    together = tl.minimum(down - first, GROUP)
    return first + tile % (GROUP * across) % together, tile % (GROUP * across) // together


@triton.jit
def _team(
    left, steps, PROGRAMS: tl.constexpr, LEAST_SAVED: tl.constexpr, MORE_SAVED: tl.constexpr, MOST_MEMBERS: tl.constexpr
):  # fmt: skip
    """Tiles and programs of a team that shares sums of so many steps; no tiles, where each is a program's own.

    The fewest tiles with which a program more for each team leaves ``left`` tiles programs enough, which is none where
    five programs for four are too many; a team of one tile takes as many programs as are there and worth their part.
    """
    tiles = 0
    for few in tl.static_range(4, 0, -1):
        tiles = tl.where(tl.cdiv(left, few) * (few + 1) <= PROGRAMS, few, tiles)
    tiles = tl.where(steps // (tiles + 1) >= LEAST_SAVED, tiles, 0)
    members = tiles + 1
    for more in tl.static_range(3, MOST_MEMBERS + 1):
        worth = (tiles == 1) & (left * more <= PROGRAMS) & (steps >= tl.maximum(MORE_SAVED * (more - 1), 1) * more)
        members = tl.where(worth, more, members)
    return tiles, members


@triton.jit
def _places_of_half(program, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Where the left half of what a program has of a tile's sums lies among the parts."""
    rows, columns = tl.arange(0, HEIGHT), tl.arange(0, WIDTH // 2)
    return program * HEIGHT * WIDTH + rows[:, None] * WIDTH + columns[None, :]


@triton.jit
def _make_tile(
    first, last, steps, row, beside, program, earliest, parts, flags, base, bias, out, columns,
    x0, m0, length0, x1, m1, length1, x2, m2, length2, x3, m3, length3,
    NUMBER: tl.constexpr, BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, BLOCK3: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, BASE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Steps ``first`` to ``last`` of its sums. Who makes the last one takes what others have left, from program
    ``earliest`` on, and stores it."""
    HALF: tl.constexpr = BLOCK_N // 2
    column = beside * BLOCK_N
    sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    sums = _add_terms(
        sums, first, last, row, column, x0, m0, length0, x1, m1, length1, x2, m2, length2, x3, m3, length3,
        NUMBER, BLOCK0, BLOCK1, BLOCK2, BLOCK3, T0, T1, T2, T3, WHOLE,
    )  # fmt: skip
    low, high = _halves(sums, BLOCK_T, BLOCK_N)
    if WHOLE:
        _store_half(low, base, out, bias, row, column, columns, HALF, BASE, BIAS)
        _store_half(high, base, out, bias, row, column + HALF, columns, HALF, BASE, BIAS)
    else:
        if last < steps:
            places = parts + _places_of_half(program, BLOCK_T, BLOCK_N)
            tl.store(places, low)
            tl.store(places + HALF, high)
            tl.debug_barrier()
            tl.atomic_xchg(flags + program, 1, sem="release")
        else:
            for other in range(earliest, program):
                while tl.atomic_cas(flags + other, 1, 0, sem="acquire") == 0:
                    pass
                tl.debug_barrier()
                places = parts + _places_of_half(other, BLOCK_T, BLOCK_N)
                low += tl.load(places, cache_modifier=".cg")
                high += tl.load(places + HALF, cache_modifier=".cg")
            _store_half(low, base, out, bias, row, column, columns, HALF, BASE, BIAS)
            _store_half(high, base, out, bias, row, column + HALF, columns, HALF, BASE, BIAS)


@triton.jit
def _make_tile_of(
    first, last, steps, row, beside, across0, across1, program, earliest, parts, flags,
    base, bias0, bias1, bias2, out0, out1, out2, columns0, columns1, columns2,
    x0, m0, length0, x1, m1, length1, x2, m2, length2, x3, m3, length3, x4, m4, x5, m5,
    NUMBER: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr,
    BLOCK3: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, BASE: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """That of whichever output has column block ``beside``, where those of all lie beside each other."""
    if OUTPUTS == 1:
        _make_tile(
            first, last, steps, row, beside, program, earliest, parts, flags, base, bias0, out0, columns0,
            x0, m0, length0, x1, m1, length1, x2, m2, length2, x3, m3, length3,
            NUMBER, BLOCK0, BLOCK1, BLOCK2, BLOCK3, T0, T1, T2, T3, BASE, BIAS, BLOCK_T, BLOCK_N, WHOLE,
        )  # fmt: skip
    else:
        if beside < across0:
            _make_tile(
                first, last, steps, row, beside, program, earliest, parts, flags, base, bias0, out0, columns0,
                x0, m0, length0, x1, m1, length1, x1, m1, length1, x1, m1, length1,
                NUMBER, BLOCK0, BLOCK1, BLOCK1, BLOCK1, T0, T1, T1, T1, BASE, BIAS, BLOCK_T, BLOCK_N, WHOLE,
            )  # fmt: skip
        beside -= across0
        if (beside >= 0) & (beside < across1):
            _make_tile(
                first, last, steps, row, beside, program, earliest, parts, flags, base, bias1, out1, columns1,
                x2, m2, length0, x3, m3, length1, x3, m3, length1, x3, m3, length1,
                NUMBER, BLOCK0, BLOCK1, BLOCK1, BLOCK1, T0, T1, T1, T1, BASE, BIAS, BLOCK_T, BLOCK_N, WHOLE,
            )  # fmt: skip
        if OUTPUTS > 2:
            beside -= across1
            if beside >= 0:
                _make_tile(
                    first, last, steps, row, beside, program, earliest, parts, flags, base, bias2, out2, columns2,
                    x4, m4, length0, x5, m5, length1, x5, m5, length1, x5, m5, length1,
                    NUMBER, BLOCK0, BLOCK1, BLOCK1, BLOCK1, T0, T1, T1, T1, BASE, BIAS, BLOCK_T, BLOCK_N, WHOLE,
                )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _products_kernel(
    count, tokens, parts, flags, base, bias0, bias1, bias2, out0, out1, out2, columns0, columns1, columns2,
    x0, m0, length0, x1, m1, length1, x2, m2, length2, x3, m3, length3, x4, m4, x5, m5,
    NUMBER: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, BLOCK2: tl.constexpr,
    BLOCK3: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, BASE: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, LEAST_SAVED: tl.constexpr,
    MORE_SAVED: tl.constexpr, MOST_MEMBERS: tl.constexpr, PROGRAMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One output has up to four terms, x0 and m0 to x3 and m3. Each of several has one or two, of lengths 0 and 1: the
    first x0 and m0, x1 and m1, the second x2 and m2, x3 and m3, the third x4 and m4, x5 and m5."""
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    down = tl.cdiv(rows_that_count(count, tokens), BLOCK_T)
    across0, across1 = tl.cdiv(columns0, BLOCK_N), tl.cdiv(columns1, BLOCK_N)
    across = across0
    if OUTPUTS > 1:
        across += across1
    if OUTPUTS > 2:
        across += tl.cdiv(columns2, BLOCK_N)
    steps = tl.cdiv(length0, BLOCK0)
    if NUMBER > 1:
        steps += tl.cdiv(length1, BLOCK1)
    if NUMBER > 2:
        steps += tl.cdiv(length2, BLOCK2)
    if NUMBER > 3:
        steps += tl.cdiv(length3, BLOCK3)

    left = down * across % PROGRAMS
    team, members = _team(left, steps, PROGRAMS, LEAST_SAVED, MORE_SAVED, MOST_MEMBERS)
    left = tl.where(team > 0, left, 0)
    whole = down * across - left
    # flattened, the next tile is on its way while this one is stored; a compiler does so with a single loop inside
    for tile in tl.range(program, whole, PROGRAMS, flatten=NUMBER == 1 and OUTPUTS == 1):
        below, beside = _place(tile, down, across, GROUP)
        _make_tile_of(
            0, steps, steps, below * BLOCK_T, beside, across0, across1, program, program, parts, flags,
            base, bias0, bias1, bias2, out0, out1, out2, columns0, columns1, columns2,
            x0, m0, length0, x1, m1, length1, x2, m2, length2, x3, m3, length3, x4, m4, x5, m5, NUMBER, OUTPUTS,
            BLOCK0, BLOCK1, BLOCK2, BLOCK3, T0, T1, T2, T3, BASE, BIAS, BLOCK_T, BLOCK_N, True,
        )  # fmt: skip

    member, before_team = program % members, program // members * team
    shared = tl.minimum(team, left - before_team)
    if shared > 0:
        work = shared * steps
        begin, end = work * member // members, work * (member + 1) // members
        earlier, later = begin // steps, (end - 1) // steps
        # what somebody may wait for first; the programs that somebody waits for have lower numbers, and begin before
        for turn in range(0, later - earlier + 1):
            tile = later - turn
            first, last = tl.maximum(begin - tile * steps, 0), tl.minimum(end - tile * steps, steps)
            earliest = program - member + ((tile * steps + 1) * members - 1) // work
            below, beside = _place(whole + before_team + tile, down, across, GROUP)
            _make_tile_of(
                first, last, steps, below * BLOCK_T, beside, across0, across1, program, earliest, parts, flags,
                base, bias0, bias1, bias2, out0, out1, out2, columns0, columns1, columns2,
                x0, m0, length0, x1, m1, length1, x2, m2, length2, x3, m3, length3, x4, m4, x5, m5, NUMBER, OUTPUTS,
                BLOCK0, BLOCK1, BLOCK2, BLOCK3, T0, T1, T2, T3, BASE, BIAS, BLOCK_T, BLOCK_N, False,
            )  # fmt: skip

    HALF: tl.constexpr = BLOCK_N // 2
    _store_rest(base, out0, bias0, program, tokens, down, columns0, BLOCK_T, HALF, PROGRAMS, BASE, BIAS)
    if OUTPUTS > 1:
        _store_rest(base, out1, bias1, program, tokens, down, columns1, BLOCK_T, HALF, PROGRAMS, BASE, BIAS)
    if OUTPUTS > 2:
        _store_rest(base, out2, bias2, program, tokens, down, columns2, BLOCK_T, HALF, PROGRAMS, BASE, BIAS)


def _block(length: int) -> int:
    return BLOCK_K if length >= BLOCK_K else max(16, triton.next_power_of_2(length))


def sum_products(sums: Sequence[Sum], rows: Tensor, flags: Tensor, base: Tensor | None, outs: Sequence[Tensor]) -> None:
    """Each ``sum of x_i [T, K_i] @ m_i [K_i, N]``, with its bias, into its own of ``outs [T, N]``.

    Args:
        sums: one of up to :data:`TERMS` terms, or several for which :func:`go_together` holds; rows of each x, and rows
            or columns of each m, have stride 1.
        rows: int32 ``[1]``: how many rows count. Tiles behind them hold the base and the bias alone.
        flags: int32 zeros, one for each processor, which nobody else uses at the same time; zeros again at the end.
        base: ``[T, N]``, added to a single sum; may be the output itself.
    """
    assert len(sums) == 1 or base is None
    number = len(sums[0].terms)
    of_each = range(number if len(sums) == 1 else 2)
    pairs = filled([one.terms[min(i, number - 1)] for one in sums for i in of_each], 2 * MOST)
    arguments: list[object] = []
    blocks: dict[str, int | bool] = {}
    for place, (x, m) in enumerate(pairs):
        transposed, block = _is_transposed(m), _block(x.shape[1])
        tile = [BLOCK_N, block] if transposed else [block, BLOCK_N]
        arguments.append(TensorDescriptor.from_tensor(x, [BLOCK_T, block]))
        arguments.append(TensorDescriptor.from_tensor(m.t() if transposed else m, tile))
        if place < TERMS:
            arguments.append(x.shape[1])
            blocks |= {f"BLOCK{place}": block, f"T{place}": transposed}
    first, biases = outs[0], [one.bias for one in sums]
    tokens, columns = len(first), [out.shape[1] for out in outs]
    targets = [TensorDescriptor.from_tensor(out, [BLOCK_T, BLOCK_N // 2]) for out in outs]
    source = targets[0]
    if base is not None and base is not first:
        source = TensorDescriptor.from_tensor(base, [BLOCK_T, BLOCK_N // 2])
    programs = min(processors(first.device), MOST_MEMBERS * sum(tiles(tokens, width) for width in columns))
    parts = torch.empty(programs, BLOCK_T, BLOCK_N, dtype=torch.float32, device=first.device)
    with on_device(first):
        _products_kernel[(programs,)](
            rows, tokens, parts, flags, source,
            *filled([rows if bias is None else bias.contiguous() for bias in biases]), *filled(targets),
            *filled(columns), *arguments, NUMBER=number, OUTPUTS=len(outs), **blocks, BASE=base is not None,
            BIAS=biases[0] is not None, BLOCK_T=BLOCK_T, BLOCK_N=BLOCK_N, GROUP=GROUP, LEAST_SAVED=LEAST_SAVED,
            MORE_SAVED=MORE_SAVED, MOST_MEMBERS=MOST_MEMBERS, PROGRAMS=programs, num_stages=STAGES, num_warps=WARPS,
            **early(first),
        )  # fmt: skip


def go_together(sums: Sequence[Sum]) -> bool:
    """Whether one launch makes several sums: of one or two terms, which are as long and lie as those of the first, and
    all with a bias or none."""
    shapes = {tuple((x.shape, _is_transposed(m)) for x, m in one.terms) for one in sums}
    few = len(sums) <= MOST and len(sums[0].terms) <= 2
    return few and len(shapes) == 1 and len({one.bias is None for one in sums}) == 1


def _is_transposed(m: Tensor) -> bool:
    return m.stride(1) != 1


def is_aligned(x: Tensor) -> bool:
    """Whether a tensor descriptor can hold ``x [*, *]``: rows of stride 1, a multiple of 16 bytes apart."""
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def tiles(tokens: int, columns: int) -> int:
    """How many tiles an output of this shape has."""
    return triton.cdiv(tokens, BLOCK_T) * triton.cdiv(columns, BLOCK_N)
