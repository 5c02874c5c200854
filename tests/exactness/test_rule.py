"""The exactness rule: which errors are too large, and when no verdict is possible."""

from __future__ import annotations

import math

import pytest
import torch

from fastpack.exactness.rule import FACTOR, FULL_BOUND, ROUNDING, Result, bound_of, compare, middle, relative, worst
from fastpack.exactness.verification import Check, Verification


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_allows_a_fixed_error_or_the_stock_models_own(dtype: torch.dtype) -> None:
    assert bound_of(0.0, dtype) == FULL_BOUND
    assert bound_of(1e-4, dtype) == FACTOR * 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_allows_the_stock_models_own_error(dtype: torch.dtype) -> None:
    assert bound_of(0.1, dtype) == FACTOR * 0.1
    assert bound_of(0.0, dtype) == torch.finfo(dtype).eps / 2, "one rounding"


def test_the_verdict() -> None:
    def verdict(error: float, control: float, bound: float = 1e-5) -> str:
        checks = Check("packed", error, bound), Check("control", control, 3 * bound, at_least=True)
        return Verification("", "", "", checks).verdict

    assert verdict(1e-6, 1.0) == "exact"
    assert verdict(2e-5, 1.0) == "not exact"
    assert verdict(math.nan, 1.0) == "not exact"
    for control in (2.7e-5, math.nan, math.inf):
        assert verdict(1e-6, control) == "can't tell"
        assert verdict(1.0, control) == "not exact", "what is wrong is wrong whatever the control says"
    assert verdict(math.inf, math.inf, bound=math.inf) == "can't tell", "a stock model that gives no numbers"


def test_no_number_is_the_worst() -> None:
    assert worst([1.0, math.nan, 2.0]) == math.inf
    assert worst([]) == math.inf, "nothing was compared"
    assert middle([1.0, 5.0, 2.0]) == 2.0
    assert middle([1.0, math.nan, math.nan]) == math.inf


def test_a_reference_of_zeros_proves_nothing() -> None:
    """Two tensors of zeros are equal, but pass no check by themselves; beside larger tensors they do."""
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert relative(zeros, zeros) == relative(ones, zeros) == math.inf
    assert relative(zeros, zeros, floor=1e-3) == 0.0
    assert relative(ones, zeros, floor=1e-3) == pytest.approx(1e3)
    assert relative(ones, ones) == 0.0
    assert relative(ones * math.nan, ones) == relative(ones, ones * math.nan) == math.inf


def test_a_gradient_that_is_rounding_alone_is_held_to_a_higher_floor() -> None:
    """Keys' biases have no gradient but what is left of terms that cancel: ``ROUNDING`` of the largest, at most."""

    def result(small: float) -> Result:
        grads = {"weight": torch.tensor([1.0]), "bias of keys": torch.tensor([small])}
        return Result([torch.ones(1, 2)], torch.tensor(1.0), grads)

    def error(small: float, true: float) -> float:
        return compare(result(small), result(true)).grads

    assert error(0.0, ROUNDING / 2) == pytest.approx(100 * ROUNDING / 2)
    assert error(0.0, 2 * ROUNDING) == pytest.approx(1000 * 2 * ROUNDING)
    assert error(1e-3, 0.0) == pytest.approx(0.1), "a real gradient there is an error"
    assert error(1.1e-3, 1e-3) == pytest.approx(0.1, rel=1e-3)
