"""Triton kernel for sums of matmuls over the first rows, whose number is on the device.

The definition is in :mod:`fastpack.ops.linear.row_limited_mm`.

One program for each processor walks over tiles of the output, which have two heights. The terms of a tile are summed in
registers, and its base is read at the end. A tile after the last row that counts has no terms. Only the device knows
how many tiles there are. A program looks up in a table of :mod:`fastpack.ops.tile_schedule` how many of them are tall
and which programs share the last ones.

In the last round many programs would have no tile, so teams of programs share its tiles. A team has one program more
than it has tiles, or several programs for one tile. All its programs take the same number of steps (Osama et al.,
"Stream-K", arXiv:2301.03598, section 4, where all programs are one team). The programs of a team read the same operands
at the same time. Tensor descriptors (Hopper's TMA) load tiles into shared memory, and put zeros where a tile extends
beyond the tensor. The tiles of several outputs lie side by side, and are shared like the tiles of one output.

Shape suffixes: T rows, K inner dimension, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpack.ops.kernels.launch import (
    MAX_GROUP,
    early,
    filled,
    on_device,
    processors,
    rows_that_count,
    wait_for_inputs,
)
from fastpack.ops.row_count import TERMS, MatmulSum, RowCount
from fastpack.ops.tile_schedule import BLOCK_BELOW, BLOCK_T, MOST_MEMBERS

BLOCK_N, BLOCK_K = 256, 64
GROUP = 32
"""Vertically adjacent tiles computed at the same time: they read the same tiles of the second factors."""
STAGES, WARPS = 3, 8
"""All of these constants were measured on an H200, with the shapes of an 8B model and 2,944 tokens."""


@triton.jit
def _add_term(sums, more, x, lower_x, m, begin, end, row, column, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr,
              BELOW: tl.constexpr):  # fmt: skip
    """Add a term's product to ``sums``; unless BELOW is 0, add that of ``lower_x``'s rows from BELOW on to ``more``."""
    for at in range(begin, end, BLOCK):
        left = x.load([row, at])
        if TRANSPOSED:
            right = m.load([column, at]).T
        else:
            right = m.load([at, column])
        sums = tl.dot(left, right, sums, input_precision="ieee")
        if BELOW > 0:
            more = tl.dot(lower_x.load([row + BELOW, at]), right, more, input_precision="ieee")
    return sums, more


@triton.jit
def _add_terms(
    sums, more, begin, end, row, column, xs, lower_xs, ms, lengths, FIRST: tl.constexpr, NUMBER: tl.constexpr,
    BLOCKS: tl.constexpr, TRANSPOSED: tl.constexpr, BELOW: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add steps ``begin`` to ``end`` of a tile, or all steps if it is WHOLE. Its terms begin with number FIRST."""
    before = 0
    for i in tl.static_range(NUMBER):
        length = lengths[i]
        if WHOLE:
            start, stop = 0, length
        else:
            start = tl.maximum(begin - before, 0) * BLOCKS[i]
            stop = tl.minimum(end - before, tl.cdiv(length, BLOCKS[i])) * BLOCKS[i]
        sums, more = _add_term(
            sums, more, xs[FIRST + i], lower_xs[FIRST + i], ms[FIRST + i], start, stop, row, column, BLOCKS[i],
            TRANSPOSED[i], BELOW,
        )  # fmt: skip
        before += tl.cdiv(length, BLOCKS[i])
    return sums, more


