"""Sums of products over the rows that count: the kernel, who is served, and the groups of projections that use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from common import DEVICES, KERNEL_DTYPES, assert_no_worse, relative
from torch import Tensor

from fastpack.graphs.recorder import no_synchronisation
from fastpack.ops import products, projections
from fastpack.ops.gated_mlp import gated_mlp
from fastpack.ops.plans import plan
from fastpack.ops.products import RowCount, Sum, go_together, serves, sum_of_products, sums_of_products
from fastpack.ops.projection_parts import Lora, Norm, Projection
from fastpack.ops.projections import project

kernels = pytest.importorskip("fastpack.ops.kernels.products")
pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_finite")
T, N = 330, 264
LENGTHS = (256, 72, 16, 40)
"""Of the sums: whole steps, one that sticks out, and two thin ones."""


def make_terms(count: int, dtype: torch.dtype, device: str) -> list[tuple[Tensor, Tensor]]:
    """Every other second factor is a transposed view; the last two first factors are slices of a wider tensor."""
    made: list[tuple[Tensor, Tensor]] = []
    for i, length in enumerate(LENGTHS[:count]):
        x = torch.randn(T, length + 16, device=device).to(dtype)[:, 8 : 8 + length]
        shape = (length, N) if i % 2 else (N, length)
        m = torch.randn(*shape, device=device).to(dtype)
        made.append((x, m if i % 2 else m.t()))
    return made


def counted(rows: int, device: str) -> RowCount:
    return RowCount(torch.tensor([rows], dtype=torch.int32, device=device), T)


def end_of_tiles(rows: int, above: int = 0) -> int:
    """Behind it nothing is multiplied, where so many rows of tiles are tall."""
    top = above * (kernels.BLOCK_T + kernels.LOWER)
    return top + max(0, -(-(rows - top) // kernels.BLOCK_T)) * kernels.BLOCK_T


def added(base: Tensor | None, bias: Tensor | None) -> Tensor | float:
    return (0.0 if base is None else base.double()) + (0.0 if bias is None else bias.double())


def take_plan(programs: int, above: int, tiles: int, members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many programs, rows of tall tiles, and tiles and programs of a team, whatever would be best."""
    monkeypatch.setattr(kernels, "processors", lambda _: programs)
    monkeypatch.setattr(products, "plan", lambda rows, *_: (min(above, rows // kernels.LOWER // 3), tiles, members))


@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize(("rows", "above"), [(1, 0), (128, 0), (200, 0), (200, 1), (T, 0), (T, 1), (T, 2)])
@pytest.mark.parametrize(("terms", "base", "bias"), [(1, None, False), (2, "own", True), (4, "in place", False)])
def test_kernel_is_the_definition(
    terms: int,
    base: str | None,
    bias: bool,
    rows: int,
    above: int,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("not served")
    if above:
        take_plan(2, above, 1, 1, monkeypatch)
    torch.manual_seed(0)
    given = make_terms(terms, dtype, device)
    total = None if base is None else torch.randn(T, N, device=device).to(dtype)
    vector = torch.randn(N, 2, device=device).to(dtype)[:, 0] if bias else None
    rest = added(total, vector)
    truth = sum((x.double() @ m.double() for x, m in given), start=rest)
    plain = sum((x @ m for x, m in given[1:]), start=given[0][0] @ given[0][1])
    for part in (total, vector):
        plain = plain if part is None else plain + part
    last = end_of_tiles(rows, above)
    for x, _ in given:
        x[last:] = float("nan")  # nobody looks
    before = None if total is None else total.clone()
    count = counted(rows, device)
    out = sum_of_products(given, count, base=total, bias=vector, out=total if base == "in place" else None)
    assert count.products == 1
    assert_no_worse(out[:rows], plain[:rows], truth[:rows])
    behind = torch.zeros(T, N, dtype=torch.float64, device=device) + rest
    assert relative(out[last:] + 1, behind[last:] + 1) <= torch.finfo(dtype).eps if last < T else True
    assert out is total if base == "in place" else total is None or torch.equal(total, before)
    lost = sum((x.double() @ m.double() for x, m in given[1:]), start=torch.zeros_like(behind) + rest)
    assert relative(lost[:rows], truth[:rows]) > 0.1, "the check can fail"


@pytest.mark.parametrize(
    ("programs", "rows", "above", "tiles", "members", "parts"),
    [
        (4, T, 0, 1, 2, 2),  # two of six tiles are left, each for two programs
        (4, 1, 0, 1, 2, 2),
        (5, T, 0, 1, 2, 1),
        (12, T, 0, 1, 2, 6),
        (9, T, 0, 2, 3, 6),  # six for three teams of three
        (8, T, 0, 3, 4, 6),  # six for two of four
        (5, 200, 0, 4, 5, 4),  # four for one of five
        (4, T, 0, 1, 1, 0),  # two programs make one more than the others
        (7, T, 0, 1, 1, 0),
        (2, T, 0, 1, 2, 0),  # nothing is left
        (12, 0, 0, 1, 2, 0),
        (7, 128, 0, 1, 3, 4),  # two tiles of six steps, each for three programs of seven
        (8, 128, 0, 1, 4, 6),
        (12, 128, 0, 1, 6, 10),  # a step each
        (4, 320, 1, 1, 1, 0),  # two are tall, two low
        (3, 320, 1, 1, 3, 2),  # of which one is left
        (4, T, 1, 1, 2, 2),  # two of four
        (5, T, 1, 1, 1, 0),
        (1, T, 1, 1, 1, 0),  # one program makes all six
        (3, T, 1, 1, 1, 0),
        (4, T, 2, 1, 1, 0),  # all are tall
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
    """By programs of which each that does not end a tile leaves its part of it to another."""
    take_plan(programs, above, tiles, members, monkeypatch)
    torch.manual_seed(0)
    given = make_terms(2, torch.float16, device)
    total = torch.randn(T, N, device=device).to(torch.float16)
    truth = sum((x.double() @ m.double() for x, m in given), start=total.double())
    plain = given[0][0] @ given[0][1] + given[1][0] @ given[1][1] + total
    last = end_of_tiles(rows, above)
    behind = total[last:].clone()
    count = counted(rows, device)
    made = watch_parts(monkeypatch)
    out = sum_of_products(given, count, base=total, out=total)
    assert made[0].isfinite().all(dim=(1, 2)).sum() == parts
    if rows:
        assert_no_worse(out[:last], plain[:last], truth[:last])
    assert torch.equal(out[last:], behind), "once each"
    assert not count.flags.any(), "as they were found"


def watch_parts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Where programs leave what others take: numbers where one has, NaN elsewhere."""
    made: list[Tensor] = []
    empty = torch.empty

    def kept(*args: Any, **kwargs: Any) -> Tensor:
        made.append(empty(*args, **kwargs).fill_(float("nan")))
        return made[-1]

    monkeypatch.setattr(torch, "empty", kept)
    return made


# --- several sums in one launch ---------------------------------------------------------------------------------------


def make_sums(widths: Sequence[int], terms: int, bias: bool, dtype: torch.dtype, device: str) -> list[Sum]:
    """Of one first factor, and a thin one for each where there are two terms."""
    x = torch.randn(T, 136, device=device).to(dtype)
    made: list[Sum] = []
    for width in widths:
        pairs = [(x, torch.randn(width, 136, device=device).to(dtype).t())]
        if terms == 2:
            thin = torch.randn(T, 16, device=device).to(dtype)
            pairs.insert(0, (thin, torch.randn(width, 16, device=device).to(dtype).t()))
        made.append(Sum(pairs, torch.randn(width, device=device).to(dtype) if bias else None))
    return made


@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize(
    ("programs", "rows", "above", "team", "widths", "terms", "parts"),
    [
        (3, T, 0, (1, 1), (264, 40, 72), 2, 0),  # four rounds of the twelve tiles
        (8, T, 0, (1, 2), (264, 40, 72), 2, 4),  # the last four, one or two of each output, for two programs each
        (9, 200, 0, (1, 1), (264, 40, 72), 2, 0),
        (12, 1, 0, (1, 3), (264, 40, 72), 2, 8),  # four for three each
        (3, T, 1, (1, 1), (264, 40, 72), 2, 0),  # four tall and eight low
        (8, T, 1, (1, 2), (264, 40, 72), 2, 4),
        (4, T, 2, (1, 1), (264, 40, 72), 2, 0),  # eight tall
        (5, T, 0, (1, 1), (40, 304), 1, 0),  # four of nine tiles are left for five programs
        (7, T, 0, (1, 3), (40, 304), 1, 4),  # two for three each
        (6, 1, 0, (1, 2), (40, 304), 1, 3),
        (5, 320, 1, (1, 3), (40, 304), 1, 2),  # one of three tall and three low for three
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
    """Shared by programs or not, each output is the same as by itself."""
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("not served")
    take_plan(programs, above, *team, monkeypatch)
    torch.manual_seed(0)
    sums, count = make_sums(widths, terms, terms == 2, dtype, device), counted(rows, device)
    assert go_together(sums)
    made = watch_parts(monkeypatch)
    outs = sums_of_products(sums, count)
    assert count.products == 1
    assert made[0].isfinite().all(dim=(1, 2)).sum() == parts
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
    assert relative(outs[0][:rows, :40], outs[1][:rows, :40]) > 0.1, "so would another's columns"
    assert not count.flags.any()


def test_which_sums_go_together() -> None:
    one, other, third = make_sums([64, 32, 32], 2, True, torch.float16, "cpu")
    assert go_together([one, other, third])
    assert not go_together([one, other, third, other]), "too many"
    assert not go_together([one, Sum(other.terms)]), "a bias, and none"
    assert not go_together([one, Sum(other.terms[1:], other.bias)]), "an update, and none"
    thin, wide = other.terms[0]
    assert not go_together([one, Sum([(thin[:, :8], wide[:8]), other.terms[1]], other.bias)]), "ranks differ"
    assert not go_together([one, Sum([other.terms[0], (one.terms[1][0], other.terms[1][1].contiguous())], other.bias)])


@pytest.mark.gpu
def test_a_recorded_launch_serves_other_counts() -> None:
    """In a CUDA graph: what it leaves out is read from the device each time."""
    torch.manual_seed(0)
    terms = make_terms(2, torch.bfloat16, "cuda")
    count = counted(T, "cuda")
    sum_of_products(terms, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sum_of_products(terms, count)
    want = sum((x.float() @ m.float() for x, m in terms[1:]), start=terms[0][0].float() @ terms[0][1].float())
    for rows in (40, 300, 130):
        count.rows.fill_(rows)
        out.fill_(float("nan"))
        graph.replay()
        last = -(-rows // kernels.BLOCK_T) * kernels.BLOCK_T
        assert relative(out[:rows], want[:rows]) < 1e-2
        assert not out[last:].any()


def test_kinds_of_launches_have_plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for; those behind that make neither tall tiles nor teams."""
    monkeypatch.setattr(products, "MOST_KINDS", 3)
    count = counted(T, "cpu")
    assert count.plans_for(16, 64, 8, False).tolist() == [
        list(plan(min(64 * n, T), 16, 64, 8, False)) for n in range(7)
    ]
    assert count.plans_for(16, 64, 8, True).tolist() != count.plans_for(16, 448, 8, False).tolist()
    assert not count.plans_for(16, 448, 8, False).any()
    assert len(count.kinds) == 2
    assert count.plans_for(16, 64, 8, False).any(), "the first one's are as they were"


@pytest.mark.gpu
def test_a_later_recording_does_not_wait_for_plans() -> None:
    """Of a kind that is first met where nobody may wait they are made all the same; met in a recording, it has none."""
    torch.manual_seed(0)
    terms = make_terms(1, torch.bfloat16, "cuda")
    want = terms[0][0].float() @ terms[0][1].float()
    sum_of_products(terms, counted(T, "cuda"))  # compiled
    for warm in (True, False):
        count = counted(T, "cuda")
        if warm:
            with no_synchronisation():
                sum_of_products(terms, count)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sum_of_products(terms, count)
        assert len(count.kinds) == warm
        for rows in (1, 200, 256, T):
            count.rows.fill_(rows)
            graph.replay()
            assert relative(out[:rows], want[:rows]) < 1e-2


# --- who is served ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_who_is_served(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, m = torch.randn(256, 64, device=device).to(dtype), torch.randn(512, 64, device=device).to(dtype)
    count = counted(100, device)
    monkeypatch.setattr(products, "NARROWEST", 64)
    monkeypatch.setattr(products, "FEWEST_TILES", 0)
    hopper = device == "cpu" or torch.cuda.get_device_capability()[0] == 9

    def asked(
        operands: Sequence[Tensor | None],
        *,
        of: Any = count,
        x: Tensor = x,
        how: Any = "triton",
        columns: Sequence[int] = (512,),
    ) -> bool:
        return serves(how, of, x, columns, operands)

    assert asked([m, None]) == hopper
    assert asked([m], columns=[256, 128, 128]) == hopper
    assert not asked([m], columns=[256, 510 if device == "cuda" else 511]), "nor the rows of one of several"
    assert not asked([m], of=None), "all rows count"
    assert not asked([m[:510]], columns=[510 if device == "cuda" else 511]), "rows of the result are not aligned"
    assert not asked([m], how="torch")
    assert not asked([m.double()]), "dtypes differ"
    assert not asked([m.double()], x=x.double())
    assert not asked([torch.empty(512, 67, dtype=dtype, device=device)[:, :65]]), "rows are not aligned"
    assert not asked([m.t()]), "columns are not rows"
    assert not asked([m.view(-1)[1:-63].view(-1, 64)]), "it does not begin where a descriptor can"
    if device == "cuda":
        assert not asked([m.float()], x=x.float())
        monkeypatch.setattr(products, "FEWEST_TILES", 2)
        assert not asked([m]), "four tiles leave most of the device idle"
        monkeypatch.setattr(products, "FEWEST_TILES", 0)
        monkeypatch.setattr(products, "NARROWEST", 65)
        assert not asked([m]), "a library has the better tiles for it"
        monkeypatch.setattr(products, "NARROWEST", 384)
        wide = torch.randn(256, 512, device=device).to(dtype)
        assert not asked([m], x=wide, columns=[256])
        assert asked([m], x=wide, columns=[256, 128]) == hopper, "beside another it is wide enough"


# --- groups -----------------------------------------------------------------------------------------------------------


def projection(out: int, size: int, *, rank: int, bias: bool = False, device: str = "cpu") -> Projection:
    def leaf(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) / shape[-1] ** 0.5).requires_grad_()

    update = Lora(leaf(rank, size), leaf(out, rank), 1.5) if rank else None
    return Projection(leaf(out, size).detach(), torch.float32, leaf(out) if bias else None, update)


def trained(*made: Projection) -> list[Tensor]:
    found = [t for p in made for t in (p.bias, *((p.lora.a, p.lora.b) if p.lora else ())) if t is not None]
    return [t for t in found if t.requires_grad]


def outcome(outs: Sequence[Tensor], wanted: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Outputs and gradients, where only the first rows have any."""
    cotangents = [torch.randn(o.shape, generator=torch.Generator().manual_seed(i)) for i, o in enumerate(outs)]
    for cotangent in cotangents:
        cotangent[rows:] = 0
    return [*(o[:rows] for o in outs), *torch.autograd.grad(outs, wanted, cotangents)]


def refuse_narrow(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """As on a GPU: sums with fewer columns than this are not served."""

    def wide(how: Any, count: RowCount | None, x: Tensor, columns: Sequence[int], operands: Any) -> bool:
        return sum(columns) >= least and serves(how, count, x, columns, operands)

    monkeypatch.setattr(projections, "serves", wide)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
@pytest.mark.parametrize(("rank", "bias"), [(8, False), (8, True), (0, True)])
@pytest.mark.parametrize("which", ["group", "together", "residual", "mlp"])
def test_groups_leave_rows_out(which: str, rank: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients are those of a batch without the other rows; and these stay finite."""
    if which == "together":
        refuse_narrow(monkeypatch, 64)
    torch.manual_seed(0)
    size, inner, rows = 64, 96, 130
    x = torch.randn(T, size)
    x[rows:] = 0
    x.requires_grad_()
    norm = Norm(torch.ones(size, requires_grad=True), 1e-6)
    three = [projection(out, size, rank=rank, bias=bias) for out in (64, 32, 32)]
    two, down = [projection(inner, size, rank=rank) for _ in range(2)], projection(size, inner, rank=rank, bias=bias)

    def run(x: Tensor, count: RowCount | None, implementation: Any) -> tuple[Sequence[Tensor], list[Tensor]]:
        options: dict[str, Any] = {"row_count": count, "implementation": implementation}
        if which in ("group", "together"):
            outs, passed = project(x, three, norm=norm, **options)
            return (*outs, passed), [norm.weight, *trained(*three)]
        if which == "residual":
            outs, _ = project(x, three[:1], residual=x, **options)
            return outs, trained(three[0])
        return [gated_mlp(x, two, down, "silu", norm=norm, residual=True, **options)], [
            norm.weight,
            *trained(*two, down),
        ]

    short = x.detach()[:rows].requires_grad_()
    outs, wanted = run(short, None, "torch")
    truth = outcome(outs, [short, *wanted], rows)
    count = counted(rows, "cpu")
    outs, wanted = run(x, count, "triton")
    assert all(out.isfinite().all() for out in outs)
    found = outcome(outs, [x, *wanted], rows)
    assert count.products == {"group": 3 + 1, "together": 1 + 1, "residual": 1 + 1, "mlp": 3 + 2}[which]
    at = len(outs)  # of the input's gradient
    assert not found[at][rows:].any()
    found[at] = found[at][:rows]
    for ours, right in zip(found, truth, strict=True):
        assert relative(ours, right) < 1e-5
    count.rows.fill_(kernels.BLOCK_T)  # two rows too few
    assert relative(outcome(run(x, count, "triton")[0], [x], rows)[0], truth[0]) > 0.1, "the check can fail"


@pytest.mark.gpu
def test_narrow_ones_go_with_a_wide_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, as it is asked there: q is wide enough, k and v only beside it."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("ITS DESCRIPTORS ARE HOPPER'S")
    monkeypatch.setattr(products, "NARROWEST", 512)
    monkeypatch.setattr(products, "FEWEST_TILES", 0)
    torch.manual_seed(0)
    rows = 200
    x = torch.randn(T, 512, device="cuda").bfloat16()
    x[rows:] = 0
    three = [projection(out, 512, rank=16, bias=True, device="cuda") for out in (512, 128, 128)]
    three = [replace(p, weight=p.weight.bfloat16(), dtype=torch.bfloat16) for p in three]
    for given in (three, three[1:]):
        count = counted(rows, "cuda")
        outs, _ = project(x, given, row_count=count)
        assert count.products == (1 if given is three else 0)
        plain, _ = project(x, given, implementation="torch")
        for out, other in zip(outs, plain, strict=True):
            assert relative(out[:rows], other[:rows]) < 2e-2


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
@pytest.mark.parametrize(("case", "launches"), [("ranks", 1), ("least", 0), ("one", 0)])
def test_who_is_not_made_together(case: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each that is wide enough has a launch of its own, and the library makes the others."""
    refuse_narrow(monkeypatch, 256 if case == "least" else 64)
    ranks = [8, 16, 8] if case == "ranks" else [8, 8, 8]
    three = [projection(out, 64, rank=rank) for out, rank in zip((64, 32, 32), ranks, strict=True)]
    x, count = torch.randn(T, 64), counted(40, "cpu")
    outs, _ = project(x, three[1:2] if case == "one" else three, row_count=count, implementation="triton")
    assert count.products == launches
    assert outs[-1][200:].any(), "the library's has all rows"


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
def test_ranks_that_are_not_aligned_are_left_to_the_library() -> None:
    x, count = torch.randn(T, 64), counted(40, "cpu")
    (out,), _ = project(x, [projection(64, 64, rank=3)], row_count=count, implementation="triton")
    assert count.products == 0
    assert out[200:].any()
