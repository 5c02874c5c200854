"""Helpers for the tests of ops: errors against exact results, and the devices and dtypes that kernels run on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

ON_CPU = pytest.param(
    "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, where there is no GPU")
)
DEVICES = [ON_CPU, pytest.param("cuda", marks=pytest.mark.gpu)]

# Triton's interpreter truncates to bfloat16: what rounds to it is tested where it is compiled
KERNEL_DTYPES = [
    pytest.param("cpu", torch.float32, marks=ON_CPU.marks),
    pytest.param("cpu", torch.float16, marks=ON_CPU.marks),
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
]


EPS = 1e-5  # of the norms


def defined(x: Tensor, weight: Tensor, *, centred: bool) -> Tensor:
    """Compute a norm as defined, in float64: with the mean square or the variance, and w."""
    x = x.double()
    if centred:
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight.double()


def relative(value: Tensor, truth: Tensor) -> float:
    assert value.shape == truth.shape
    value, truth = value.detach().double(), truth.detach().double()
    error = float((value - truth).abs().max() / truth.abs().max())
    return math.inf if math.isnan(error) else error


def assert_no_worse(actual: Tensor, plain: Tensor, truth: Tensor) -> None:
    """``actual`` has the shape and dtype of plain torch's result, and at most 1.5 times its error; 1e-5 in float32.

    Half a unit in the last place is allowed, too: in a few elements plain torch may be luckier than that.
    """
    assert actual.dtype == plain.dtype
    half_a_unit = torch.finfo(actual.dtype).eps / 2
    allowed = 1e-5 if actual.dtype == torch.float32 else max(1.5 * relative(plain, truth), half_a_unit)
    assert relative(actual, truth) <= allowed


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Record the arguments of every call of a function from now on."""
    calls: list[tuple[Any, ...]] = []
    original: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append((*args, *kwargs.values()))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls
