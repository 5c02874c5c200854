"""``patch(trainer, max_tokens=...)``: full batches, every example once an epoch, and the losses of one big batch."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import BUILD, DATA, EXAMPLES, Gradients, furthest, ids_of, total, watch_batches, watch_sizes

import fastpack
from fastpack.data.lengths import lengths_of
from fastpack.errors import PackingError, PatchError
from fastpack.patching.options import TokenBudget
from fastpack.trainers.loader import count_epochs
from fastpack.trainers.loss_units import LOSS_UNITS, piece

BUDGETS = {"sft": 60, "plain": 75, "dpo": 150, "reward": 150, "kto": 60}
BOUND = 1e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BUILD)
def test_every_example_once_an_epoch_in_full_batches(name: str, tmp_path: Path) -> None:
    trainer = BUILD[name](tmp_path, max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=2)
    batches = watch_batches(trainer)
    all_ids = Counter(ids_of(example) for example in trainer.train_dataset)
    lengths = lengths_of(trainer.train_dataset)
    fastpack.patch(trainer, max_tokens=BUDGETS[name])
    sizes = watch_sizes(trainer)
    trainer.train()
    micro_batches = len(trainer.get_train_dataloader())
    del trainer.compute_loss
    assert len(sizes) == 3 * micro_batches
    assert max(sizes) <= BUDGETS[name]
    assert sum(sizes) == 3 * sum(lengths)
    assert sum(lengths) / micro_batches > 0.75 * BUDGETS[name], "batches are full"
    assert trainer.state.global_step == 3 * -(-micro_batches // 2)
    epochs = [batches[i * micro_batches : (i + 1) * micro_batches] for i in range(3)]
    for epoch in epochs:
        assert Counter(example for batch in epoch for example in batch) == all_ids
    assert epochs[0] != epochs[1], "epochs are shuffled"
    assert len({len(batch) for batch in batches}) > 1, "batches are uneven in examples"


UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in BUILD},
    "dpo, ipo": ("dpo", {"loss_type": ["ipo"]}),
    "dpo and sft": ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}),
    "dpo, cut": ("dpo", {"max_length": 20}),
    "sft, completions alone": ("sft", {"completion_only_loss": False}),
    "sft, padding_free": ("sft", {"padding_free": True}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_micro_batches_give_the_gradient_of_one_batch(name: str, tmp_path: Path) -> None:
    kind, further = UNEVEN[name]
    trainer = BUILD[kind](tmp_path, max_steps=1, gradient_accumulation_steps=3, **further)
    batches = watch_batches(trainer)
    examples = [ids_of(example) for example in trainer.train_dataset]
    fastpack.patch(trainer, max_tokens=BUDGETS[kind])
    ours = Gradients(trainer)
    trainer.train()
    first = batches[:3]
    assert len({len(batch) for batch in first}) > 1, "or they are even"
    chosen = [examples.index(example) for batch in first for example in batch]
    assert len(set(chosen)) == len(chosen)

    data = DATA[kind]().select(chosen)
    stock = BUILD[kind](tmp_path, data, max_steps=1, **{**further, "per_device_train_batch_size": len(chosen)})
    theirs = Gradients(stock)
    stock.train()
    assert furthest(ours.steps[0], theirs.steps[0]) <= BOUND
    mine, its = (t.state.log_history[0]["loss"] for t in (trainer, stock))
    assert abs(mine - its) <= BOUND * max(1.0, abs(its))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["dpo", "reward", "kto"])
def test_negative_control_means_of_means(kind: str, tmp_path: Path) -> None:
    """Without the step weights, the same comparison fails."""
    trainer = BUILD[kind](tmp_path, max_steps=1, gradient_accumulation_steps=3)
    fastpack.patch(trainer, max_tokens=BUDGETS[kind])
    ours = Gradients(trainer)
    trainer.train()
    unweighed = BUILD[kind](tmp_path, max_steps=1, gradient_accumulation_steps=3)
    fastpack.patch(unweighed, max_tokens=BUDGETS[kind])
    del unweighed.compute_loss
    theirs = Gradients(unweighed)
    unweighed.train()
    assert furthest(ours.steps[0], theirs.steps[0]) > 100 * BOUND


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "accumulation"), [("sft", 1), ("sft", 2), ("dpo", 1), ("dpo", 2), ("reward", 1), ("kto", 1), ("plain", 2)]
)
@pytest.mark.parametrize("collated", [False, True])
def test_same_steps(kind: str, accumulation: int, collated: bool, tmp_path: Path) -> None:
    """Each step has the same examples and the same gradients as without a budget, wherever lengths are read."""
    further = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": accumulation, "max_steps": 2}
    stock = BUILD[kind](tmp_path, **further)
    theirs = Gradients(stock)
    stock.train()
    trainer = fastpack.patch(BUILD[kind](tmp_path, **further), max_tokens=TokenBudget(BUDGETS[kind], same_steps=True))
    if collated:
        trainer.data_collator = fastpack.with_packed_seq_lens(trainer.data_collator)
    ours = Gradients(trainer)
    trainer.train()
    for mine, its in zip(ours.steps, theirs.steps, strict=True):
        assert furthest(mine, its) <= 3 * BOUND
    for mine, its in zip(trainer.state.log_history[:2], stock.state.log_history[:2], strict=True):
        assert abs(mine["loss"] - its["loss"]) <= BOUND * max(1.0, abs(its["loss"]))
    pieces = trainer.compute_loss.spec
    assert pieces.batches == 2 * accumulation
    assert pieces.pieces > pieces.batches
    assert "pieces" in str(fastpack.report(trainer))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_same_steps_of_a_stream(kind: str, tmp_path: Path) -> None:
    """Lengths needn't be known, since nothing is planned from them; an example over the budget runs alone."""
    further = {"per_device_train_batch_size": 6, "max_steps": 2}
    stock = BUILD[kind](tmp_path, DATA[kind]().to_iterable_dataset(), **further)
    trainer = BUILD[kind](tmp_path, DATA[kind]().to_iterable_dataset(), **further)
    fastpack.patch(trainer, max_tokens=TokenBudget(20, same_steps=True))
    theirs, ours = Gradients(stock), Gradients(trainer)
    stock.train()
    trainer.train()
    for mine, its in zip(ours.steps, theirs.steps, strict=True):
        assert furthest(mine, its) <= 3 * BOUND
    assert "2 batches ran in" in str(fastpack.report(trainer))


