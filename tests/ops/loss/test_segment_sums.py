"""Sums of token values over sequences, alone and after the linear cross-entropy."""

from __future__ import annotations

import pytest
import torch
from cross_entropy_cases import CASES, FLOAT32_BOUND, IMPLEMENTATIONS, computed, defined, device_of, draw, run
from op_checks import relative
from torch import Tensor

from fastpack.ops.implementation import Implementation
from fastpack.ops.loss.segment_sums import segment_sums

LENGTHS = (0, 11, 1, 0, 9, 9, 0, 6)
"""The last of 37 tokens belongs to no sequence."""


def offsets_of(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def summed_alone(values: Tensor) -> Tensor:
    return torch.stack([part.sum() for part in values[: sum(LENGTHS)].split(LENGTHS)])


def test_sums_of_each_sequence() -> None:
    values = torch.randn(37, dtype=torch.float64, requires_grad=True)
    sums = segment_sums(values, offsets_of(LENGTHS))
    assert sums.dtype == torch.float64
    torch.testing.assert_close(sums, summed_alone(values))
    weights = torch.linspace(0.5, 1.5, len(LENGTHS), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(sums, values, weights)
    (expected,) = torch.autograd.grad(summed_alone(values), values, weights)
    torch.testing.assert_close(gradient, expected)
    assert not gradient[-1:].any()
    assert not torch.allclose(segment_sums(values, offsets_of((1, 10, *LENGTHS[2:]))), sums)  # a boundary elsewhere


def test_many_small_values_lose_nothing() -> None:
    """In float32 a running sum of 0.1 over 2^20 tokens would be wrong by some per cent."""
    values = torch.full((1 << 20,), 0.1)
    expected = values.double().sum()
    assert abs(segment_sums(values, offsets_of((1 << 20,))) - expected) <= 1e-9 * expected


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_log_probs_of_each_sequence(implementation: Implementation) -> None:
    """They are computed as in the reference and the preference losses, and compared with each sequence alone."""
    case = CASES["everything"]
    device = device_of(implementation)
    inputs, labels = draw(case, device=device)
    labels[12:21] = -100  # one whole sequence

    def alone(inputs: dict[str, Tensor], labels: Tensor, **options: float) -> Tensor:
        return summed_alone(defined(inputs, labels, reduction="none", **options))

    def packed(inputs: dict[str, Tensor], labels: Tensor, **options: float) -> Tensor:
        losses = computed(inputs, labels, reduction="none", implementation=implementation, **options)
        return segment_sums(losses, offsets_of(LENGTHS, device))

    truth = run(alone, inputs, labels, dtype=torch.float64, **case.options)
    actual = run(packed, inputs, labels, **case.options)
    for key, value in truth.items():
        assert relative(actual[key], value) <= FLOAT32_BOUND, key
    assert not actual["hidden"][12:21].any()
