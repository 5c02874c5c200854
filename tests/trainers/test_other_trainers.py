"""TRL's unmodified KTO, reward, GRPO and RLOO trainers: patched equals stock, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
from backbone_calls import Calls
from other_trainer_cases import BOUND, CASES, check_step, kto
from preferences import STEPS, logged

import fastpack


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_equal(name: str, tmp_path: Path, calls: Calls) -> None:
    build, further = CASES[name]
    stock = logged(build(tmp_path, **further))
    assert not calls.all
    ours = logged(fastpack.patch(build(tmp_path, **further)))
    assert calls.all
    assert len(ours) == len(stock) == STEPS
    compared = 0
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.keys() == theirs.keys()
        compared += check_step(mine, theirs)
    assert compared >= 2 * STEPS


def test_negative_control(tmp_path: Path) -> None:
    stock = logged(kto(tmp_path))
    other = logged(fastpack.patch(kto(tmp_path, beta=0.11)))
    assert any(abs(a["loss"] - b["loss"]) > BOUND * abs(b["loss"]) for a, b in zip(other, stock, strict=True))
