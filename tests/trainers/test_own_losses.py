"""Token budgets where the loss is not a share of ``num_items_in_batch``: means of the user's own, and of some heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from preferences import settings
from torch import Tensor, nn
from torch.nn import functional
from trainer_cases import Gradients, alone, furthest, ids_of, plain, sft, watch_batches
from transformers import Trainer, TrainingArguments
from trl import SFTTrainer

import fastpack
from fastpack.exactness.tiny import build_tiny
from fastpack.patching.options import TokenBudget
from fastpack.trainers import budget
from fastpack.trainers.kinds import averages, divides, kind_of

BOUND = 1e-5
SAME_STEPS = TokenBudget(60, same_steps=True)


def cross_entropy(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **how)


def a_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs.logits, labels)


def a_share(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def mean_of(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    loss = cross_entropy(outputs.logits, inputs["labels"])
    return (loss, outputs) if return_outputs else loss


def mean_of_any(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    return mean_of(self, model, inputs, return_outputs)


def share_of(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    return a_share(outputs, inputs["labels"], num_items_in_batch)


def handed_on(self: Any, *args: Any, **kwargs: Any) -> Any:
    return super(type(self), self).compute_loss(*args, **kwargs)


OWN: dict[str, tuple[dict[str, Any], bool]] = {
    "compute_loss": ({"compute_loss": mean_of}, True),
    "compute_loss of any keywords": ({"compute_loss": mean_of_any}, True),
    "compute_loss, said to be a mean": ({"compute_loss": mean_of, "loss_is_scaled_for_ga": False}, True),
    "compute_loss, a share": ({"compute_loss": share_of}, False),
    "compute_loss, handed on": ({"compute_loss": handed_on}, False),
    "compute_loss_func": ({"compute_loss_func": a_mean}, True),
    "compute_loss_func, a share": ({"compute_loss_func": a_share}, False),
}
"""What is set on a subclass, and whether it is a mean over a micro-batch."""


def trainer_of(build: Any, what: str, folder: Path, **further: Any) -> Any:
    trainer = build(folder, **further)
    own = dict(OWN[what][0])
    if "compute_loss_func" in own:
        trainer.compute_loss_func = own.pop("compute_loss_func")
    trainer.__class__ = type(f"Own{type(trainer).__name__}", (type(trainer),), {**own, "__module__": __name__})
    return trainer


@pytest.mark.parametrize("build", [plain, sft], ids=["Trainer", "SFTTrainer"])
@pytest.mark.parametrize("what", OWN)
def test_same_steps_with_a_loss_of_ones_own(build: Any, what: str, tmp_path: Path) -> None:
    further = {"per_device_train_batch_size": 6, "max_steps": 2}
    stock = trainer_of(build, what, tmp_path, **further)
    theirs = Gradients(stock)
    stock.train()
    trainer = trainer_of(build, what, tmp_path, **further)
    assert isinstance(trainer, SFTTrainer if build is sft else Trainer)
    fastpack.patch(trainer, max_tokens=SAME_STEPS)
    ours = Gradients(trainer)
    trainer.train()
    for mine, its in zip(ours.steps, theirs.steps, strict=True):
        assert furthest(mine, its) <= 3 * BOUND
    for mine, its in zip(trainer.state.log_history[:2], stock.state.log_history[:2], strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=BOUND)
    assert trainer.compute_loss.spec.pieces > 2
    assert averages(stock, kind_of(stock)) is OWN[what][1]


@pytest.mark.parametrize("what", [what for what, (_, mean) in OWN.items() if mean])
def test_full_batches_are_one_big_batch(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(further: dict[str, Any], max_tokens: Any, batches: int) -> tuple[Any, list[Any]]:
        trainer = trainer_of(plain, what, tmp_path, max_steps=1, **further)
        seen = watch_batches(trainer)
        fastpack.patch(trainer, max_tokens=max_tokens)
        gradients = Gradients(trainer)
        trainer.train()
        return gradients.steps[0], [example for batch in seen[:batches] for example in batch]

    accumulating = {"gradient_accumulation_steps": 3}
    ours, chosen = train(accumulating, 75, 3)
    whole = trainer_of(plain, what, tmp_path, max_steps=1, per_device_train_batch_size=len(chosen))
    rows = [ids_of(example) for example in whole.train_dataset]
    whole.train_dataset = whole.train_dataset.select([rows.index(example) for example in chosen])
    theirs = Gradients(whole)
    whole.train()
    assert furthest(ours, theirs.steps[0]) <= BOUND
    monkeypatch.setattr(budget, "averages", lambda trainer, kind: False)
    assert furthest(train(accumulating, 75, 3)[0], theirs.steps[0]) > 0.1, "the check can fail"


@pytest.mark.parametrize("model_type", ["bart", "xlnet", "marian"])
def test_heads_whose_own_loss_is_a_mean(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a ``num_items_in_batch`` and read none: added up, three pieces were three times the step."""

    def train(max_tokens: Any) -> tuple[Any, Any]:
        model = build_tiny(model_type).train()
        for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
            dropout.p = 0.0
        given = plain(tmp_path)
        trainer = Trainer(
            model,
            args=alone(TrainingArguments(**settings(tmp_path, max_steps=1, per_device_train_batch_size=6))),
            train_dataset=given.train_dataset.map(lambda row: {"input_ids": [i % 30 + 3 for i in row["input_ids"]]}),
            data_collator=given.data_collator,
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
    monkeypatch.setattr(budget, "averages", lambda trainer, kind: False)
    assert furthest(train(SAME_STEPS)[1], theirs) > 0.1, "the check can fail"


def test_what_a_trainer_divides_by(tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    assert divides(trainer)
    trainer.compute_loss_func = a_mean
    assert not divides(trainer)
    trainer.loss_is_scaled_for_ga = False
    assert divides(trainer)


class Callable_:
    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return a_mean(outputs, labels)


def test_losses_that_are_objects(tmp_path: Path) -> None:
    import functools

    trainer = plain(tmp_path)
    kind = kind_of(trainer)
    assert kind is not None
    assert not averages(trainer, kind)
    for mean, function in ((True, Callable_()), (True, functools.partial(a_mean)), (False, functools.partial(a_share))):
        trainer.compute_loss_func = function
        assert averages(trainer, kind) is mean
    trainer.compute_loss_func = functional.cross_entropy.__get__  # written in C: whatever it does is not known
    assert not averages(trainer, kind)
