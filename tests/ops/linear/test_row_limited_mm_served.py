"""Sums of matmuls over the real rows: which operands are supported, and the groups of projections that use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_checks import DEVICES, relative
from test_row_limited_mm import T, row_count_of
from torch import Tensor

from fastpack.ops.linear import projections, row_limited_mm
from fastpack.ops.linear.gated_mlp import gated_mlp
from fastpack.ops.linear.operands import Lora, Norm, Projection
from fastpack.ops.linear.projections import project
from fastpack.ops.linear.row_limited_mm import serves
from fastpack.ops.row_count import RowCount

kernels = pytest.importorskip("fastpack.ops.kernels.row_limited_mm")
pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_finite")


# --- supported operands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_which_operands_are_supported(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, m = torch.randn(256, 64, device=device).to(dtype), torch.randn(512, 64, device=device).to(dtype)
    count = row_count_of(100, device)
    monkeypatch.setattr(row_limited_mm, "NARROWEST", 64)
    monkeypatch.setattr(row_limited_mm, "FEWEST_TILES", 0)
    hopper = device == "cpu" or torch.cuda.get_device_capability()[0] == 9

    def accepts(
        operands: Sequence[Tensor | None],
        *,
        of: Any = count,
        x: Tensor = x,
        how: Any = "triton",
        columns: Sequence[int] = (512,),
    ) -> bool:
        return serves(how, of, x, columns, operands)

    assert accepts([m, None]) == hopper
    assert accepts([m], columns=[256, 128, 128]) == hopper
    assert not accepts([m], columns=[256, 510 if device == "cuda" else 511]), "not even those of one output of several"
    assert not accepts([m], of=None), "all rows are real"
    assert not accepts([m[:510]], columns=[510 if device == "cuda" else 511]), "rows of the result are not aligned"
    assert not accepts([m], how="torch")
    assert not accepts([m.double()]), "dtypes differ"
    assert not accepts([m.double()], x=x.double())
    assert not accepts([torch.empty(512, 67, dtype=dtype, device=device)[:, :65]]), "rows are not aligned"
    assert not accepts([m.t()]), "rows must have stride 1"
    assert not accepts([m.view(-1)[1:-63].view(-1, 64)]), "its address is not aligned"
    if device == "cuda":
        assert not accepts([m.float()], x=x.float())
        monkeypatch.setattr(row_limited_mm, "FEWEST_TILES", 2)
        assert not accepts([m]), "four tiles leave most of the device idle"
        monkeypatch.setattr(row_limited_mm, "FEWEST_TILES", 0)
        monkeypatch.setattr(row_limited_mm, "NARROWEST", 65)
        assert not accepts([m]), "a library has better tiles for it"
        monkeypatch.setattr(row_limited_mm, "NARROWEST", 384)
        wide = torch.randn(256, 512, device=device).to(dtype)
        assert not accepts([m], x=wide, columns=[256])
        assert accepts([m], x=wide, columns=[256, 128]) == hopper, "in a launch with another it is wide enough"


# --- groups -----------------------------------------------------------------------------------------------------------


def projection(out: int, size: int, *, rank: int, bias: bool = False, device: str = "cpu") -> Projection:
    def leaf(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) / shape[-1] ** 0.5).requires_grad_()

    update = Lora(leaf(rank, size), leaf(out, rank), 1.5) if rank else None
    return Projection(leaf(out, size).detach(), torch.float32, leaf(out) if bias else None, update)


def trained(*group: Projection) -> list[Tensor]:
    tensors = [t for p in group for t in (p.bias, *((p.lora.a, p.lora.b) if p.lora else ())) if t is not None]
    return [t for t in tensors if t.requires_grad]


def outcome(outs: Sequence[Tensor], inputs: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return the first rows of the outputs, and the gradients for cotangents that are zero in all other rows."""
    cotangents = [torch.randn(o.shape, generator=torch.Generator().manual_seed(i)) for i, o in enumerate(outs)]
    for cotangent in cotangents:
        cotangent[rows:] = 0
    return [*(o[:rows] for o in outs), *torch.autograd.grad(outs, inputs, cotangents)]


