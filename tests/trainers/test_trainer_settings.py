"""Token budgets with a trainer's own settings, other heads, and later changes of the trainer."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from preferences import pairs, settings, word_tokenizer
from tiny import tiny_model
from torch.utils.data import WeightedRandomSampler
from trainer_cases import (
    EXAMPLES,
    Gradients,
    alone,
    dpo,
    furthest,
    ids_of,
    kto,
    plain,
    policy,
    sft,
    texts,
    total,
    watch_batches,
)
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

import fastpack
from fastpack.data.lengths import lengths_of
from fastpack.errors import PackingError, PatchError
from fastpack.patching.options import TokenBudget
from fastpack.trainers.loader import count_epochs, make_sampler
from fastpack.trainers.loss_units import loss_unit_of

BOUND = 1e-5


def right_padding() -> Any:
    tokenizer = word_tokenizer()
    tokenizer.padding_side = "right"
    return tokenizer


def ids() -> list[list[int]]:
    return [word_tokenizer()(row["text"])["input_ids"] for row in texts()]


HEADS: dict[str, tuple[Any, int, Any]] = {
    "classes": (AutoModelForSequenceClassification, 3, lambda tokens: len(tokens) % 3),
    "regression": (AutoModelForSequenceClassification, 1, lambda tokens: float(len(tokens) % 3)),
    "tokens": (AutoModelForTokenClassification, 3, lambda tokens: [i % 3 for i in tokens]),
}


def classifier(folder: Path, head: str, chosen: list[int] | None = None, **further: Any) -> Any:
    auto, labels, judge = HEADS[head]
    data = Dataset.from_dict({"input_ids": ids(), "labels": [judge(row) for row in ids()]})
    collator = DataCollatorForTokenClassification if head == "tokens" else DataCollatorWithPadding
    return Trainer(
        policy(auto=auto, num_labels=labels, pad_token_id=0),
        args=alone(TrainingArguments(**settings(folder, max_steps=1, **further))),
        train_dataset=data if chosen is None else data.select(chosen),
        data_collator=collator(right_padding()),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("head", HEADS)
def test_classifiers_take_the_mean_of_the_step(head: str, tmp_path: Path) -> None:
    """Their losses are means whatever ``num_items_in_batch`` is; the sum of three would be three times too large."""
    trainer = classifier(tmp_path, head, gradient_accumulation_steps=3)
    batches = watch_batches(trainer)
    examples = [ids_of(example) for example in trainer.train_dataset]
    fastpack.patch(trainer, max_tokens=75)
    ours = Gradients(trainer)
    trainer.train()
    chosen = [examples.index(example) for batch in batches[:3] for example in batch]
    assert len({len(batch) for batch in batches[:3]}) > 1, "or they are even"
    stock = classifier(tmp_path, head, chosen, per_device_train_batch_size=len(chosen))
    theirs = Gradients(stock)
    stock.train()
    assert furthest(ours.steps[0], theirs.steps[0]) <= BOUND
    assert trainer.state.log_history[0]["loss"] == pytest.approx(stock.state.log_history[0]["loss"], rel=BOUND)


def test_what_a_collator_pads_to_is_not_where_it_cuts(tmp_path: Path) -> None:
    trainer = Trainer(
        policy(),
        args=alone(TrainingArguments(**settings(tmp_path))),
        train_dataset=Dataset.from_dict({"input_ids": ids(), "labels": ids()}),
        data_collator=DataCollatorForSeq2Seq(right_padding(), max_length=5),
    )
    fastpack.patch(trainer, max_tokens=75)
    assert max(total(batch) for batch in trainer.get_train_dataloader()) <= 75


@pytest.mark.parametrize("make", [sft, dpo])
def test_a_collator_may_be_wrapped_before_or_after(make: Any, tmp_path: Path) -> None:
    """It truncates to max_length either way, and the budget counts the remaining tokens."""

    def wrap(trainer: Any) -> None:
        trainer.data_collator = fastpack.with_packed_seq_lens(fastpack.with_packed_seq_lens(trainer.data_collator))

    first, later = (make(tmp_path, max_length=20) for _ in range(2))
    wrap(first)
    fastpack.patch(first, max_tokens=45)
    fastpack.patch(later, max_tokens=45)
    wrap(later)
    result = [[total(batch) for batch in trainer.get_train_dataloader()] for trainer in (first, later)]
    assert result[0] == result[1]
    assert max(result[0]) <= 45
    assert fastpack.report(first).notes == fastpack.report(later).notes


def test_a_wrapped_collator_and_two_packings(tmp_path: Path) -> None:
    """KTO's KL runs mismatched completions with all keywords of the batch, including the packing of other sequences."""
    result = []
    for wrap in (lambda collator: collator, fastpack.with_packed_seq_lens):
        trainer = fastpack.patch(kto(tmp_path, loss_type="kto", per_device_train_batch_size=4, max_steps=3))
        trainer.data_collator = wrap(trainer.data_collator)
        trainer.train()
        result.append([(entry["loss"], entry["kl"]) for entry in trainer.state.log_history if "loss" in entry])
    assert result[0] == result[1]
    assert len(result[0]) == 3


