"""Odd groups and references: prompts that differ in one token, empty completions, groups of one, other vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapter_cases import with_lora
from datasets import Dataset
from every_trainer import LAYERS, SETTINGS, RealTokens, check_logs, check_weights
from experimental_trainers import distillation, gkd
from grpo_cases import GROUP, OF_ADVANTAGES, LayerTokens, Rollouts, grpo
from oracle import FLOAT32_BOUND
from preferences import alone, judged, logged, pairs, settings, word_tokenizer
from prefix_cases import sharing
from tiny import VOCAB
from trainer_cases import policy
from trl import DPOConfig, DPOTrainer, GRPOConfig, KTOConfig, KTOTrainer, RLOOConfig

import fastpack

pytestmark = pytest.mark.usefixtures("accelerate_afresh")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"share_prefixes": "auto", "loss": "fused"})


def check_same(
    build: Callable[[], Any], of_loss: float = 1e-2 * FLOAT32_BOUND, **options: Any
) -> tuple[Any, LayerTokens]:
    """Train stock and patched, compare them, and return the patched trainer and the tokens that reached its layers."""
    stock = build()
    theirs = logged(stock)
    ours = fastpack.patch(build(), **options)
    tokens = LayerTokens(ours, shared="share_prefixes" in options)
    check_logs(logged(ours), theirs, of_loss=of_loss)
    check_weights(ours, stock)
    assert tokens.seen == tokens.expected
    assert any(step["grad_norm"] > 0 for step in theirs)
    return ours, tokens


def alike(at: int) -> Dataset:
    """Return prompts of eight words that are equal but for the word at this place."""
    words = [f"w{40 + i}" for i in range(8)]
    return Dataset.from_list([{"prompt": " ".join([*words[:at], f"w{3 + i}", *words[at + 1 :]])} for i in range(12)])


@pytest.mark.sample(3)
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("at", [0, 4, 7])
def test_prompts_that_differ_in_one_token(at: int, lora: bool, tmp_path: Path) -> None:
    def build() -> Any:
        trainer = grpo(tmp_path, lora=lora, per_device_train_batch_size=3 * GROUP, steps_per_generation=1)
        trainer.train_dataset = alike(at)
        return trainer

    _, tokens = check_same(build, OF_ADVANTAGES, share_prefixes="auto", loss="fused")
    batches = len(tokens.expected) // LAYERS
    different = at + 3 * (8 - at)  # the token that differs, and all after it
    assert 0 <= tokens.saved / batches - (3 * GROUP * 8 - different) < 3, "completions seldom begin alike"


@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
def test_a_completion_of_no_tokens_is_refused_by_trl(patched: bool, tmp_path: Path) -> None:
    class Empty(Rollouts):
        def _completion(self) -> list[int]:
            ids = super()._completion()
            return ids if len(ids) > 1 else []

    trainer = grpo(tmp_path, rollouts=Empty)
    if patched:
        fastpack.patch(trainer, share_prefixes="auto", loss="fused")
    with pytest.raises(IndexError):
        trainer.train()


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "shared and fused"])
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("trainer", [DPOTrainer, KTOTrainer], ids=["dpo", "kto"])
def test_empty_completions(trainer: Any, lora: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """A completion without text is the end token alone."""
    config, names, data = {
        DPOTrainer: (DPOConfig, ("chosen", "rejected"), pairs()),
        KTOTrainer: (KTOConfig, ("completion",), judged()),
    }[trainer]
    rows = [{**row, names[i % len(names)]: ""} if i % 3 == 0 else row for i, row in enumerate(data)]

    def build() -> Any:
        return trainer(
            with_lora(policy()) if lora else policy(),
            ref_model=None if lora else policy(seed=1),
            args=alone(config(**settings(tmp_path, max_length=None, **SETTINGS))),
            train_dataset=Dataset.from_list(rows),
            processing_class=word_tokenizer(),
        )

    ours, _ = check_same(build, **options)
    lengths = [len(row[f"{name}_ids"]) for row in ours.train_dataset for name in names]
    assert min(lengths) == 1, "the end token"


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_a_group_of_one_is_refused_by_trl(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2 generations"):
        config(**settings(tmp_path, num_generations=1))


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "shared and fused"])
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_micro_batches_of_one_row(lora: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """A group is spread over the micro-batches of a step, each of which has one row of it."""

    def build() -> Any:
        sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": GROUP, "num_iterations": 2}
        return grpo(tmp_path, lora=lora, **sizes, beta=0.1)

    ours, tokens = check_same(build, OF_ADVANTAGES, **options)
    assert tokens.saved == 0
    if options:
        stats = sharing(ours.model).stats
        assert (stats.shared, dict(stats.whole)) == (0, {"there is one sequence": stats.batches})


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "shared and fused"])
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_evaluation_of_one_completion(lora: bool, options: dict[str, Any], tmp_path: Path) -> None:
    def build() -> Any:
        trainer = grpo(tmp_path, lora=lora, num_generations_eval=1, per_device_eval_batch_size=3, beta=0.1)
        trainer.eval_dataset = trainer.train_dataset
        return trainer

    stock = build()
    theirs, expected = logged(stock), stock.evaluate()  # trained first, since a reference begins equal to the adapters
    ours = fastpack.patch(build(), **options)
    check_logs(logged(ours), theirs, of_loss=OF_ADVANTAGES)
    check_logs([ours.evaluate()], [expected])
    assert expected["eval_loss"] == pytest.approx(0.1 * expected["eval_kl"])
    assert expected["eval_kl"] > 0


def preference(vocabulary: int, folder: Path) -> Any:
    """Return a DPO trainer whose reference has a vocabulary of its own."""
    return DPOTrainer(
        policy(),
        ref_model=policy(seed=1, vocab_size=vocabulary),
        args=alone(DPOConfig(**settings(folder, max_length=None, **SETTINGS))),
        train_dataset=pairs(),
        processing_class=word_tokenizer(),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "shared and fused"])
def test_a_reference_of_a_larger_vocabulary(options: dict[str, Any], tmp_path: Path) -> None:
    """Each model's log-probabilities are of its own vocabulary, as in stock."""
    ours, _ = check_same(lambda: preference(VOCAB + 9, tmp_path), **options)
    assert ours.ref_model.config.vocab_size == VOCAB + 9


