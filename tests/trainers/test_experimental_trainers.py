"""TRL's distillation trainer and its experimental trainers: patched equals stock, step by step, in all metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backbone_calls import Calls
from experimental_trainers import CASES, distillation, gkd, iw_opd
from oracle import FLOAT32_BOUND
from preferences import STEPS, logged

import fastpack
from fastpack.trainers.padded_metrics import padded_metrics

OF_SUMS = 3e-5
"""The bound for metrics that are differences of sums of log-probabilities, relative to 1."""
TIMES = ("step_time", "epoch")


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
    left_out = (*TIMES, *padded_metrics(trainer))
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.keys() == theirs.keys()
        assert theirs["grad_norm"] > 0
        assert {"loss", "grad_norm"}.isdisjoint(left_out)
        for what, value in theirs.items():
            if what not in left_out:
                bound = OF_SUMS if "/" in what else 1e-2 * FLOAT32_BOUND
                assert mine[what] == pytest.approx(value, rel=FLOAT32_BOUND, abs=bound), (what, mine, theirs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("build", [gkd, distillation, iw_opd])
def test_the_teacher_is_patched_too(build: Any, tmp_path: Path, calls: Calls) -> None:
    """Its padding is removed as the student's, and ``unpatch`` restores both."""
    trainer = fastpack.patch(build(tmp_path))
    assert fastpack.report(trainer.teacher_model).tier == "fast"
    ids = torch.tensor([[0, 0, 5, 6, 7], [5, 6, 7, 8, 9]])
    with torch.no_grad():
        trainer.teacher_model(input_ids=ids, attention_mask=(ids > 0).long())
    assert set(calls.all) == {8}
    fastpack.unpatch(trainer)
    assert fastpack.report(trainer.teacher_model).tier == "stock"


def test_negative_control(tmp_path: Path) -> None:
    stock, other = logged(gkd(tmp_path)), logged(fastpack.patch(gkd(tmp_path, beta=0.45)))
    assert any(abs(a["loss"] - b["loss"]) > FLOAT32_BOUND * abs(b["loss"]) for a, b in zip(other, stock, strict=True))
