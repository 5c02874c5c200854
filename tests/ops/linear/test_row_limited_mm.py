"""Sums of matmuls over the real rows: the kernel, by itself and for several outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from op_checks import DEVICES, KERNEL_DTYPES, assert_no_worse, relative
from torch import Tensor

from fastpack.cuda_graphs.recorder import no_synchronisation
from fastpack.ops import row_count
from fastpack.ops.linear.row_limited_mm import go_together, sum_of_matmuls, sums_of_matmuls
from fastpack.ops.row_count import MatmulSum, RowCount
from fastpack.ops.tile_schedule import schedule

kernels = pytest.importorskip("fastpack.ops.kernels.row_limited_mm")
pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_finite")
T, N = 330, 264
LENGTHS = (256, 72, 16, 40)
"""K of each term: whole steps, a step that sticks out, and two low ranks."""


def make_terms(count: int, dtype: torch.dtype, device: str, tokens: int = T) -> list[tuple[Tensor, Tensor]]:
    """Every other second factor is a transposed view; the last two first factors are slices of a wider tensor."""
    terms: list[tuple[Tensor, Tensor]] = []
    for i, length in enumerate(LENGTHS[:count]):
        x = torch.randn(tokens, length + 16, device=device).to(dtype)[:, 8 : 8 + length]
        shape = (length, N) if i % 2 else (N, length)
        m = torch.randn(*shape, device=device).to(dtype)
        terms.append((x, m if i % 2 else m.t()))
    return terms


def row_count_of(rows: int, device: str, tokens: int = T) -> RowCount:
    return RowCount(torch.tensor([rows], dtype=torch.int32, device=device), tokens)


def end_of_tiles(rows: int, above: int = 0) -> int:
    """Return the row after the last tile, if ``above`` rows of tiles are tall: nothing is multiplied from there on."""
    top = above * (kernels.BLOCK_T + kernels.BLOCK_BELOW)
    return top + max(0, -(-(rows - top) // kernels.BLOCK_T)) * kernels.BLOCK_T


def added(base: Tensor | None, bias: Tensor | None) -> Tensor | float:
    return (0.0 if base is None else base.double()) + (0.0 if bias is None else bias.double())


def force_schedule(programs: int, above: int, tiles: int, members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Force the number of programs, of tall rows of tiles, and the size of a team, whatever would be best.

    For few rows there are at most as many tall rows of tiles as :func:`schedule` tries; the last may stick out.
    """
    monkeypatch.setattr(kernels, "processors", lambda _: programs)
    most = lambda rows: -(-rows // kernels.BLOCK_BELOW) // 3  # noqa: E731
    monkeypatch.setattr(row_count, "schedule", lambda rows, *_: (min(above, most(rows)), tiles, members))


def schedule_read(count: RowCount, rows: int) -> list[int]:
    """Return the entry that the kernel reads for ``rows`` rows and the first kind of launch."""
    return count.schedules[1, -(-rows // kernels.BLOCK_BELOW)].tolist()


def table_of(*kind: int) -> list[list[int]]:
    """Return the whole table of a kind of launch, from :func:`schedule`."""
    return [list(schedule(min(kernels.BLOCK_BELOW * n, T), *kind)) for n in range(-(-T // kernels.BLOCK_BELOW) + 1)]


@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize(
    ("tokens", "rows", "above"),
    [
        (T, 1, 0),
        (T, 128, 0),
        (T, 200, 0),
        (T, 200, 1),
        (T, T, 0),
        (T, T, 1),
        (T, T, 2),  # the second tall tile extends beyond the rows
        (150, 150, 1),  # one tall tile, which extends beyond the rows
    ],
)
@pytest.mark.parametrize(("terms", "base", "bias"), [(1, None, False), (2, "own", True), (4, "in place", False)])
def test_kernel_is_the_definition(
    terms: int,
    base: str | None,
    bias: bool,
    tokens: int,
    rows: int,
    above: int,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("not served")
    force_schedule(2, above, 1, 1, monkeypatch)
    torch.manual_seed(0)
    pairs = make_terms(terms, dtype, device, tokens)
    total = None if base is None else torch.randn(tokens, N, device=device).to(dtype)
    vector = torch.randn(N, 2, device=device).to(dtype)[:, 0] if bias else None
    rest = added(total, vector)
    truth = sum((x.double() @ m.double() for x, m in pairs), start=rest)
    plain = sum((x @ m for x, m in pairs[1:]), start=pairs[0][0] @ pairs[0][1])
    for part in (total, vector):
        plain = plain if part is None else plain + part
    last = end_of_tiles(rows, above)
    for x, _ in pairs:
        x[last:] = float("nan")  # never read
    before = None if total is None else total.clone()
    count = row_count_of(rows, device, tokens)
    out = sum_of_matmuls(pairs, count, base=total, bias=vector, out=total if base == "in place" else None)
    assert count.launches == 1
    assert schedule_read(count, rows) == [above, 1, 1]
    assert_no_worse(out[:rows], plain[:rows], truth[:rows])
    behind = torch.zeros(tokens, N, dtype=torch.float64, device=device) + rest
    assert last >= tokens or relative(out[last:] + 1, behind[last:] + 1) <= torch.finfo(dtype).eps
    assert out is total if base == "in place" else total is None or torch.equal(total, before)
    lost = sum((x.double() @ m.double() for x, m in pairs[1:]), start=torch.zeros_like(behind) + rest)
    assert relative(lost[:rows], truth[:rows]) > 0.1, "the check can fail"


@pytest.mark.parametrize(
    ("programs", "rows", "above", "tiles", "members", "parts"),
    [
        (4, T, 0, 1, 2, 2),  # two of six tiles are left, each for two programs
        (4, 1, 0, 1, 2, 2),
        (5, T, 0, 1, 2, 1),
        (12, T, 0, 1, 2, 6),
        (132, T, 0, 1, 2, 6),
        (9, T, 0, 2, 3, 6),  # six tiles are left, for three teams of three programs
        (8, T, 0, 3, 4, 6),  # six tiles are left, for two teams of four programs
        (5, 200, 0, 4, 5, 4),  # four tiles are left, for one team of five programs
        (4, T, 0, 1, 1, 0),  # two programs make one more than the others
        (7, T, 0, 1, 1, 0),
        (2, T, 0, 1, 2, 0),  # nothing is left
        (12, 0, 0, 1, 2, 0),
        (7, 128, 0, 1, 3, 4),  # two tiles of six steps, each for three programs of seven
        (8, 128, 0, 1, 4, 6),
        (12, 128, 0, 1, 6, 10),  # twelve programs take one step each
        (40, 1, 0, 1, 6, 10),
        (4, 320, 1, 1, 1, 0),  # two tiles are tall, two low
        (3, 320, 1, 1, 3, 2),  # one of these four tiles is left
        (4, T, 1, 1, 2, 2),  # two of four tiles are left
        (5, T, 1, 1, 1, 0),
        (1, T, 1, 1, 1, 0),  # one program computes all six tiles
        (3, T, 1, 1, 1, 0),
        (4, T, 2, 1, 1, 0),  # all tiles are tall
        (2, T, 2, 1, 1, 0),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_last_round_is_shared(
    device: str,
    programs: int,
    rows: int,
    above: int,
    tiles: int,
    members: int,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each program that does not finish a tile leaves its part to the one that does."""
    force_schedule(programs, above, tiles, members, monkeypatch)
    torch.manual_seed(0)
    pairs = make_terms(2, torch.float16, device)
    total = torch.randn(T, N, device=device).to(torch.float16)
    truth = sum((x.double() @ m.double() for x, m in pairs), start=total.double())
    plain = pairs[0][0] @ pairs[0][1] + pairs[1][0] @ pairs[1][1] + total
    last = end_of_tiles(rows, above)
    behind = total[last:].clone()
    count = row_count_of(rows, device)
    buffers = watch_parts(monkeypatch)
    out = sum_of_matmuls(pairs, count, base=total, out=total)
    assert schedule_read(count, rows) == [above, tiles, members]
    assert buffers[0].isfinite().all(dim=(1, 2)).sum() == parts
    if rows:
        assert_no_worse(out[:last], plain[:last], truth[:last])
    assert torch.equal(out[last:], behind), "each once"
    assert not count.flags.any(), "zeros again"


def watch_parts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the buffers in which programs leave parts of tiles, filled with NaN beforehand."""
    buffers: list[Tensor] = []
    empty = torch.empty

    def fill_with_nan(*args: Any, **kwargs: Any) -> Tensor:
        buffers.append(empty(*args, **kwargs).fill_(float("nan")))
        return buffers[-1]

    monkeypatch.setattr(torch, "empty", fill_with_nan)
    return buffers


# --- several sums in one launch ---------------------------------------------------------------------------------------


def make_sums(widths: Sequence[int], terms: int, bias: bool, dtype: torch.dtype, device: str) -> list[MatmulSum]:
    """Return sums that share a first factor; with two terms, each has a low-rank term too."""
    x = torch.randn(T, 136, device=device).to(dtype)
    sums: list[MatmulSum] = []
    for width in widths:
        pairs = [(x, torch.randn(width, 136, device=device).to(dtype).t())]
        if terms == 2:
            low = torch.randn(T, 16, device=device).to(dtype)
            pairs.insert(0, (low, torch.randn(width, 16, device=device).to(dtype).t()))
        sums.append(MatmulSum(pairs, torch.randn(width, device=device).to(dtype) if bias else None))
    return sums


@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize(
    ("programs", "rows", "above", "team", "widths", "terms", "parts"),
    [
        (3, T, 0, (1, 1), (264, 40, 72), 2, 0),  # four rounds of the twelve tiles
        (8, T, 0, (1, 2), (264, 40, 72), 2, 4),  # the last four tiles, one or two of each output, for two programs each
        (9, 200, 0, (1, 1), (264, 40, 72), 2, 0),
        (12, 1, 0, (1, 3), (264, 40, 72), 2, 8),  # four tiles are left, each for three programs
        (3, T, 1, (1, 1), (264, 40, 72), 2, 0),  # four tall and eight low tiles
        (8, T, 1, (1, 2), (264, 40, 72), 2, 4),
        (4, T, 2, (1, 1), (264, 40, 72), 2, 0),  # eight tall tiles
        (5, T, 0, (1, 1), (40, 304), 1, 0),  # four of nine tiles are left for five programs
        (7, T, 0, (1, 3), (40, 304), 1, 4),  # two tiles are left, each for three programs
        (6, 1, 0, (1, 2), (40, 304), 1, 3),
        (5, 320, 1, (1, 3), (40, 304), 1, 2),  # three tall and three low tiles; one is left, for three programs
    ],
)
def test_several_outputs_are_several_sums(
    programs: int,
    rows: int,
    above: int,
    team: tuple[int, int],
    widths: Sequence[int],
    terms: int,
    parts: int,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each output is the same as in a launch of its own, whether programs share tiles or not."""
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("not served")
    force_schedule(programs, above, *team, monkeypatch)
    torch.manual_seed(0)
    sums, count = make_sums(widths, terms, terms == 2, dtype, device), row_count_of(rows, device)
    assert go_together(sums)
    buffers = watch_parts(monkeypatch)
    outs = sums_of_matmuls(sums, count)
    assert count.launches == 1
    assert schedule_read(count, rows) == [above, *team]
    assert buffers[0].isfinite().all(dim=(1, 2)).sum() == parts
    last = end_of_tiles(rows, above)
    for one, out in zip(sums, outs, strict=True):
        rest = added(None, one.bias)
        truth = sum((x.double() @ m.double() for x, m in one.terms), start=rest)
        plain = sum((x @ m for x, m in one.terms[1:]), start=one.terms[0][0] @ one.terms[0][1])
        plain = plain if one.bias is None else plain + one.bias
        assert_no_worse(out[:rows], plain[:rows], truth[:rows])
        behind = torch.zeros_like(truth) + rest
        assert torch.equal(out[last:], behind[last:].to(dtype))
        lost = one.terms[-1][0].double() @ one.terms[-1][1].double()
        assert terms == 1 or relative(lost[:rows], truth[:rows]) > 0.1, "the check can fail"
    assert relative(outs[0][:rows, :40], outs[1][:rows, :40]) > 0.1, "another output's columns would fail"
    assert not count.flags.any()


def test_which_sums_fit_in_one_launch() -> None:
    one, other, third = make_sums([64, 32, 32], 2, True, torch.float16, "cpu")
    assert go_together([one, other, third])
    assert not go_together([one, other, third, other]), "too many"
    assert not go_together([one, MatmulSum(other.terms)]), "a bias, and none"
    assert not go_together([one, MatmulSum(other.terms[1:], other.bias)]), "an update, and none"
    low, b = other.terms[0]
    assert not go_together([one, MatmulSum([(low[:, :8], b[:8]), other.terms[1]], other.bias)]), "ranks differ"
    assert not go_together(
        [one, MatmulSum([other.terms[0], (one.terms[1][0], other.terms[1][1].contiguous())], other.bias)]
    )


@pytest.mark.gpu
def test_a_recorded_launch_serves_other_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed CUDA graph reads from the device how many rows it may leave out."""
    force_schedule(132, 0, 1, 1, monkeypatch)
    torch.manual_seed(0)
    terms = make_terms(2, torch.bfloat16, "cuda")
    count = row_count_of(T, "cuda")
    sum_of_matmuls(terms, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sum_of_matmuls(terms, count)
    expected = sum((x.float() @ m.float() for x, m in terms[1:]), start=terms[0][0].float() @ terms[0][1].float())
    for rows in (40, 300, 130):
        count.rows.fill_(rows)
        out.fill_(float("nan"))
        graph.replay()
        last = end_of_tiles(rows)
        assert relative(out[:rows], expected[:rows]) < 1e-2
        assert not out[last:].any()


def test_kinds_of_launches_have_their_own_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the table is full, further kinds get neither tall tiles nor teams."""
    monkeypatch.setattr(row_count, "MOST_KINDS", 3)
    count = row_count_of(T, "cpu")
    first, second = table_of(16, 64, 8, False), table_of(16, 64, 8, True)
    assert first != second, "the check can fail"
    assert count.schedules_for(16, 64, 8, False).tolist() == first
    assert count.schedules_for(16, 64, 8, True).tolist() == second
    assert not count.schedules_for(16, 448, 8, False).any()
    assert len(count.kinds) == 2
    assert count.schedules_for(16, 64, 8, False).tolist() == first, "unchanged"


@pytest.mark.gpu
def test_a_recording_does_not_wait_for_schedules() -> None:
    """A kind's first launch computes them without waiting for the device, except in a recording, which gets zeros."""
    torch.manual_seed(0)
    terms = make_terms(1, torch.bfloat16, "cuda")
    expected = terms[0][0].float() @ terms[0][1].float()
    sum_of_matmuls(terms, row_count_of(T, "cuda"))  # compiled
    for warm in (True, False):
        count = row_count_of(T, "cuda")
        if warm:
            with no_synchronisation():
                sum_of_matmuls(terms, count)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sum_of_matmuls(terms, count)
        assert len(count.kinds) == warm
        nothing = [[0, 0, 0]] * len(count.schedules[1])
        assert count.schedules[1].tolist() == (table_of(*next(iter(count.kinds))) if warm else nothing)
        for rows in (1, 200, 256, T):
            count.rows.fill_(rows)
            graph.replay()
            assert relative(out[:rows], expected[:rows]) < 1e-2