@pytest.mark.parametrize("options", [None, *OPTIONS], ids=["stock", "plain", "shared and fused"])
def test_a_reference_of_a_smaller_vocabulary(options: dict[str, Any] | None, tmp_path: Path) -> None:
    """Ids that the reference does not have raise in its embedding, patched or not."""
    trainer = preference(VOCAB - 30, tmp_path)
    if options is not None:
        fastpack.patch(trainer, **options)
    with pytest.raises(IndexError, match="index out of range"):
        trainer.train()


def taught(build: Callable[..., Any], folder: Path, vocabulary: int = VOCAB + 9) -> Any:
    """Return a trainer whose teacher was exchanged: with such a vocabulary, TRL builds none."""
    trainer = build(folder, **SETTINGS)
    trainer.teacher_model = policy(seed=1, vocab_size=vocabulary).eval()
    return trainer


def test_a_teacher_of_another_vocabulary_in_gkd(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="equal size") as stock:
        taught(gkd, tmp_path).train()
    with pytest.raises(RuntimeError, match="equal size") as ours:
        fastpack.patch(taught(gkd, tmp_path)).train()
    assert str(ours.value) == str(stock.value)


def test_a_teacher_of_another_vocabulary_in_distillation(tmp_path: Path) -> None:
    """TRL's loss reads both heads, and does not compare their sizes."""
    stock = taught(distillation, tmp_path)
    theirs = logged(stock)
    trainer = fastpack.patch(taught(distillation, tmp_path))
    real = RealTokens(trainer)
    check_logs(logged(trainer), theirs)
    check_weights(trainer, stock)
    assert all(real.seen.values())
    assert theirs != logged(taught(distillation, tmp_path, VOCAB)), "the vocabulary matters"


def test_negative_control(tmp_path: Path) -> None:
    """The comparison fails with a reference of other weights."""
    stock = logged(preference(VOCAB + 9, tmp_path))
    other = fastpack.patch(preference(VOCAB + 8, tmp_path))
    with pytest.raises(AssertionError):
        check_logs(logged(other), stock)