@triton.jit
def _halves(sums, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the left and right halves: a whole tile would take a stage's shared memory, or too many registers."""
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
def _store_halves(sums, base, out, bias, row, column, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
                  BASE: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    low, high = _halves(sums, HEIGHT, WIDTH)
    _store_half(low, base, out, bias, row, column, columns, WIDTH // 2, BASE, BIAS)
    _store_half(high, base, out, bias, row, column + WIDTH // 2, columns, WIDTH // 2, BASE, BIAS)


@triton.jit
def _store_rest(
    base, out, bias, program, tokens, first, columns, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr, BASE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Store base and bias in the rows of an output from ``first`` on, which have no sums."""
    nothing = tl.zeros((BLOCK_T, WIDTH), dtype=tl.float32)
    across = tl.cdiv(columns, WIDTH)
    for tile in range(program, tl.cdiv(tl.maximum(tokens - first, 0), BLOCK_T) * across, PROGRAMS):
        row, column = first + tile // across * BLOCK_T, tile % across * WIDTH
        _store_half(nothing, base, out, bias, row, column, columns, WIDTH, BASE, BIAS)


@triton.jit
def _place(tile, down, across, GROUP: tl.constexpr):
    """Return the row and the column of tile number ``tile`` in a grid of ``down`` times ``across`` tiles."""
    first = tile // (GROUP * across) * GROUP
    together = tl.minimum(down - first, GROUP)
    return first + tile % (GROUP * across) % together, tile % (GROUP * across) // together


@triton.jit
def _places_of_half(program, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets of the left half of a program's sums among the parts."""
    rows, columns = tl.arange(0, HEIGHT), tl.arange(0, WIDTH // 2)
    return program * HEIGHT * WIDTH + rows[:, None] * WIDTH + columns[None, :]


@triton.jit
def _make_tile(
    first, last, steps, row, column, program, earliest, parts, flags, base, lower_base, bias, out, lower_out, columns,
    xs, lower_xs, ms, lengths, FIRST: tl.constexpr, NUMBER: tl.constexpr, BLOCKS: tl.constexpr,
    TRANSPOSED: tl.constexpr, BASE: tl.constexpr, BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_BELOW: tl.constexpr,
    BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute steps ``first`` to ``last`` of a tile.

    The program with the last step adds the parts of the other programs, from ``earliest`` on, and stores the tile.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    if BLOCK_BELOW > 0:
        more = tl.zeros((BLOCK_BELOW, BLOCK_N), dtype=tl.float32)
        sums, more = _add_terms(
            sums, more, first, last, row, column, xs, lower_xs, ms, lengths, FIRST, NUMBER, BLOCKS, TRANSPOSED,
            BLOCK_T, WHOLE,
        )  # fmt: skip
        below = row + BLOCK_T
        _store_halves(more, lower_base, lower_out, bias, below, column, columns, BLOCK_BELOW, BLOCK_N, BASE, BIAS)
    else:
        sums, _ = _add_terms(
            sums, sums, first, last, row, column, xs, xs, ms, lengths, FIRST, NUMBER, BLOCKS, TRANSPOSED, 0, WHOLE
        )
    if WHOLE:
        _store_halves(sums, base, out, bias, row, column, columns, BLOCK_T, BLOCK_N, BASE, BIAS)
    else:
        low, high = _halves(sums, BLOCK_T, BLOCK_N)
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
    first, last, steps, row, beside, program, earliest, parts, flags, base, lower_base, biases, outs, lower_outs,
    columns, xs, lower_xs, ms, lengths, NUMBER: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr,
    TRANSPOSED: tl.constexpr, BASE: tl.constexpr, BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_BELOW: tl.constexpr,
    BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the output that has column block ``beside``: the blocks of all outputs lie side by side."""
    if OUTPUTS == 1:
        _make_tile(
            first, last, steps, row, beside * BLOCK_N, program, earliest, parts, flags, base, lower_base, biases[0],
            outs[0], lower_outs[0], columns[0], xs, lower_xs, ms, lengths, 0, NUMBER, BLOCKS, TRANSPOSED, BASE, BIAS,
            BLOCK_T, BLOCK_BELOW, BLOCK_N, WHOLE,
        )  # fmt: skip
    else:
        for i in tl.static_range(OUTPUTS):
            across = tl.cdiv(columns[i], BLOCK_N)
            if (beside >= 0) & (beside < across):
                _make_tile(
                    first, last, steps, row, beside * BLOCK_N, program, earliest, parts, flags, base, lower_base,
                    biases[i], outs[i], lower_outs[i], columns[i], xs, lower_xs, ms, lengths, 2 * i, NUMBER, BLOCKS,
                    TRANSPOSED, BASE, BIAS, BLOCK_T, BLOCK_BELOW, BLOCK_N, WHOLE,
                )  # fmt: skip
            beside -= across


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["schedule"])
def _matmul_kernel(
    count, tokens, schedule, parts, flags, base, lower_base, bias0, bias1, bias2, out0, out1, out2,
    lower_out0, lower_out1, lower_out2, columns0, columns1, columns2, length0, length1, length2, length3,
    x0, x1, x2, x3, x4, x5, lower_x0, lower_x1, lower_x2, lower_x3, lower_x4, lower_x5, m0, m1, m2, m3, m4, m5,
    NUMBER: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, TRANSPOSED: tl.constexpr, BASE: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_BELOW: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one output of up to four terms, or up to three outputs of one or two terms.

    The terms of one output are x0 and m0 to x3 and m3. Each of several outputs has terms of ``length0`` and
    ``length1``: the first has x0 and m0, x1 and m1; the second x2 and m2, x3 and m3; the third x4 and m4, x5 and m5.
    """
    wait_for_inputs(EARLY)
    biases, outs, columns = (bias0, bias1, bias2), (out0, out1, out2), (columns0, columns1, columns2)
    lower_outs, lengths = (lower_out0, lower_out1, lower_out2), (length0, length1, length2, length3)
    xs, ms = (x0, x1, x2, x3, x4, x5), (m0, m1, m2, m3, m4, m5)
    lower_xs = (lower_x0, lower_x1, lower_x2, lower_x3, lower_x4, lower_x5)

    program = tl.program_id(0)
    rows = rows_that_count(count, tokens)
    schedule += tl.cdiv(rows, BLOCK_BELOW) * 3
    above, team, members = tl.load(schedule), tl.maximum(tl.load(schedule + 1), 1), tl.maximum(tl.load(schedule + 2), 1)
    across, steps = 0, 0
    for i in tl.static_range(OUTPUTS):
        across += tl.cdiv(columns[i], BLOCK_N)
    for i in tl.static_range(NUMBER):
        steps += tl.cdiv(lengths[i], BLOCKS[i])
    top = above * (BLOCK_T + BLOCK_BELOW)
    down = tl.cdiv(tl.maximum(rows - top, 0), BLOCK_T)
    tall = above * across
    left = (tall + down * across) % PROGRAMS
    whole = tall + down * across - left

    # a flattened loop loads the next tile while it stores this one; the compiler can flatten only around a single loop
    FLATTEN: tl.constexpr = NUMBER == 1 and OUTPUTS == 1
    start = PROGRAMS - 1 - program  # programs with one more tall tile are the last to share the rest
    for tile in range(start, tall, PROGRAMS):
        below, beside = _place(tile, above, across, GROUP)
        _make_tile_of(
            0, steps, steps, below * (BLOCK_T + BLOCK_BELOW), beside, program, program, parts, flags, base, lower_base,
            biases, outs, lower_outs, columns, xs, lower_xs, ms, lengths, NUMBER, OUTPUTS, BLOCKS, TRANSPOSED, BASE,
            BIAS, BLOCK_T, BLOCK_BELOW, BLOCK_N, True,
        )  # fmt: skip
    start += tl.cdiv(tl.maximum(tall - start, 0), PROGRAMS) * PROGRAMS
    for tile in tl.range(start, whole, PROGRAMS, flatten=FLATTEN):
        below, beside = _place(tile - tall, down, across, GROUP)
        _make_tile_of(
            0, steps, steps, top + below * BLOCK_T, beside, program, program, parts, flags, base, lower_base, biases,
            outs, lower_outs, columns, xs, lower_xs, ms, lengths, NUMBER, OUTPUTS, BLOCKS, TRANSPOSED, BASE, BIAS,
            BLOCK_T, 0, BLOCK_N, True,
        )  # fmt: skip

    member, before_team = program % members, program // members * team
    shared = tl.minimum(team, left - before_team)
    if shared > 0:
        work = shared * steps
        begin, end = work * member // members, work * (member + 1) // members
        earlier, later = begin // steps, (end - 1) // steps
        # the part that others wait for comes first; programs that are waited for have lower numbers, and start earlier
        for at in range(0, later - earlier + 1):
            tile = later - at
            first, last = tl.maximum(begin - tile * steps, 0), tl.minimum(end - tile * steps, steps)
            earliest = program - member + ((tile * steps + 1) * members - 1) // work
            below, beside = _place(whole - tall + before_team + tile, down, across, GROUP)
            _make_tile_of(
                first, last, steps, top + below * BLOCK_T, beside, program, earliest, parts, flags, base, lower_base,
                biases, outs, lower_outs, columns, xs, lower_xs, ms, lengths, NUMBER, OUTPUTS, BLOCKS, TRANSPOSED,
                BASE, BIAS, BLOCK_T, 0, BLOCK_N, False,
            )  # fmt: skip

    for i in tl.static_range(OUTPUTS):
        _store_rest(base, outs[i], biases[i], program, tokens, top + down * BLOCK_T, columns[i], BLOCK_T, BLOCK_N // 2,
                    PROGRAMS, BASE, BIAS)  # fmt: skip


def _block(length: int) -> int:
    return BLOCK_K if length >= BLOCK_K else max(16, triton.next_power_of_2(length))


def sum_matmuls(sums: Sequence[MatmulSum], count: RowCount, base: Tensor | None, outs: Sequence[Tensor]) -> None:
    """Write each ``sum of x_i [T, K_i] @ m_i [K_i, N]``, with its bias, into its output.

    Args:
        sums: one of up to :data:`TERMS` terms, or several for which :func:`go_together` holds; rows of each x, and rows
            or columns of each m, have stride 1.
        count: the number of rows. Tiles after these rows hold only the base and the bias.
        base: ``[T, N]``, added to a single sum; may be the output itself.
        outs: ``[T, N]`` for each sum.
    """
    assert len(sums) == 1 or base is None
    assert len(outs[0]) <= count.tokens, "there are more rows than the tile schedule covers"
    number = len(sums[0].terms)
    of_each = range(number if len(sums) == 1 else 2)
    pairs = filled([one.terms[min(i, number - 1)] for one in sums for i in of_each], 2 * MAX_GROUP)
    lengths = [x.shape[1] for x, _ in pairs[:TERMS]]
    blocks, transposed = tuple(map(_block, lengths)), tuple(_is_transposed(m) for _, m in pairs[:TERMS])
    xs: list[list[TensorDescriptor]] = [[], []]
    ms: list[TensorDescriptor] = []
    for x, m in pairs:
        transposes, block = _is_transposed(m), _block(x.shape[1])
        for descriptors, height in zip(xs, (BLOCK_T, BLOCK_BELOW), strict=True):
            descriptors.append(TensorDescriptor.from_tensor(x, [height, block]))
        tile = [BLOCK_N, block] if transposes else [block, BLOCK_N]
        ms.append(TensorDescriptor.from_tensor(m.t() if transposes else m, tile))
    first, biases = outs[0], [one.bias for one in sums]
    tokens, columns = len(first), [out.shape[1] for out in outs]
    stored = [[BLOCK_T, BLOCK_N // 2], [BLOCK_BELOW, BLOCK_N // 2]]
    bases = [TensorDescriptor.from_tensor(first if base is None else base, tile) for tile in stored]
    targets = [TensorDescriptor.from_tensor(out, tile) for tile in stored for out in filled(outs)]
    programs = min(processors(first.device), MOST_MEMBERS * sum(tiles(tokens, width) for width in columns))
    parts = torch.empty(programs, BLOCK_T, BLOCK_N, dtype=torch.float32, device=first.device)
    across = sum(triton.cdiv(width, BLOCK_N) for width in columns)
    steps = sum(triton.cdiv(length, block) for length, block in zip(lengths[:number], blocks, strict=False))
    schedule = count.schedules_for(across, steps, programs, number == 1 and len(outs) == 1)
    with on_device(first):
        _matmul_kernel[(programs,)](
            count.rows, tokens, schedule, parts, count.flags, *bases,
            *filled([count.rows if bias is None else bias.contiguous() for bias in biases]), *targets,
            *filled(columns), *lengths, *xs[0], *xs[1], *ms, NUMBER=number, OUTPUTS=len(outs), BLOCKS=blocks,
            TRANSPOSED=transposed, BASE=base is not None, BIAS=biases[0] is not None, BLOCK_T=BLOCK_T,
            BLOCK_BELOW=BLOCK_BELOW, BLOCK_N=BLOCK_N, GROUP=GROUP, PROGRAMS=programs, num_stages=STAGES,
            num_warps=WARPS, **early(first),
        )  # fmt: skip


def go_together(sums: Sequence[MatmulSum]) -> bool:
    """Return whether one launch can compute several sums.

    Each sum needs one or two terms, with the same shapes and strides as the first sum's. Either all sums have a bias,
    or none.
    """
    shapes = {tuple((x.shape, _is_transposed(m)) for x, m in one.terms) for one in sums}
    few = len(sums) <= MAX_GROUP and len(sums[0].terms) <= 2
    return few and len(shapes) == 1 and len({one.bias is None for one in sums}) == 1


def _is_transposed(m: Tensor) -> bool:
    return m.stride(1) != 1


def is_aligned(x: Tensor) -> bool:
    """Return whether a tensor descriptor can hold ``x [*, *]``: rows of stride 1, a multiple of 16 bytes apart."""
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def tiles(tokens: int, columns: int) -> int:
    """Return how many tiles an output of this shape has."""
    return triton.cdiv(tokens, BLOCK_T) * triton.cdiv(columns, BLOCK_N)
