"""TRL's distillation trainer and its experimental trainers: patched equals stock, step by step, in all metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from backbone_calls import Calls
from experimental_trainers import CASES, gkd
from oracle import FLOAT32_BOUND
from preferences import STEPS, logged

import fastpack
from fastpack.trainers.padded_metrics import note_on_padding

OF_SUMS = 3e-5
"""The bound for metrics that are differences of sums of log-probabilities, relative to 1."""
TIMES = ("step_time", "epoch")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_equal(name: str, tmp_path: Path, calls: Calls) -> None:
    build, further = CASES[name]
    stock = logged(build(tmp_path, **further))
    assert not calls.all
    trainer = fastpack.patch(build(tmp_path, **further))
    ours = logged(trainer)
    assert calls.all
    assert len(ours) == len(stock) == STEPS
    padded = note_on_padding(trainer) or ""
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.keys() == theirs.keys()
        assert theirs["grad_norm"] > 0
        for what, value in theirs.items():
            if what not in TIMES and what not in padded:
                bound = OF_SUMS if "/" in what else 1e-2 * FLOAT32_BOUND
                assert mine[what] == pytest.approx(value, rel=FLOAT32_BOUND, abs=bound), (what, mine, theirs)


def test_negative_control(tmp_path: Path) -> None:
    stock, other = logged(gkd(tmp_path)), logged(fastpack.patch(gkd(tmp_path, beta=0.45)))
    assert any(abs(a["loss"] - b["loss"]) > FLOAT32_BOUND * abs(b["loss"]) for a, b in zip(other, stock, strict=True))