def test_a_piece_has_the_lengths_of_its_rows() -> None:
    mask = torch.tensor([[1, 1, 2, 0], [0, 0, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]])
    batch = {"input_ids": mask + 5, "attention_mask": mask.clamp(max=1), "packed_seq_lens": [2, 1, 3, 1]}
    arguments = {**batch, "packed_seq_lens": fastpack.PackedSeqLens.from_lengths([2, 1, 3, 1])}
    read = fastpack.with_packed_seq_lens(lambda examples: {**batch, "attention_mask": mask})(None)
    for inputs in (batch, arguments, read):
        for units, lengths in (([0, 3], [2, 1, 1]), ([2], [3]), ([1, 2], [3]), ([1], None)):
            assert piece(inputs, units, LOSS_UNITS["SFTTrainer"])["packed_seq_lens"] == lengths
        assert piece(inputs, [1], LOSS_UNITS["DPOTrainer"])["packed_seq_lens"] == [1]
    nothing = fastpack.with_packed_seq_lens(lambda examples: {"input_ids": mask, "attention_mask": 0 * mask})(None)
    assert piece(nothing, [0, 1], LOSS_UNITS["SFTTrainer"])["packed_seq_lens"] is None


class Killed(Exception):
    pass


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_resumed(kind: str, workers: int, tmp_path: Path) -> None:
    """A run killed in the second epoch resumes with the batches that were left, and ends with the same result."""
    further = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "gradient_accumulation_steps": 2,
        "dataloader_num_workers": workers,
    }
    build = functools.partial(BUILD[kind], **further)
    whole = fastpack.patch(build(tmp_path / "whole"), max_tokens=BUDGETS[kind])
    steps = watch_steps(whole)
    whole.train()
    per_epoch = len(whole.get_train_dataloader())
    stop = -(-per_epoch // 2) + 2
    assert 2 * per_epoch > len(steps[:stop]), "there is something left"

    killed = fastpack.patch(build(tmp_path / "killed"), max_tokens=BUDGETS[kind])
    before = watch_steps(killed, stop=stop)
    with pytest.raises(Killed):
        killed.train()
    resumed = fastpack.patch(build(tmp_path / "killed"), max_tokens=BUDGETS[kind])
    after = watch_steps(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / f"checkpoint-{stop}"))
    assert before + after == steps
    for (name, mine), its in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7, msg=name)


