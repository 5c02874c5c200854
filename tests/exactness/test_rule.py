"""The rule itself: how far is too far, and when nobody can tell."""

from __future__ import annotations

import math

import pytest
import torch

from fastpack.exactness.rule import CONTROL, FACTOR, FULL_BOUND, bound_of, middle, verdict_of, worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_allows_a_fixed_error_or_the_stock_models_own(dtype: torch.dtype) -> None:
    assert bound_of(0.0, dtype) == FULL_BOUND
    assert bound_of(1e-4, dtype) == FACTOR * 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_allows_the_stock_models_own_error(dtype: torch.dtype) -> None:
    assert bound_of(0.1, dtype) == FACTOR * 0.1
    assert bound_of(0.0, dtype) == torch.finfo(dtype).eps / 2, "one rounding"


def test_the_verdict() -> None:
    assert verdict_of(1e-6, 1e-5, 1.0) == "exact"
    assert verdict_of(2e-5, 1e-5, 1.0) == "not exact"
    assert verdict_of(math.nan, 1e-5, 1.0) == "not exact"
    for control in (0.9 * CONTROL * 1e-5, math.nan):
        assert verdict_of(1e-6, 1e-5, control) == "can't tell"
        assert verdict_of(1.0, 1e-5, control) == "not exact", "what is wrong is wrong whatever the control says"


def test_no_number_is_the_worst() -> None:
    assert worst([1.0, math.nan, 2.0]) == math.inf
    assert worst([]) == 0.0
    assert middle([1.0, 5.0, 2.0]) == 2.0
    assert middle([1.0, math.nan, math.nan]) == math.inf
