"""Log-probabilities of each sequence against the definition on each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from common import relative
from cross_entropy_cases import (
    CASES,
    FLOAT32_BOUND,
    HALF_BOUND,
    HALF_DTYPES,
    IMPLEMENTATIONS,
    Case,
    H,
    T,
    cut,
    defined,
    device_of,
    draw,
    log_probs,
    luck,
    run,
)
from torch import Tensor

from fastpack.ops.implementation import Implementation
from fastpack.packing.seqlens import PackedSeqLens

LENGTHS = (11, 1, 18, 7)
WITH_EMPTY = (0, 11, 1, 0, 9, 9, 0, 6)
"""Of 37 tokens the last belongs to none; the labels from 12 to 20, those of one sequence, are ignored."""
UNLABELLED = slice(12, 21)
SAY_NOTHING = [0, 3, 4, 6]


def defined_log_probs(
    inputs: dict[str, Tensor], labels: Tensor, *, shift: bool, lengths: Sequence[int] = LENGTHS, **options: Any
) -> Tensor:
    """Each sequence alone."""
    sums = []
    total = sum(lengths)
    for hidden, wanted in zip(inputs["hidden"][:total].split(lengths), labels[:total].split(lengths), strict=True):
        pair = (hidden[:-1], wanted[1:]) if shift else (hidden, wanted)
        sums.append(-defined({**inputs, "hidden": pair[0]}, pair[1], **options))
    return torch.stack(sums)


def offsets_of(lengths: Sequence[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_log_probs_of_each_sequence(implementation: Implementation, shift: bool) -> None:
    case = CASES["everything"]
    inputs, labels = draw(case, device=device_of(implementation))
    labels[12] = 5  # the first of a sequence, which nothing predicts
    truth = run(defined_log_probs, inputs, labels, dtype=torch.float64, shift=shift, **case.options)
    packed = PackedSeqLens.from_lengths(LENGTHS)
    options = {**case.options, "implementation": implementation, "shift": shift}
    for offsets in (packed, packed.cu_seqlens):
        found = run(log_probs, inputs, labels, offsets=offsets, **options)
        assert found["result"].dtype == torch.float32
        for key, value in truth.items():
            assert relative(found[key], value) <= FLOAT32_BOUND, key
    wrong = run(log_probs, inputs, labels, offsets=torch.tensor([0, 12, 12, 30, T]), **options)
    assert relative(wrong["result"], truth["result"]) > 1e-2


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_without_tokens_or_labels(implementation: Implementation, dtype: torch.dtype, shift: bool) -> None:
    """Against float64: in float32 to 1e-5, in half precision within 1.5 times plain torch's error."""
    case = Case(bias=True, lora=True, options={"softcap": 10.0})
    inputs, labels = draw(case, dtype, device=device_of(implementation))
    labels[UNLABELLED] = -100
    labels[21] = 5  # the first of the next, which its neighbour doesn't predict
    settings: dict[str, Any] = {**case.options, "shift": shift}
    truth = run(defined_log_probs, inputs, labels, dtype=torch.float64, lengths=WITH_EMPTY, **settings)
    stock = run(defined_log_probs, inputs, labels, lengths=WITH_EMPTY, **settings)
    offsets = offsets_of(WITH_EMPTY, device_of(implementation))
    found = run(log_probs, inputs, labels, offsets=offsets, implementation=implementation, **settings)

    def bound(key: str) -> float:
        if dtype == torch.float32:
            return FLOAT32_BOUND
        plain = max(HALF_BOUND * relative(stock[key], truth[key]), luck(key, dtype, "sum"))
        return plain + cut(implementation, dtype)

    for key, value in truth.items():
        assert relative(found[key], value) <= bound(key), key
    assert not truth["result"][SAY_NOTHING].any()
    assert not found["result"][SAY_NOTHING].any()
    assert not found["hidden"][UNLABELLED].any()
    assert not found["hidden"][sum(WITH_EMPTY) :].any()
    # a boundary that is one token late
    late = offsets.clone()
    late[2:4] += 1
    wrong = run(log_probs, inputs, labels, offsets=late, implementation=implementation, **settings)
    for key in ("result", "hidden"):
        assert relative(wrong[key], truth[key]) > max(1e-2, bound(key)), key


def test_a_first_label_would_be_seen() -> None:
    """The negative control of shifting: labels shifted over all sequences at once."""
    inputs, labels = draw(Case())
    labels[12] = 5
    offsets = PackedSeqLens.from_lengths(LENGTHS)
    right = log_probs(inputs, labels, offsets=offsets, shift=True)
    wrong = log_probs(inputs, labels.roll(-1), offsets=offsets)
    assert relative(wrong, right) > 1e-2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_without_tokens_and_tokens_without_sequence(implementation: Implementation) -> None:
    device = device_of(implementation)
    inputs, labels = draw(Case(), device=device)
    labels[:] = labels.clamp(min=0)
    offsets = torch.tensor([0, 11, 11, 30, 30], dtype=torch.int32, device=device)
    for shift in (False, True):
        options: dict[str, Any] = {"offsets": offsets, "shift": shift, "implementation": implementation}
        found = run(log_probs, inputs, labels, **options)
        assert found["result"].shape == (4,)
        assert not found["result"][[1, 3]].any()
        assert found["result"][[0, 2]].all()
        assert not found["hidden"][30:].any()
        changed = {**inputs, "hidden": torch.cat([inputs["hidden"][:30], torch.ones(7, H, device=device)])}
        assert torch.equal(run(log_probs, changed, labels, **options)["result"], found["result"])
    empty = {**inputs, "hidden": inputs["hidden"][:0]}
    nothing = torch.zeros(3, dtype=torch.int32, device=device)
    none = log_probs(empty, labels[:0], offsets=nothing, shift=True, implementation=implementation)
    assert torch.equal(none, torch.zeros(2, device=device))