def watch_steps(trainer: Any, stop: int | None = None) -> list[list[int]]:
    """Record the tokens of each row of each trained micro-batch; raise after ``stop`` steps."""
    seen: list[list[int]] = []
    step = trainer.compute_loss

    def watched(model: Any, inputs: Any, **kwargs: Any) -> Any:
        if stop is not None and trainer.state.global_step == stop:
            raise Killed
        seen.append([*inputs["attention_mask"].sum(-1).tolist(), int(inputs["input_ids"].sum())])
        return step(model, inputs, **kwargs)

    trainer.compute_loss = watched
    return seen


CHANGED = {"data": {}, "max_tokens": {}, "seed": {"seed": 7}, "accumulation": {"gradient_accumulation_steps": 1}}
SAME_STEPS = TokenBudget(60, same_steps=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", [*CHANGED, "no budget before", "same steps before", "same steps now"])
def test_a_checkpoint_of_other_batches(what: str, tmp_path: Path) -> None:
    further: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    first = BUILD["sft"](tmp_path, **{**further, "max_steps": 1})
    if what != "no budget before":
        fastpack.patch(first, max_tokens=SAME_STEPS if what == "same steps before" else 60)
    first.train()
    data = DATA["sft"]().select(range(EXAMPLES - 1)) if what == "data" else None
    other = BUILD["sft"](tmp_path, data, **{**further, **CHANGED.get(what, {})})
    fastpack.patch(other, max_tokens={"max_tokens": 70, "same steps now": SAME_STEPS}.get(what, 60))
    with pytest.raises(PackingError, match="the checkpoint at step 1 was made with"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("before", [None, SAME_STEPS, TokenBudget(80, same_steps=True)])
def test_same_steps_go_on_from_the_trainers_own_batches(before: TokenBudget | None, tmp_path: Path) -> None:
    further: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    fastpack.patch(BUILD["sft"](tmp_path, **{**further, "max_steps": 1}), max_tokens=before).train()
    whole, rest = (BUILD["sft"](tmp_path, **{**further, "max_steps": 2, "save_strategy": "no"}) for _ in range(2))
    whole.train()
    fastpack.patch(rest, max_tokens=SAME_STEPS).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    losses = [trainer.state.log_history[-2]["loss"] for trainer in (whole, rest)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_too_long(tmp_path: Path) -> None:
    trainer = BUILD["dpo"](tmp_path)
    lengths = lengths_of(trainer.train_dataset)
    at = lengths.index(max(lengths))
    with pytest.raises(
        PackingError, match=f"example {at} has {lengths[at]} tokens, more than max_tokens={max(lengths) - 1}"
    ):
        fastpack.patch(trainer, max_tokens=max(lengths) - 1)
    assert fastpack.report(trainer).tier == "stock", "nothing was changed"
    with pytest.raises(PackingError, match="more than max_tokens"):
        fastpack.patch(trainer, max_tokens=TokenBudget(20, same_steps=True))
    with pytest.raises(PatchError, match="set max_length in the config"):
        fastpack.patch(trainer, max_tokens=TokenBudget(20, too_long="truncate"))


def test_truncated(tmp_path: Path) -> None:
    trainer = BUILD["sft"](tmp_path)
    fastpack.patch(trainer, max_tokens=TokenBudget(20, too_long="truncate"))
    sizes = [total(batch) for batch in trainer.get_train_dataloader()]
    assert sum(sizes) == sum(min(n, 20) for n in lengths_of(trainer.train_dataset))
    assert max(sizes) == 20


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="already built, not a LlamaForCausalLM"):
        fastpack.patch(BUILD["sft"](tmp_path).model, max_tokens=100)
    with pytest.raises(PatchError, match="'aot' sorts pairs"):
        fastpack.patch(BUILD["dpo"](tmp_path, loss_type=["aot"]), max_tokens=200)
    with pytest.raises(PatchError, match="a KL that is a mean over a micro-batch: leave same_steps out"):
        fastpack.patch(BUILD["kto"](tmp_path, loss_type="kto"), max_tokens=TokenBudget(200, same_steps=True))
    with pytest.raises(PatchError, match="padding_free joins a batch into one row"):
        fastpack.patch(BUILD["sft"](tmp_path, padding_free=True), max_tokens=TokenBudget(200, same_steps=True))
    with pytest.raises(PatchError, match="an int of at least 1"):
        fastpack.patch(BUILD["sft"](tmp_path), max_tokens=0)
    odd: Any = {"same_steps": "no"}
    with pytest.raises(PatchError, match="same_steps='no'; pass True or False"):
        fastpack.patch(BUILD["sft"](tmp_path), max_tokens=TokenBudget(200, **odd))
    odd = {"same_steps": True, "too_long": "cut"}
    with pytest.raises(PatchError, match="too_long='cut'; pass 'error' or 'truncate'"):
        fastpack.patch(BUILD["sft"](tmp_path), max_tokens=TokenBudget(200, **odd))
    streamed = DATA["dpo"]().to_iterable_dataset()
    with pytest.raises(PackingError, match="without streaming=True"):
        fastpack.patch(BUILD["dpo"](tmp_path, streamed), max_tokens=200)


def test_set_up_twice_changed_and_undone(tmp_path: Path) -> None:
    trainer = BUILD["dpo"](tmp_path)
    callbacks = list(trainer.callback_handler.callbacks)
    fastpack.patch(trainer, max_tokens=150)
    assert "max_tokens=150: " in str(fastpack.report(trainer))
    forward = trainer.model.model.__dict__["forward"]
    loss = trainer.compute_loss
    fastpack.patch(trainer, max_tokens=150)
    assert trainer.compute_loss is loss, "the same options do nothing"
    fastpack.patch(trainer, max_tokens=200)
    assert "max_tokens=200: " in str(fastpack.report(trainer))
    assert trainer.model.model.__dict__["forward"] is forward
    trainer.train()
    fastpack.patch(trainer)
    assert "max_tokens" not in str(fastpack.report(trainer))
    assert fastpack.is_patched(trainer.model)
    fastpack.patch(trainer, max_tokens=150)
    fastpack.unpatch(trainer)
    assert "compute_loss" not in trainer.__dict__
    assert "get_train_dataloader" not in trainer.__dict__
    assert "gather" not in trainer.accelerator.__dict__
    assert callbacks == trainer.callback_handler.callbacks
    with fastpack.patched(trainer, max_tokens=150):
        assert "compute_loss" in trainer.__dict__
    assert "compute_loss" not in trainer.__dict__


@pytest.mark.parametrize(("max_steps", "epochs", "want"), [(-1, 2.5, 3), (10, 1, 2), (9, 1, 2), (8, 1, 2), (4, 9, 1)])
def test_count_epochs(max_steps: int, epochs: float, want: int, tmp_path: Path) -> None:
    trainer = BUILD["sft"](tmp_path, max_steps=max_steps, num_train_epochs=epochs, gradient_accumulation_steps=2)
    assert count_epochs(trainer.args, 9) == want


@pytest.mark.slow
def test_an_epoch_begun_anew(tmp_path: Path) -> None:
    """With ``ignore_data_skip``, a run resumes from any checkpoint, and saves its own settings."""
    further: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    BUILD["sft"](tmp_path, **{**further, "max_steps": 1}).train()
    trainer = BUILD["sft"](tmp_path, **{**further, "max_steps": 2}, ignore_data_skip=True)
    fastpack.patch(trainer, max_tokens=60)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    last = BUILD["sft"](tmp_path, **{**further, "max_steps": 3}, restore_callback_states_from_checkpoint=True)
    fastpack.patch(last, max_tokens=60)
    last.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert last.state.global_step == 3
