"""Trainers of every kind on the same small language, and helpers that record their batches and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from other_trainer_cases import share_of_low_words
from preferences import alone, judged, pairs, settings, word_tokenizer
from tiny import tiny_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

EXAMPLES = 24


def texts(count: int = EXAMPLES, seed: int = 0) -> Dataset:
    return Dataset.from_list([{"text": row["prompt"] + row["chosen"]} for row in pairs(count, seed)])


def policy(**further: Any) -> Any:
    return tiny_model("llama", attn_implementation="sdpa", **further)


def sft(folder: Path, data: Dataset | None = None, **further: Any) -> Any:
    return SFTTrainer(
        policy(),
        args=alone(SFTConfig(**settings(folder, **{"max_length": None, **further}))),
        train_dataset=texts() if data is None else data,
        processing_class=word_tokenizer(),
    )


def dpo(folder: Path, data: Dataset | None = None, **further: Any) -> Any:
    return DPOTrainer(
        policy(),
        ref_model=policy(seed=1),
        args=alone(DPOConfig(**settings(folder, **{"max_length": None, **further}))),
        train_dataset=pairs(EXAMPLES) if data is None else data,
        processing_class=word_tokenizer(),
    )


def kto(folder: Path, data: Dataset | None = None, **further: Any) -> Any:
    return KTOTrainer(
        policy(),
        ref_model=policy(seed=1),
        args=alone(KTOConfig(**settings(folder, max_length=None, **{"loss_type": "apo_zero_unpaired", **further}))),
        train_dataset=judged(EXAMPLES) if data is None else data,
        processing_class=word_tokenizer(),
    )


def reward(folder: Path, data: Dataset | None = None, **further: Any) -> Any:
    return RewardTrainer(
        policy(auto=AutoModelForSequenceClassification, num_labels=1),
        args=alone(RewardConfig(**settings(folder, max_length=None, **further))),
        train_dataset=pairs(EXAMPLES) if data is None else data,
        processing_class=word_tokenizer(),
    )


def plain(folder: Path, data: Dataset | None = None, **further: Any) -> Any:
    """Build transformers' own Trainer on token ids."""
    tokenizer = word_tokenizer()
    tokenizer.padding_side = "right"  # left, stock predicts each first token from padding
    rows = texts() if data is None else data
    ids = [tokenizer(row["text"])["input_ids"] for row in rows]

    def collate(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        batch = tokenizer.pad([{"input_ids": example["input_ids"]} for example in examples], return_tensors="pt")
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    return Trainer(
        policy(),
        args=alone(TrainingArguments(**settings(folder, **further))),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        data_collator=collate,
    )


def _generating(trainer: Any, config: Any, folder: Path, model: Any = None, **further: Any) -> Any:
    sampling: dict[str, Any] = {"num_generations": 2, "max_completion_length": 12, "temperature": 1.0}
    steps = {"per_device_train_batch_size": 8, "max_steps": 2, "gradient_accumulation_steps": 2}
    return trainer(
        policy() if model is None else model,
        reward_funcs=share_of_low_words,
        args=alone(config(**settings(folder, **{**sampling, **steps, **further}))),
        train_dataset=pairs(16).remove_columns(["chosen", "rejected"]),
        processing_class=word_tokenizer(),
    )


def grpo(folder: Path, **further: Any) -> Any:
    return _generating(GRPOTrainer, GRPOConfig, folder, **further)


def rloo(folder: Path, **further: Any) -> Any:
    return _generating(RLOOTrainer, RLOOConfig, folder, beta=0.0, **further)


BUILD: dict[str, Callable[..., Any]] = {"sft": sft, "dpo": dpo, "kto": kto, "reward": reward, "plain": plain}
DATA: dict[str, Callable[[], Dataset]] = {
    "sft": texts,
    "plain": texts,
    "dpo": lambda: pairs(EXAMPLES),
    "reward": lambda: pairs(EXAMPLES),
    "kto": lambda: judged(EXAMPLES),
}


class Gradients(TrainerCallback):
    """A callback that records the gradients of each optimiser step, before anything clips or uses them."""

    def __init__(self, trainer: Any) -> None:
        self.steps: list[dict[str, Tensor]] = []
        trainer.args.max_grad_norm = 0.0
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.steps.append({name: whole_on_cpu(p.grad) for name, p in named if p.grad is not None})


def whole_on_cpu(tensor: Any) -> Tensor:
    """Return a copy on the CPU, whole if the tensor is sharded."""
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result.detach().to("cpu", copy=True)


def watch_batches(trainer: Any) -> list[list[tuple[int, ...]]]:
    """Record each batch that the collator gets: all ids of each example."""
    seen: list[list[tuple[int, ...]]] = []
    collate = trainer.data_collator

    def watched(examples: list[dict[str, Any]]) -> Any:
        seen.append([ids_of(example) for example in examples])
        return collate(examples)

    trainer.data_collator = watched
    return seen


def watch_sizes(trainer: Any) -> list[int]:
    """Record the tokens of each batch whose loss is computed, until ``compute_loss`` is deleted."""
    sizes: list[int] = []
    step = trainer.compute_loss

    def measured(model: Any, inputs: Any, **kwargs: Any) -> Any:
        sizes.append(total(inputs))
        return step(model, inputs, **kwargs)

    trainer.compute_loss = measured
    return sizes


def ids_of(example: dict[str, Any]) -> tuple[int, ...]:
    return tuple(i for name in sorted(example) if name.endswith("_ids") for i in example[name])


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference over the largest value, at least 1e-3 of the largest gradient of all."""
    assert ours.keys() == theirs.keys()
    assert all(bool(g.isfinite().all()) for g in (*ours.values(), *theirs.values())), "else max() may skip it"
    floor = 1e-3 * max(float(g.abs().max()) for g in theirs.values())
    return max(
        float((mine - theirs[name]).abs().max()) / max(float(theirs[name].abs().max()), floor)
        for name, mine in ours.items()
    )


def total(batch: Any) -> int:
    """Return the number of real tokens of a collated batch."""
    return int(torch.as_tensor(batch["attention_mask"]).sum())
