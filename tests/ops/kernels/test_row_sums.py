"""Sums over rows: the kernel against torch, through Triton's interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastpack.ops.linear.operands import Projection
from fastpack.ops.linear.projections import project

pytest.importorskip("triton")
from fastpack.ops.kernels import row_sums

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter only")), GPU]
SIZES = [(600, 100), (1, 3), (257, 33), (90, 64)]
"""Four matrices: one more than a launch takes."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    return str(request.param)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the grid of each launch is added."""
    seen: list[int] = []
    kernel = row_sums._kernel

    class Counted:
        def __getitem__(self, grid: tuple[int]) -> Any:
            seen.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(row_sums, "_kernel", Counted())
    return seen


def drawn(rows: int, columns: int, device: str, dtype: torch.dtype) -> Tensor:
    """Return a random part of a wider matrix."""
    return torch.randn(rows, columns + 16, device=device).to(dtype)[:, 8 : 8 + columns]


def errors(actual: list[Tensor], xs: list[Tensor]) -> list[tuple[float, float]]:
    """Return the kernel's error and plain torch's, each relative to the largest sum."""
    pairs: list[tuple[float, float]] = []
    for ours, x in zip(actual, xs, strict=True):
        truth = x.double().sum(0)
        size = truth.abs().max()
        plain = x.sum(0, dtype=ours.dtype)
        pairs.append((float((ours - truth).abs().max() / size), float((plain - truth).abs().max() / size)))
    return pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums(dtype: torch.dtype, device: str, launches: list[int]) -> None:
    xs = [drawn(*size, device, dtype) for size in SIZES]
    actual = row_sums.sum_rows(xs, [torch.float32, dtype, dtype, torch.float32])
    assert [f.dtype for f in actual] == [torch.float32, dtype, dtype, torch.float32]
    for result, (ours, plain) in zip(actual, errors(actual, xs), strict=True):
        once = 16 * torch.finfo(torch.float32).eps if result.dtype == torch.float32 else torch.finfo(dtype).eps / 2
        if device == "cpu" and result.dtype == torch.bfloat16:
            once *= 2  # Triton's interpreter cuts off
        assert ours <= max(plain, once), (ours, plain)
    assert launches == [4 + 1 + 2, 2]


def test_few_rows_take_wide_tiles(device: str, launches: list[int]) -> None:
    """Sums of few rows don't take a thousand programs of a few columns each."""
    few, many = drawn(16, 1100, device, torch.float32), drawn(17, 1100, device, torch.float32)
    for x in (few, many):
        ((ours, plain),) = errors(row_sums.sum_rows([x], [torch.float32]), [x])
        assert ours <= max(plain, 1e-6)
    row_sums.sum_rows([few, many], [torch.float32] * 2)
    assert launches == [3, 35, 35 + 35]


def test_a_missing_row_is_seen(device: str) -> None:
    """Negative control of ``errors``."""
    x = drawn(300, 40, device, torch.float32)
    ((ours, plain),) = errors(row_sums.sum_rows([x[:-1]], [x.dtype]), [x])
    assert ours > 100 * max(plain, 1e-6)


def test_no_rows(device: str) -> None:
    (actual,) = row_sums.sum_rows([torch.empty(0, 5, device=device)], [torch.float32])
    assert torch.equal(actual, torch.zeros(5, device=device))


def test_what_torch_adds_up(device: str, launches: list[int]) -> None:
    """Torch sums columns of other strides, float64, and a few columns of very many rows."""
    rows = row_sums.MOST_BYTES // 4 // row_sums.TILE["BLOCK_M"] + 1
    xs = [
        drawn(30, 4, device, torch.float32).t(),
        torch.randn(9, 4).double().to(device),
        torch.ones(rows, 2).to(device),
    ]
    for x in xs:
        (actual,) = row_sums.sum_rows([x], [x.dtype])
        assert torch.equal(actual, x.sum(0))
    half = drawn(300, 4, device, torch.bfloat16)
    half = half.t().contiguous().t()
    (wide,) = row_sums.sum_rows([half], [torch.float32])
    assert float((wide - half.double().sum(0)).abs().max()) < 1e-4, "not rounded to bfloat16 on the way"
    (narrow,) = row_sums.sum_rows([half.float().t().contiguous().t()], [torch.bfloat16])
    assert torch.equal(narrow, half.double().sum(0).bfloat16())
    assert not launches
    row_sums.sum_rows([xs[2][1:]], [torch.float32])
    assert launches == [1]


def test_gradients_of_biases_take_one_launch(device: str, launches: list[int]) -> None:
    x = torch.randn(70, 32, device=device)
    weights = [torch.randn(size, 32, device=device) for size in (48, 16, 16)]
    biases = [torch.randn(len(w), device=device, requires_grad=True) for w in weights]
    group = [Projection(weight=w, bias=b, dtype=w.dtype) for w, b in zip(weights, biases, strict=True)]
    outs, _ = project(x, group, implementation="triton")
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, grads)
    for bias, grad in zip(biases, grads, strict=True):
        assert bias.grad is not None
        assert (bias.grad - grad.double().sum(0)).abs().max() <= 1e-5 * grad.sum(0).abs().max()
    assert launches == [4]
