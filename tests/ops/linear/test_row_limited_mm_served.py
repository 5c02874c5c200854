"""Sums of products over the rows that count: who is served, and the groups of projections that use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_checks import DEVICES, relative
from test_row_limited_mm import T, row_count_of
from torch import Tensor

from fastpack.ops.linear import projections
from fastpack.ops.linear import row_limited_mm as products
from fastpack.ops.linear.gated_mlp import gated_mlp
from fastpack.ops.linear.parts import Lora, Norm, Projection
from fastpack.ops.linear.projections import project
from fastpack.ops.linear.row_limited_mm import serves
from fastpack.ops.row_count import RowCount

kernels = pytest.importorskip("fastpack.ops.kernels.row_limited_mm")
pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_finite")


# --- who is served ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_who_is_served(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, m = torch.randn(256, 64, device=device).to(dtype), torch.randn(512, 64, device=device).to(dtype)
    count = row_count_of(100, device)
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
    count = row_count_of(rows, "cpu")
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
        count = row_count_of(rows, "cuda")
        outs, _ = project(x, given, row_count=count)
        assert count.products == (1 if given is three else 0)
        plain, _ = project(x, given, implementation="torch")
        for out, other in zip(outs, plain, strict=True):
            assert relative(out[:rows], other[:rows]) < 2e-2


@pytest.mark.gpu
def test_kinds_of_launches_share_what_was_compiled() -> None:
    """Wherever in the table their plans lie: its places are 780 bytes apart."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("ITS DESCRIPTORS ARE HOPPER'S")
    x = torch.randn(4096, 512, device="cuda").bfloat16()
    count = RowCount(torch.tensor([4096], dtype=torch.int32, device="cuda"), 4096)
    aligned: set[bool] = set()
    sizes: list[int] = []
    for columns in (512, 1024, 1536, 2048):
        m = torch.randn(512, columns, device="cuda").bfloat16()
        assert relative(products.sum_of_matmuls([(x, m)], count), x @ m) < 2e-2
        aligned |= {plans.data_ptr() % 16 == 0 for plans in count.schedules[1 : len(count.kinds) + 1]}
        sizes.append(len(kernels._products_kernel.device_caches[torch.cuda.current_device()][0]))
    assert len(count.kinds) == 4
    assert aligned == {True, False}
    assert sizes == [sizes[0]] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
@pytest.mark.parametrize(("case", "launches"), [("ranks", 1), ("least", 0), ("one", 0)])
def test_who_is_not_made_together(case: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each that is wide enough has a launch of its own, and the library makes the others."""
    refuse_narrow(monkeypatch, 256 if case == "least" else 64)
    ranks = [8, 16, 8] if case == "ranks" else [8, 8, 8]
    three = [projection(out, 64, rank=rank) for out, rank in zip((64, 32, 32), ranks, strict=True)]
    x, count = torch.randn(T, 64), row_count_of(40, "cpu")
    outs, _ = project(x, three[1:2] if case == "one" else three, row_count=count, implementation="triton")
    assert count.products == launches
    assert outs[-1][200:].any(), "the library's has all rows"


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
def test_ranks_that_are_not_aligned_are_left_to_the_library() -> None:
    x, count = torch.randn(T, 64), row_count_of(40, "cpu")
    (out,), _ = project(x, [projection(64, 64, rank=3)], row_count=count, implementation="triton")
    assert count.products == 0
    assert out[200:].any()
