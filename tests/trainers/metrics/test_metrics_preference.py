"""Metrics in TRL's preference trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from preferences import STEPS, judged, pairs, word_tokenizer
from preferences import settings as base_settings
from test_metrics import logged
from tiny import tiny_model
from transformers import AutoModelForSequenceClassification
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
)

import fastpack
from fastpack.trainers.metrics import attach
from fastpack.trainers.metrics.flops import read_flops


def tiny() -> Any:
    return tiny_model("llama", attn_implementation="sdpa")


@pytest.mark.parametrize("reference", ["adapters off", "own model", "precomputed"])
def test_dpo(reference: str, tmp_path: Path) -> None:
    """Only completions count as trained; a reference model's forward adds neither tokens nor operations."""
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj"]) if reference == "adapters off" else None
    settings = base_settings(tmp_path, precompute_ref_log_probs=reference == "precomputed")
    trainer = DPOTrainer(
        model=tiny_model("llama", attn_implementation="sdpa"),
        ref_model=tiny_model("llama", attn_implementation="sdpa") if reference == "own model" else None,
        args=DPOConfig(**settings),
        train_dataset=pairs(),
        processing_class=word_tokenizer(),
        peft_config=lora,
    )
    loads: list[tuple[list[int], int, int]] = []
    stock = trainer.data_collator

    def collate(examples: list[dict[str, Any]]) -> Any:
        batch = stock(examples)
        mask = batch["attention_mask"]
        loads.append((mask.sum(-1).tolist(), int(batch["completion_mask"].sum()), mask.numel()))
        return batch

    trainer.data_collator = collate
    callback = attach(trainer, peak_flops=1e10)
    if reference == "precomputed":
        trainer.get_train_dataloader()  # which computes them
        loads.clear()
    plan = read_flops(trainer.model)
    result = logged(trainer)
    flops = 0
    for step, (lengths, completions, slots) in zip(result, loads, strict=False):
        assert (step["real_tokens"], step["trained_tokens"]) == (sum(lengths), completions)
        assert step["padding_tokens"] == slots - sum(lengths)
        flops += plan.of(sum(lengths), [sum(n * (n + 1) // 2 for n in lengths)])
    assert callback.totals["flops"] == flops
    assert len(result) == STEPS


def test_rewards_have_no_trained_tokens(tmp_path: Path) -> None:

    model = tiny_model("llama", auto=AutoModelForSequenceClassification, num_labels=1)
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**base_settings(tmp_path)),
        train_dataset=pairs(),
        processing_class=word_tokenizer(),
    )
    attach(trainer)
    result = logged(trainer)
    assert result[0]["real_tokens"] > 0
    assert not any("trained" in name for name in result[-1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("patch", [False, True])
def test_grpo_and_kto(patch: bool, tmp_path: Path) -> None:
    """Generation doesn't count as work; patched and stock trainers have the same counts."""

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    common = {"train_dataset": pairs().select_columns(["prompt"]), "processing_class": word_tokenizer()}
    sampling = base_settings(tmp_path, num_generations=2, max_completion_length=6)
    grpo = GRPOTrainer(tiny(), args=GRPOConfig(**sampling), reward_funcs=rewards, **common)
    callback = attach(grpo, peak_flops=1e10)
    if patch:
        fastpack.patch(grpo)
    steps = logged(grpo)
    assert len(steps) == STEPS
    assert all(0 < step["trained_tokens"] <= 4 * 6 < step["real_tokens"] for step in steps)
    totals = callback.totals
    # one forward and backward on all tokens
    rough = 3 * 2 * totals["real"] * (sum(p.numel() for p in grpo.model.parameters()) - 97 * 32)
    assert rough < totals["flops"] < 1.2 * rough

    kto = KTOTrainer(
        tiny(),
        ref_model=tiny(),
        args=KTOConfig(**base_settings(tmp_path)),
        train_dataset=judged(),
        processing_class=word_tokenizer(),
    )
    attach(kto)
    if patch:
        fastpack.patch(kto)
    steps = logged(kto)
    assert all(0 < step["trained_tokens"] < step["real_tokens"] for step in steps)


@pytest.mark.parametrize("patch", [False, True])
def test_distillation(patch: bool, tmp_path: Path) -> None:
    """TRL runs the loss as the student's forward; the teacher's tokens don't count."""
    args = DistillationConfig(**base_settings(tmp_path, max_completion_length=6))
    data, teacher = pairs().select_columns(["prompt"]), tiny_model("llama", attn_implementation="sdpa", seed=1)
    trainer = DistillationTrainer(
        tiny(), teacher_model=teacher, args=args, train_dataset=data, processing_class=word_tokenizer()
    )
    attach(trainer)
    if patch:
        fastpack.patch(trainer)
    seen: list[tuple[int, int, int]] = []
    prepare = trainer._prepare_inputs

    def prepared(inputs: Any) -> Any:
        batch = prepare(inputs)
        completions = int(batch["completion_mask"].sum())
        slots = batch["prompt_ids"].numel() + batch["completion_ids"].numel()
        seen.append((int(batch["prompt_mask"].sum()) + completions, completions, slots))
        return batch

    trainer._prepare_inputs = prepared
    steps = logged(trainer)
    assert len(steps) == STEPS
    counted = [(step["real_tokens"], step["trained_tokens"], step["padding_tokens"]) for step in steps]
    assert counted == [(real, trained, slots - real) for real, trained, slots in seen]
