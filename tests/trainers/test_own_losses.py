"""Token budgets with losses that don't divide by ``num_items_in_batch``: users' own means, and those of some heads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from own_losses import OWN, a_mean, mean_of, with_own_loss
from preferences import settings
from tiny import tiny_model
from torch import nn
from torch.nn import functional
from trainer_cases import Gradients, alone, furthest, ids_of, plain, sft, watch_batches
from transformers import Trainer, TrainingArguments
from trl import SFTTrainer

import fastpack
from fastpack.errors import PatchError
from fastpack.exactness.tiny import build_tiny
from fastpack.patching.options import TokenBudget
from fastpack.trainers import budget
from fastpack.trainers.loss_units import divides, label_count_for, loss_unit_of

BOUND = 1e-5
SAME_STEPS = TokenBudget(60, same_steps=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("build", [plain, sft], ids=["Trainer", "SFTTrainer"])
@pytest.mark.parametrize("what", OWN)
def test_same_steps_with_a_loss_of_ones_own(build: Any, what: str, tmp_path: Path) -> None:
    further = {"per_device_train_batch_size": 6, "max_steps": 2}
    stock = with_own_loss(build, what, tmp_path, **further)
    theirs = Gradients(stock)
    stock.train()
    trainer = with_own_loss(build, what, tmp_path, **further)
    assert isinstance(trainer, SFTTrainer if build is sft else Trainer)
    fastpack.patch(trainer, max_tokens=SAME_STEPS)
    ours = Gradients(trainer)
    trainer.train()
    for mine, its in zip(ours.steps, theirs.steps, strict=True):
        assert furthest(mine, its) <= 3 * BOUND
    for mine, its in zip(trainer.state.log_history[:2], stock.state.log_history[:2], strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=BOUND)
    assert trainer.compute_loss.spec.pieces > 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", OWN)
def test_full_batches_are_one_big_batch(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(further: dict[str, Any], max_tokens: Any, batches: int) -> tuple[Any, list[Any]]:
        trainer = with_own_loss(plain, what, tmp_path, max_steps=1, **further)
        seen = watch_batches(trainer)
        fastpack.patch(trainer, max_tokens=max_tokens)
        gradients = Gradients(trainer)
        trainer.train()
        return gradients.steps[0], [example for batch in seen[:batches] for example in batch]

    accumulating = {"gradient_accumulation_steps": 3}
    ours, chosen = train(accumulating, 75, 3)
    whole = with_own_loss(plain, what, tmp_path, max_steps=1, per_device_train_batch_size=len(chosen))
    rows = [ids_of(example) for example in whole.train_dataset]
    whole.train_dataset = whole.train_dataset.select([rows.index(example) for example in chosen])
    theirs = Gradients(whole)
    whole.train()
    assert furthest(ours, theirs.steps[0]) <= BOUND
    if OWN[what][1]:
        monkeypatch.setattr(budget, "label_count_for", lambda trainer, loss_unit: "the step's labels")
        assert furthest(train(accumulating, 75, 3)[0], theirs.steps[0]) > 0.1, "the check can fail"


def test_labels_that_the_trainer_counts_otherwise(tmp_path: Path) -> None:
    """A share of the step's labels counts labels as the trainer does, whatever the losses' weights are."""

    def train(max_tokens: Any) -> Any:
        trainer = with_own_loss(plain, "compute_loss, a share", tmp_path, per_device_train_batch_size=6, max_steps=1)
        trainer._loss_shifts_labels = False
        fastpack.patch(trainer, max_tokens=max_tokens)
        gradients = Gradients(trainer)
        trainer.train()
        return gradients.steps[0]

    assert furthest(train(SAME_STEPS), train(None)) <= 3 * BOUND


def test_experts_in_a_loss_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL scales the auxiliary loss by the label count that it gets, so users have to say what they divide by."""
    experts = tiny_model("mixtral", attn_implementation="sdpa", output_router_logits=True)
    monkeypatch.setattr("trainer_cases.policy", lambda **_: experts)
    trainer = with_own_loss(sft, "compute_loss, handed on", tmp_path)
    with pytest.raises(PatchError, match="set loss_is_scaled_for_ga on the trainer"):
        fastpack.patch(trainer, max_tokens=160)
    trainer.loss_is_scaled_for_ga = True
    assert fastpack.patch(trainer, max_tokens=160) is trainer


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bart", "xlnet", "marian"])
def test_heads_whose_own_loss_is_a_mean(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ignore ``num_items_in_batch``: the sum of three pieces would be three times the step's loss."""

    def train(max_tokens: Any) -> tuple[Any, Any]:
        model = build_tiny(model_type).train()
        for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
            dropout.p = 0.0
        kwargs = plain(tmp_path)
        trainer = Trainer(
            model,
            args=alone(TrainingArguments(**settings(tmp_path, max_steps=1, per_device_train_batch_size=6))),
            train_dataset=kwargs.train_dataset.map(lambda row: {"input_ids": [i % 30 + 3 for i in row["input_ids"]]}),
            data_collator=kwargs.data_collator,
        )
        fastpack.patch(trainer, max_tokens=max_tokens)
        gradients = Gradients(trainer)
        trainer.train()
        return trainer, gradients.steps[0]

    whole, theirs = train(None)
    split, ours = train(SAME_STEPS)
    assert split.compute_loss.spec.pieces > 1
    assert furthest(ours, theirs) <= 3 * BOUND
    assert split.state.log_history[0]["loss"] == pytest.approx(whole.state.log_history[0]["loss"], rel=BOUND)
    monkeypatch.setattr(budget, "label_count_for", lambda trainer, loss_unit: "the step's labels")
    assert furthest(train(SAME_STEPS)[1], theirs) > 0.1, "the check can fail"


def test_what_a_trainer_divides_by(tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    assert divides(trainer, None)
    assert not divides(trainer, 7)
    trainer.compute_loss_func = a_mean
    assert not divides(trainer, None)
    trainer.loss_is_scaled_for_ga = False
    assert divides(trainer, 7)


def test_whose_loss_it_is(tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    loss_unit = loss_unit_of(trainer)
    assert loss_unit is not None
    assert label_count_for(trainer, loss_unit) == "the step's labels"
    trainer.compute_loss_func = functional.cross_entropy.__get__  # written in C: whatever it does is not known
    assert label_count_for(trainer, loss_unit) == "its own labels"
    trainer.compute_loss_func = None
    trainer.compute_loss = functools.partial(mean_of, trainer)
    assert label_count_for(trainer, loss_unit) == "its own labels"
    trainer.loss_is_scaled_for_ga = False
    assert label_count_for(trainer, loss_unit) == "nothing"