def test_the_report_says_that_nothing_is_dropped(tmp_path: Path) -> None:
    trainer = fastpack.patch(sft(tmp_path, dataloader_drop_last=True), max_tokens=60)
    assert sum(total(batch) for batch in trainer.get_train_dataloader()) == sum(lengths_of(trainer.train_dataset))
    assert "dataloader_drop_last drops no batch" in repr(fastpack.report(trainer))
    assert "dataloader_drop_last" not in str(fastpack.report(fastpack.patch(sft(tmp_path), max_tokens=60)))


def test_another_data_set_is_planned_anew(tmp_path: Path) -> None:
    trainer = fastpack.patch(sft(tmp_path), max_tokens=60)
    trainer.train_dataset = sft(tmp_path, texts(EXAMPLES + 16)).train_dataset
    sizes = [total(batch) for batch in trainer.get_train_dataloader()]
    assert sum(sizes) == sum(lengths_of(trainer.train_dataset))
    assert max(sizes) <= 60


def test_a_second_run_has_the_batches_of_the_first(tmp_path: Path) -> None:
    """That holds too if later epochs need one more micro-batch, so that the same steps are fewer epochs."""
    lengths = [21, 30, 28, 27, 5, 11, 6, 18, 27, 17, 18, 23, 15, 28, 9, 6]
    trainer = sft(tmp_path, texts(len(lengths)), seed=1, max_steps=32)
    trainer.train_dataset = Dataset.from_dict({"input_ids": [[5] * n for n in lengths]})
    fastpack.patch(trainer, max_tokens=60)
    counts = [len(trainer.get_train_dataloader()) for _ in range(2)]
    assert counts == [6, 6]
    fewer = make_sampler(lengths, TokenBudget(60), trainer.args)
    fewer.even_out(count_epochs(trainer.args, 6))
    assert len(fewer) == 5, "or this says nothing"


def test_undone_after_callbacks_were_restored(tmp_path: Path) -> None:
    further: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    fastpack.patch(sft(tmp_path, max_steps=1, **further), max_tokens=60).train()
    trainer = sft(tmp_path, max_steps=2, restore_callback_states_from_checkpoint=True, **further)
    before = [type(callback) for callback in trainer.callback_handler.callbacks]
    fastpack.patch(trainer, max_tokens=60)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    fastpack.unpatch(trainer)
    assert [type(callback) for callback in trainer.callback_handler.callbacks] == before
    assert "compute_loss" not in trainer.__dict__


def test_a_loss_of_the_users_own_is_put_back(tmp_path: Path) -> None:
    trainer = sft(tmp_path)
    stock, called = trainer.compute_loss, []

    def mine(*args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return stock(*args, **kwargs)

    trainer.compute_loss = mine
    with fastpack.patched(trainer, max_tokens=60):
        assert trainer.compute_loss is not mine
        trainer.train()
    assert called
    assert trainer.compute_loss is mine


@pytest.mark.sample(2)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("name", ["compute_loss", "get_batch_samples", "get_train_dataloader", "gather"])
def test_what_somebody_put_over_a_budgets_stays(name: str, partial: bool, tmp_path: Path) -> None:
    """The wrapper stays, and calls the trainer's own method again."""

    def losses(trainer: Any) -> list[float]:
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses(sft(tmp_path))
    trainer = fastpack.patch(sft(tmp_path), max_tokens=60)
    owner = trainer.accelerator if name == "gather" else trainer
    ours, seen = getattr(owner, name), []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append(True)
        return ours(*args, **kwargs)

    if partial:
        theirs = functools.partial(ours)
    setattr(owner, name, theirs)
    fastpack.patch(trainer, max_tokens=75)
    fastpack.unpatch(trainer)
    assert getattr(owner, name) is theirs
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)
    assert seen or partial or name == "gather", "which one process has no need of"


def test_refused(tmp_path: Path) -> None:
    for order in ("sequential", "group_by_length"):
        ordered = sft(tmp_path, train_sampling_strategy=order)
        with pytest.raises(PatchError, match=f"train_sampling_strategy='{order}' asks for an order of the data"):
            fastpack.patch(ordered, max_tokens=60)
        assert fastpack.patch(ordered, max_tokens=TokenBudget(60, same_steps=True)) is ordered
    with pytest.raises(PatchError, match="same_steps keeps the batches of the trainer"):
        fastpack.patch(sft(tmp_path), max_tokens=TokenBudget(20, same_steps=True, too_long="truncate"))
    packing = SFTTrainer(
        policy(),
        args=alone(SFTConfig(**settings(tmp_path, packing=True, max_length=40))),
        train_dataset=texts(),
        processing_class=word_tokenizer(),
    )
    with pytest.raises(PatchError, match="packing joined examples in one row"):
        fastpack.patch(packing, max_tokens=TokenBudget(30, too_long="truncate"))
    with pytest.raises(PatchError, match="SFTTrainer: packing joins a batch into one row; turn it off, or leave same"):
        fastpack.patch(packing, max_tokens=TokenBudget(80, same_steps=True))
    assert fastpack.patch(packing, max_tokens=80) is packing


