"""Gathers between rows and their copies; gradients are sums, rounded once and deterministic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastpack.ops.shared_rows import Copies, first_copies, spread, sum_copies

PLACES = (0, 1, 2, 0, 1, 3, 0, 4, 1, 2)
SOURCE = torch.tensor(PLACES)
"""Two rows have three copies, one has two, and two have one."""


def copies(first: list[int] | None = None) -> Copies:
    places = [SOURCE.eq(u).nonzero()[:, 0] for u in range(5)]
    several = []
    for count in (2, 3):
        rows = torch.tensor([u for u, members in enumerate(places) if len(members) == count])
        several.append((rows, torch.stack([places[u] for u in rows.tolist()])))
    return Copies(SOURCE, torch.tensor(first or [0, 1, 2, 5, 7]), tuple(several))


def rows(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


@pytest.mark.parametrize("first", [None, [6, 8, 9, 5, 7]])
def test_definitions(first: list[int] | None) -> None:
    """The definitions hold for any choice of the first copy."""
    mapping = copies(first)
    x, y = rows(5), rows(10)
    assert torch.equal(spread(x, mapping), x[SOURCE])
    assert torch.equal(first_copies(y, mapping), y[mapping.first])
    grad_T, grad_U = rows(10).detach() * 2, rows(5).detach() * 3
    (ours,), (plain,) = (torch.autograd.grad(out, x, grad_T) for out in (spread(x, mapping), x[SOURCE]))
    torch.testing.assert_close(ours, plain, rtol=1e-15, atol=1e-15)
    (ours,), (plain,) = (torch.autograd.grad(out, y, grad_U) for out in (first_copies(y, mapping), y[mapping.first]))
    assert torch.equal(ours, plain)


def test_only_the_first_has_a_gradient() -> None:
    x, mapping = rows(5), copies()
    grad = torch.zeros(10, 3, 4, dtype=torch.float64).index_copy(0, mapping.first, rows(5).detach())
    (ours,) = torch.autograd.grad(spread(x, mapping, only_first=True), x, grad)
    assert torch.equal(ours, grad[mapping.first])
    grad[3] += 1  # not the first copy of row 0: the caller says that its gradient is zero
    (ours,) = torch.autograd.grad(spread(x, mapping, only_first=True), x, grad)
    assert not torch.equal(ours, sum_copies(grad, mapping))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    """Each sum is the rounded float32 sum; a sum in half precision differs somewhere."""
    grad = rows(10, dtype).detach()
    true = torch.zeros(5, 3, 4).index_add(0, SOURCE, grad.float()).to(dtype)
    assert torch.equal(sum_copies(grad, copies()), true)
    assert not torch.equal(grad[0] + grad[3] + grad[6], true[0])


def test_without_copies() -> None:
    alone = Copies(torch.arange(4), torch.arange(4), ())
    x = rows(4)
    (grad,) = torch.autograd.grad(spread(x, alone), x, rows(4).detach())
    assert torch.equal(grad, rows(4).detach())
