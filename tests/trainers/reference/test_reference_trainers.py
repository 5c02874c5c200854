"""TRL's trainers: references precomputed without padding equal TRL's on padded batches, and so do the steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapter_cases import lora_config
from backbone_calls import Calls
from dpo_cases import check_equal, dpo
from preferences import STEPS, logged, pairs, settings, word_tokenizer
from references import BOUND, Scoring, judged_trainer, off_by, pair_trainer, policy
from tiny import tiny_model
from trl import DPOConfig, DPOTrainer

import fastpack
from fastpack.errors import PackingError, PatchError
from fastpack.trainers.reference import MissingReferenceError, ReferenceCacheError, precompute, with_reference_log_probs
from fastpack.trainers.reference.compute import PAIR_COLUMNS

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dpo": (pair_trainer, {}),
    "dpo, base of LoRA": (pair_trainer, {"peft": "base"}),
    "dpo, copy of the adapter": (pair_trainer, {"peft": "a copy of the adapter"}),
    "dpo, length-desensitised": (pair_trainer, {"ld_alpha": 0.4}),
    "dpo, nothing of the rest": (pair_trainer, {"ld_alpha": 0.0}),
    "dpo, cut at the end": (pair_trainer, {"max_length": 14}),
    "dpo, cut at the beginning": (pair_trainer, {"max_length": 14, "truncation_mode": "keep_end"}),
    "dpo, padded further": (pair_trainer, {"pad_to_multiple_of": 32}),
    "kto": (judged_trainer, {}),
    "kto, cut": (judged_trainer, {"max_length": 14}),
    "kto, no KL": (judged_trainer, {"loss_type": "apo_zero_unpaired"}),
}


@pytest.mark.parametrize("name", CASES)
def test_as_trl_precomputes_them(name: str, tmp_path: Path, calls: Calls) -> None:
    build, further = CASES[name]
    stock = build(tmp_path, precompute_ref_log_probs=True, **further)
    assert not calls.all
    ours = precompute(build(tmp_path, **further), folder=tmp_path / "cache", max_tokens=128)
    assert calls.all, "packed attention ran"
    assert max(calls.all) <= 128
    assert ours.precompute_ref_logps
    assert off_by(ours.train_dataset, stock.train_dataset) <= BOUND
    if ours.eval_dataset is not None:
        assert off_by(ours.eval_dataset, stock.eval_dataset) <= BOUND
    real = {
        tuple(row[mask.bool()].tolist())
        for example in stock.train_dataset
        for prefix in ("", "KL_")
        if f"{prefix}input_ids" in (batch := stock.data_collator([example]))
        for row, mask in zip(batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"], strict=True)
    }
    assert sum(calls.all) >= 2 * sum(map(len, real)), "each sequence, in both layers"
    assert not fastpack.is_patched(ours.model)


def test_in_bf16(tmp_path: Path) -> None:
    """Under the trainer's autocast, the error against float32 is as large as TRL's."""
    exact = pair_trainer(tmp_path, precompute_ref_log_probs=True).train_dataset
    stock = pair_trainer(tmp_path, precompute_ref_log_probs=True, bf16=True).train_dataset
    ours = precompute(pair_trainer(tmp_path, bf16=True), folder=tmp_path / "cache").train_dataset
    assert 1e-4 < off_by(ours, exact) <= 1.5 * off_by(stock, exact)
    with pytest.raises(ReferenceCacheError, match=r"autocast: torch\.bfloat16 there, None here"):
        precompute(pair_trainer(tmp_path), folder=tmp_path / "cache")


def test_collators_that_are_wrapped(tmp_path: Path) -> None:
    stock = pair_trainer(tmp_path, precompute_ref_log_probs=True, max_length=14)
    ours = pair_trainer(tmp_path, max_length=14)
    ours.data_collator = fastpack.with_packed_seq_lens(ours.data_collator)
    assert off_by(precompute(ours, folder=tmp_path / "cache").train_dataset, stock.train_dataset) <= BOUND


def test_negative_control(tmp_path: Path) -> None:
    """The comparison tells the policy from the reference, and a whole completion from a truncated one."""
    stock = pair_trainer(tmp_path, precompute_ref_log_probs=True)
    plain = stock.train_dataset.remove_columns(list(PAIR_COLUMNS))
    assert off_by(with_reference_log_probs(plain, policy(1), folder=tmp_path / "1"), stock.train_dataset) <= BOUND
    assert off_by(with_reference_log_probs(plain, policy(0), folder=tmp_path / "2"), stock.train_dataset) > 1e-3
    cut = pair_trainer(tmp_path, max_length=14)
    assert off_by(precompute(cut, folder=tmp_path / "3").train_dataset, stock.train_dataset) > 1e-2


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_judged_data_for_loops_of_ones_own(loss_type: str, tmp_path: Path) -> None:
    stock = judged_trainer(tmp_path, precompute_ref_log_probs=True, loss_type=loss_type).train_dataset
    names = [name for name in ("ref_logps", "ref_KL_logps") if name in stock.column_names]
    assert len(names) == (2 if loss_type == "kto" else 1)
    result = with_reference_log_probs(stock.remove_columns(names), policy(1), folder=tmp_path / "cache", ld_alpha=0.5)
    assert off_by(result, stock) <= BOUND


STEPPED: dict[str, dict[str, Any]] = {
    "its own reference": {},
    "length-desensitised": {"ld_alpha": 0.5},
    "lora": {"lora": True},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STEPPED)
def test_dpo_steps_as_with_the_reference_beside(name: str, tmp_path: Path) -> None:
    stock = logged(dpo(tmp_path, patch=None, **STEPPED[name]))
    trainer = precompute(dpo(tmp_path, patch="trainer", **STEPPED[name]), folder=tmp_path / "cache")
    check_equal(logged(trainer), stock)
    with pytest.raises(AssertionError):
        check_equal(logged(dpo(tmp_path, patch=None, reference_seed=3, **{**STEPPED[name], "seed": 7})), stock)


@pytest.mark.slow
def test_kto_steps_as_with_the_reference_beside(tmp_path: Path) -> None:
    stock = logged(judged_trainer(tmp_path))
    ours = logged(precompute(judged_trainer(tmp_path), folder=tmp_path / "cache"))
    assert len(ours) == len(stock) == STEPS
    for mine, theirs in zip(ours, stock, strict=True):
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-5 * abs(theirs["loss"])
        assert abs(mine["kl"] - theirs["kl"]) <= 3e-5


@pytest.mark.slow
def test_the_reference_model_is_set_free(tmp_path: Path) -> None:
    trainer = pair_trainer(tmp_path)
    gone = weakref.ref(trainer.ref_model)
    fastpack.patch(trainer)
    precompute(trainer, folder=tmp_path / "cache")
    gc.collect()
    assert gone() is None
    assert fastpack.is_patched(trainer.model)
    trainer.train()
    # the control: it is not, where nothing is precomputed
    trainer = pair_trainer(tmp_path)
    gone = weakref.ref(trainer.ref_model)
    trainer.train()
    gc.collect()
    assert gone() is not None


@pytest.mark.slow
def test_evaluate_on_data_of_its_own_with_the_reference_inside(tmp_path: Path) -> None:
    """Before and after training, the reference is the policy without its adapter, as in TRL."""
    stock, ours = pair_trainer(tmp_path, peft="base"), pair_trainer(tmp_path, peft="base")
    precompute(ours, folder=tmp_path / "cache")
    for _ in range(2):
        for data in (pairs(5, seed=2), {"a": pairs(5, seed=2), "b": pairs(3, seed=4)}):
            want, result = stock.evaluate(data), ours.evaluate(data)
            losses = [name for name in want if name.endswith("_loss")]
            assert len(losses) == (2 if isinstance(data, dict) else 1)
            for name in losses:
                assert abs(result[name] - want[name]) <= 1e-5 * want[name]
        stock.train()
        ours.train()


@pytest.mark.slow
def test_evaluate_on_data_of_its_own_without_a_reference(tmp_path: Path) -> None:
    """TRL would use the policy as the reference before training (and refuses the data set after it)."""
    stock, trainer = pair_trainer(tmp_path), precompute(pair_trainer(tmp_path), folder=tmp_path / "cache")
    with pytest.raises(MissingReferenceError, match=r"the 5 examples \(eval\) .* freed"):
        trainer.evaluate(pairs(5, seed=2))
    stock.train()
    trainer.train()
    assert abs(trainer.evaluate()["eval_loss"] - stock.evaluate()["eval_loss"]) <= 1e-5
    with pytest.raises(ValueError, match="after training has started"):
        trainer.evaluate(pairs(5, seed=2))


def test_what_training_changed_is_no_reference(tmp_path: Path) -> None:
    """PEFT's ``bias="all"`` trains the base's own biases, which keep their trained values with the adapter off."""
    folder = tmp_path / "cache"
    trainer = DPOTrainer(
        tiny_model("qwen2", attn_implementation="sdpa"),
        args=DPOConfig(**settings(tmp_path, max_length=None)),
        train_dataset=pairs(),
        eval_dataset=pairs(5, seed=1),
        processing_class=word_tokenizer(),
        peft_config=lora_config(bias="all"),
    )
    precompute(trainer, folder=folder)
    trainer.evaluate(pairs(5, seed=2))
    trainer.train()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ReferenceCacheError, match=r"another reference: weights: "):
        trainer.evaluate(pairs(5, seed=3))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_several_sets_to_evaluate_on(tmp_path: Path) -> None:
    trainer = pair_trainer(tmp_path)
    trainer.eval_dataset = {"a": trainer.eval_dataset, "b": trainer.eval_dataset.select([2, 1])}
    precompute(trainer, folder=tmp_path / "cache")
    assert list(trainer.eval_dataset) == ["a", "b"]
    a, b = (trainer.eval_dataset[name]["ref_chosen_logps"][:] for name in "ab")
    assert b == [a[2], a[1]]


def test_a_run_again_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Scoring(monkeypatch)
    first = precompute(pair_trainer(tmp_path), folder=tmp_path / "cache")
    assert counts.batches
    counts.batches = []
    second = precompute(pair_trainer(tmp_path), folder=tmp_path / "cache")
    assert not counts.batches
    assert first.train_dataset["ref_chosen_logps"][:] == second.train_dataset["ref_chosen_logps"][:]


def test_trainers_that_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(PatchError, match="has no reference model"):
        precompute(object(), folder=folder)
    synced = pair_trainer(tmp_path, sync_ref_model=True)
    with pytest.raises(PatchError, match="sync_ref_model"):
        precompute(synced, folder=folder)
    with pytest.raises(PackingError, match="ref_chosen_logps and ref_rejected_logps already"):
        precompute(pair_trainer(tmp_path, precompute_ref_log_probs=True), folder=folder)
    other = pair_trainer(tmp_path)
    other.train_dataset = other.train_dataset.to_iterable_dataset()
    with pytest.raises(PackingError, match=r"data \(train\) is a IterableDataset.*streaming"):
        precompute(other, folder=folder)
    assert other.ref_model is not None
    assert not other.precompute_ref_logps
    assert not folder.exists()
    twice = precompute(pair_trainer(tmp_path), folder=folder)
    with pytest.raises(PatchError, match="no reference"):
        precompute(twice, folder=folder)