@pytest.mark.parametrize("known", [True, False])
def test_same_steps_need_rows(known: bool, tmp_path: Path) -> None:
    """One row of a whole batch can't be split; a user's own collator is only noticed at its first such row."""
    flattening = DataCollatorWithFlattening()
    like = plain(tmp_path, per_device_train_batch_size=6, max_steps=1)
    inputs = {"args": like.args, "train_dataset": like.train_dataset}
    budget = TokenBudget(75, same_steps=True)
    if known:
        trainer = Trainer(policy(), data_collator=fastpack.with_packed_seq_lens(flattening), **inputs)
        with pytest.raises(PatchError, match="DataCollatorWithFlattening joins a batch into one row"):
            fastpack.patch(trainer, max_tokens=budget)
        assert not fastpack.is_patched(trainer.model), "nothing was changed"
        fastpack.patch(trainer, max_tokens=75).train()
        return
    trainer = fastpack.patch(
        Trainer(policy(), data_collator=lambda rows: flattening(rows), **inputs), max_tokens=budget
    )
    with pytest.raises(PackingError, match=r"one row of \d+ tokens, more than max_tokens=75"):
        trainer.train()


def test_a_sampler_of_the_users_own(tmp_path: Path) -> None:
    class Weighted(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return WeightedRandomSampler([1.0] * EXAMPLES, EXAMPLES)

    like = plain(tmp_path)
    inputs = {"args": like.args, "train_dataset": like.train_dataset, "data_collator": like.data_collator}
    with pytest.raises(PatchError, match="its own _get_train_sampler"):
        fastpack.patch(Weighted(policy(), **inputs), max_tokens=75)
    trainer = Weighted(policy(), **inputs)
    assert fastpack.patch(trainer, max_tokens=TokenBudget(75, same_steps=True)) is trainer


@pytest.mark.parametrize("make", [sft, dpo, kto, plain])
def test_experts_are_balanced_once_a_micro_batch(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = tiny_model("mixtral", attn_implementation="sdpa", output_router_logits=True)
    monkeypatch.setattr("trainer_cases.policy", lambda **further: copy.deepcopy(experts) if further else experts)
    off = "output_router_logits=False in the model's config" if make is plain else "router_aux_loss_coef=0.0"
    with pytest.raises(PatchError, match=f"auxiliary loss of experts .* each piece: set {off}, or leave same_steps"):
        fastpack.patch(make(tmp_path), max_tokens=TokenBudget(160, same_steps=True))
    assert fastpack.report(experts).tier == "stock", "nothing was changed"
    trainer = make(tmp_path)
    assert fastpack.patch(trainer, max_tokens=160) is trainer
    if make is not plain:
        unbalanced = make(tmp_path, router_aux_loss_coef=0.0)
        assert fastpack.patch(unbalanced, max_tokens=TokenBudget(160, same_steps=True)) is unbalanced


def test_model_init(tmp_path: Path) -> None:
    """``train()`` replaces the patched model, so this is refused unless ``model_init`` patches each new one."""
    like = plain(tmp_path, max_steps=1)
    inputs = {"args": like.args, "train_dataset": like.train_dataset, "data_collator": like.data_collator}
    with pytest.raises(PatchError, match="calls its model_init for a new model"):
        fastpack.patch(Trainer(model_init=lambda: policy(), **inputs))
    trainer = fastpack.patch(Trainer(model_init=lambda: fastpack.patch(policy()), **inputs), max_tokens=75)
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert fastpack.is_patched(trainer.model)
    assert "max_tokens=75: " in str(fastpack.report(trainer))


def test_trainers_of_trl_that_are_not_known(tmp_path: Path) -> None:
    """ORPO has other batches and another loss than the ``Trainer`` that it inherits from."""
    orpo = pytest.importorskip("trl.experimental.orpo")
    trainer = orpo.ORPOTrainer(
        policy(),
        args=alone(orpo.ORPOConfig(**settings(tmp_path, max_length=64))),
        train_dataset=pairs(EXAMPLES),
        processing_class=word_tokenizer(),
    )
    with pytest.raises(PatchError, match="not a ORPOTrainer"):
        fastpack.patch(trainer, max_tokens=200)

    class Mine(type(sft(tmp_path))):  # type: ignore[misc]
        pass

    known = sft(tmp_path)
    known.__class__ = Mine
    assert loss_unit_of(known) is loss_unit_of(sft(tmp_path)), "a user's own class is what it inherits from"
