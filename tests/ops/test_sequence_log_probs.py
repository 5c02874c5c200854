"""Log-probabilities of each sequence against the definition on each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import relative
from cross_entropy_cases import CASES, FLOAT32_BOUND, IMPLEMENTATIONS, Case, H, T, defined, draw, log_probs, run
from torch import Tensor

from fastpack.ops.implementation import Implementation
from fastpack.packing import PackedSeqLens

LENGTHS = (11, 1, 18, 7)


def defined_log_probs(inputs: dict[str, Tensor], labels: Tensor, *, shift: bool, **options: Any) -> Tensor:
    """Each sequence alone."""
    sums = []
    for hidden, wanted in zip(inputs["hidden"].split(LENGTHS), labels.split(LENGTHS), strict=True):
        pair = (hidden[:-1], wanted[1:]) if shift else (hidden, wanted)
        sums.append(-defined({**inputs, "hidden": pair[0]}, pair[1], **options))
    return torch.stack(sums)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_log_probs_of_each_sequence(implementation: Implementation, shift: bool) -> None:
    case = CASES["everything"]
    inputs, labels = draw(case)
    labels[12] = 5  # the first of a sequence, which nothing predicts
    truth = run(defined_log_probs, inputs, labels, dtype=torch.float64, shift=shift, **case.options)
    packed = PackedSeqLens.from_lengths(LENGTHS)
    for offsets in (packed, packed.cu_seqlens):
        options = {**case.options, "implementation": implementation, "shift": shift}
        found = run(log_probs, inputs, labels, offsets=offsets, **options)
        assert found["result"].dtype == torch.float32
        for key, value in truth.items():
            assert relative(found[key], value) <= FLOAT32_BOUND, key
    wrong = run(log_probs, inputs, labels, offsets=torch.tensor([0, 12, 12, 30, T]), **options)
    assert relative(wrong["result"], truth["result"]) > 1e-2


def test_a_first_label_would_be_seen() -> None:
    """The negative control of shifting: labels shifted over all sequences at once."""
    inputs, labels = draw(Case())
    labels[12] = 5
    offsets = PackedSeqLens.from_lengths(LENGTHS)
    right = log_probs(inputs, labels, offsets=offsets, shift=True)
    wrong = log_probs(inputs, labels.roll(-1), offsets=offsets)
    assert relative(wrong, right) > 1e-2


def test_sequences_without_tokens_and_tokens_without_sequence() -> None:
    inputs, labels = draw(Case())
    labels[:] = labels.clamp(min=0)
    offsets = torch.tensor([0, 11, 11, 30, 30], dtype=torch.int32)
    for shift in (False, True):
        found = run(log_probs, inputs, labels, offsets=offsets, shift=shift)
        assert found["result"].shape == (4,)
        assert not found["result"][[1, 3]].any()
        assert found["result"][[0, 2]].all()
        assert not found["hidden"][30:].any()
        changed = {**inputs, "hidden": torch.cat([inputs["hidden"][:30], torch.ones(7, H)])}
        assert torch.equal(run(log_probs, changed, labels, offsets=offsets, shift=shift)["result"], found["result"])
    none = log_probs({**inputs, "hidden": inputs["hidden"][:0]}, labels[:0], offsets=torch.zeros(3).int(), shift=True)
    assert torch.equal(none, torch.zeros(2))