def refuse_narrow(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """Refuse sums with fewer columns than ``least``, as a GPU does."""

    def wide(how: Any, count: RowCount | None, x: Tensor, columns: Sequence[int], operands: Any) -> bool:
        return sum(columns) >= least and serves(how, count, x, columns, operands)

    monkeypatch.setattr(projections, "serves", wide)


@pytest.mark.sample(3)
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
@pytest.mark.parametrize(("rank", "bias"), [(8, False), (8, True), (0, True)])
@pytest.mark.parametrize("which", ["group", "together", "residual", "mlp"])
def test_groups_leave_rows_out(which: str, rank: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients are those of a batch without the other rows, whose results stay finite."""
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
    outs, inputs = run(short, None, "torch")
    truth = outcome(outs, [short, *inputs], rows)
    count = row_count_of(rows, "cpu")
    outs, inputs = run(x, count, "triton")
    assert all(out.isfinite().all() for out in outs)
    actual = outcome(outs, [x, *inputs], rows)
    assert count.launches == {"group": 3 + 1, "together": 1 + 1, "residual": 1 + 1, "mlp": 3 + 2}[which]
    at = len(outs)  # the index of the input's gradient
    assert not actual[at][rows:].any()
    actual[at] = actual[at][:rows]
    for ours, right in zip(actual, truth, strict=True):
        assert relative(ours, right) < 1e-5
    count.rows.fill_(kernels.BLOCK_T)  # two rows too few
    assert relative(outcome(run(x, count, "triton")[0], [x], rows)[0], truth[0]) > 0.1, "the check can fail"


@pytest.mark.gpu
def test_narrow_outputs_share_a_wide_one_s_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a GPU's rules, q is wide enough, and k and v are only in one launch with q."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("ITS DESCRIPTORS ARE HOPPER'S")
    monkeypatch.setattr(row_limited_mm, "NARROWEST", 512)
    monkeypatch.setattr(row_limited_mm, "FEWEST_TILES", 0)
    torch.manual_seed(0)
    rows = 200
    x = torch.randn(T, 512, device="cuda").bfloat16()
    x[rows:] = 0
    three = [projection(out, 512, rank=16, bias=True, device="cuda") for out in (512, 128, 128)]
    three = [replace(p, weight=p.weight.bfloat16(), dtype=torch.bfloat16) for p in three]
    for group in (three, three[1:]):
        count = row_count_of(rows, "cuda")
        outs, _ = project(x, group, row_count=count)
        assert count.launches == (1 if group is three else 0)
        plain, _ = project(x, group, implementation="torch")
        for out, other in zip(outs, plain, strict=True):
            assert relative(out[:rows], other[:rows]) < 2e-2


@pytest.mark.gpu
def test_kinds_of_launches_share_a_compiled_kernel() -> None:
    """It doesn't matter where in the table their schedules are: entries are 780 bytes apart."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("ITS DESCRIPTORS ARE HOPPER'S")
    x = torch.randn(4096, 512, device="cuda").bfloat16()
    count = RowCount(torch.tensor([4096], dtype=torch.int32, device="cuda"), 4096)
    aligned: set[bool] = set()
    sizes: list[int] = []
    for columns in (512, 1024, 1536, 2048):
        m = torch.randn(512, columns, device="cuda").bfloat16()
        assert relative(row_limited_mm.sum_of_matmuls([(x, m)], count), x @ m) < 2e-2
        aligned |= {entry.data_ptr() % 16 == 0 for entry in count.schedules[1 : len(count.kinds) + 1]}
        sizes.append(len(kernels._matmul_kernel.device_caches[torch.cuda.current_device()][0]))
    assert len(count.kinds) == 4
    assert aligned == {True, False}
    assert sizes == [sizes[0]] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
@pytest.mark.parametrize(("case", "launches"), [("ranks", 1), ("least", 0), ("one", 0)])
def test_which_outputs_do_not_share_a_launch(case: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each output that is wide enough then has its own launch, and the library computes the others."""
    refuse_narrow(monkeypatch, 256 if case == "least" else 64)
    ranks = [8, 16, 8] if case == "ranks" else [8, 8, 8]
    three = [projection(out, 64, rank=rank) for out, rank in zip((64, 32, 32), ranks, strict=True)]
    x, count = torch.randn(T, 64), row_count_of(40, "cpu")
    outs, _ = project(x, three[1:2] if case == "one" else three, row_count=count, implementation="triton")
    assert count.launches == launches
    assert outs[-1][200:].any(), "the library's has all rows"


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
def test_ranks_that_are_not_aligned_are_left_to_the_library() -> None:
    x, count = torch.randn(T, 64), row_count_of(40, "cpu")
    (out,), _ = project(x, [projection(64, 64, rank=3)], row_count=count, implementation="triton")
    assert count.launches == 0
    assert out[200:].any()
