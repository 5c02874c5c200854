"""The exactness rule: which errors are too large, and when no verdict is possible."""

from __future__ import annotations

import math

import pytest
import torch

from fastpack.exactness.rule import FACTOR, FULL_BOUND, bound_of, middle, relative, worst
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
