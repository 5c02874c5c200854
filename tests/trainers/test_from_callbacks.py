"""Patch from a callback, as in frameworks that build the trainer themselves: when it works, and when it can't.

ms-swift hands its callbacks the trainer in their ``__init__``, before the trainer has a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from other_trainer_cases import BOUND
from preferences import STEPS, logged
from trainer_cases import plain, sft
from transformers import Trainer, TrainerCallback

import fastpack
from fastpack import PatchError


class Patches(TrainerCallback):
    """A callback that patches the model that a trainer passes to one of its events."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._patch)

    def _patch(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        fastpack.patch(model)


class PatchesAtOnce(TrainerCallback):
    """A callback written as a plugin of ms-swift."""

    def __init__(self, args: Any, trainer: Any) -> None:
        fastpack.patch(trainer)


class Swift(Trainer):
    """A trainer that builds its callbacks itself, before it is built."""

    made: Any = None

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
        callback = PatchesAtOnce(args, self) if self.made is None else self.made
        super().__init__(model, args, callbacks=[callback], **kwargs)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in logged(trainer)]


def test_before_there_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says when to patch, and patching then works (control with the same trainer)."""
    monkeypatch.setattr("trainer_cases.Trainer", Swift)
    with pytest.raises(PatchError, match=r"this Swift holds no model yet.*on_init_end.*before trainer\.train\(\)"):
        plain(tmp_path)
    for ask in (fastpack.report, fastpack.is_patched, fastpack.unpatch):
        with pytest.raises(PatchError, match="holds no model yet"):
            ask(Swift.__new__(Swift))
    monkeypatch.setattr(Swift, "made", Patches("on_init_end"))
    trainer = plain(tmp_path)
    assert fastpack.report(trainer).tier == "fast"
    monkeypatch.setattr("trainer_cases.Trainer", Trainer)
    assert losses(trainer) == pytest.approx(losses(plain(tmp_path)), rel=BOUND)


def test_other_objects_raise() -> None:
    for target in (Trainer, "a name", object()):
        with pytest.raises(TypeError, match=r"takes a model \(torch.nn.Module\) or a trainer"):
            fastpack.patch(target)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("accelerate_afresh")
@pytest.mark.parametrize(
    ("build", "event", "bf16"),
    [(sft, "on_init_end", False), (plain, "on_train_begin", False), (plain, "on_train_begin", True)],
)
def test_events_that_have_the_model(build: Any, event: str, bf16: bool, tmp_path: Path) -> None:
    """The event comes before ``accelerate`` prepares the model, or after, when autocast wraps the head's forward."""
    stock = losses(build(tmp_path, bf16=bf16))
    trainer = build(tmp_path, bf16=bf16)
    trainer.add_callback(Patches(event))
    if event == "on_init_end":  # which came and went: as if it had been given when the trainer was built
        trainer.callback_handler.on_init_end(trainer.args, trainer.state, trainer.control)
    ours = losses(trainer)
    assert len(ours) == STEPS
    assert ours == pytest.approx(stock, rel=2e-2 if bf16 else BOUND)
    assert fastpack.report(trainer).tier == "fast"
    fastpack.unpatch(trainer)
    assert not fastpack.is_patched(trainer)
