"""Metrics that average over padding (CPO, SimPO, ORPO, OnlineDPO) are named in the report; all else equals stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dpo_cases import dpo
from experimental_trainers import CASES
from preferences import logged
from trainer_cases import kto, sft
from transformers import TrainerCallback
from trl.experimental.cpo import CPOTrainer
from trl.experimental.tpo import TPOTrainer

import fastpack
from fastpack.trainers.padded_metrics import note_on_padding

LOGITS = ("logits/chosen", "logits/rejected")
COMPLETIONS = ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward")
PADDED = {"CPO": LOGITS, "SimPO": LOGITS, "ORPO": LOGITS, "OnlineDPO": COMPLETIONS}
TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second")


def build(name: str, folder: Path) -> Any:
    make, further = CASES[name]
    return make(folder, **further)


def notes(trainer: Any) -> list[str]:
    return [note for note in fastpack.report(trainer).notes if "every slot of a padded batch" in note]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PADDED)
def test_said_in_one_line_and_all_else_is_equal(name: str, tmp_path: Path) -> None:
    stock, trainer = logged(build(name, tmp_path)), fastpack.patch(build(name, tmp_path))
    [note] = notes(trainer)
    assert all(metric in note for metric in (*PADDED[name], type(trainer).__name__))
    assert PADDED[name][0] in str(fastpack.report(trainer))
    assert not notes(trainer.model), "a model knows no trainer"
    differ: dict[str, bool] = {}
    for mine, theirs in zip(logged(trainer), stock, strict=True):
        assert mine.keys() == theirs.keys()
        for what, value in theirs.items():
            if what in PADDED[name]:
                differ[what] = differ.get(what, False) or abs(mine[what] - value) > 1e-3 * abs(value)
            elif what not in TIMES:
                assert mine[what] == pytest.approx(value, rel=1e-4, abs=2e-6), what
    assert differ == dict.fromkeys(PADDED[name], True), "what the line says is so"


def test_of_others_nothing_is_said(tmp_path: Path) -> None:
    """Other trainers select completions by a mask, or log no logits at all."""
    for trainer in (dpo(tmp_path, patch="trainer"), fastpack.patch(sft(tmp_path)), fastpack.patch(kto(tmp_path))):
        assert not notes(trainer)
    assert note_on_padding(TPOTrainer.__new__(TPOTrainer)) is None
    assert note_on_padding(TrainerCallback()) is None


def test_trainers_that_are_made_of_them(tmp_path: Path) -> None:
    class Mine(CPOTrainer):  # type: ignore[misc]
        pass

    theirs = type("CustomDPOTrainer", (), {"__module__": "llamafactory.train.dpo.trainer"})
    assert note_on_padding(Mine.__new__(Mine)) is not None
    assert note_on_padding(theirs()) is not None
    assert note_on_padding(type("CustomDPOTrainer", (), {})()) is None
