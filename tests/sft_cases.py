"""TRL's SFT trainer on a small language, with every form of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from oracle import FLOAT32_BOUND
from preferences import alone
from preferences import settings as base_settings
from tiny import VOCAB
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainingArguments
from trl import SFTConfig, SFTTrainer

import fastpack

ROWS, STEPS = 4, 8


FEEDS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding_free": {"padding_free": True, "max_length": None},
    "packing": {"packing": True, "max_length": 40},
    "padding_free, multiple of 8": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8},
}


def rows(count: int = ROWS * STEPS, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 33, (count,), generator=generator).tolist()
    ids = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def tokenizer() -> Any:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )


def arguments(folder: Path, **further: Any) -> dict[str, Any]:
    return base_settings(
        folder, **{"per_device_train_batch_size": ROWS, "max_steps": STEPS, "learning_rate": 1e-2, **further}
    )


def config(folder: Path, **further: Any) -> SFTConfig:
    return cast(SFTConfig, alone(SFTConfig(**arguments(folder, **further))))


def plain_config(folder: Path, **further: Any) -> TrainingArguments:
    """Return the arguments of transformers' own Trainer."""
    return cast(TrainingArguments, alone(TrainingArguments(**arguments(folder, **further))))


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(model: nn.Module, folder: Path, *, patch: str | None, **settings: Any) -> tuple[list[float], Any]:
    """Return the loss of each step and the trainer; ``patch`` is ``model``, ``trainer`` or None for stock."""
    if patch == "model":
        fastpack.patch(model)
    trainer = SFTTrainer(model, args=config(folder, **settings), train_dataset=rows(), processing_class=tokenizer())
    if patch == "trainer":
        fastpack.patch(trainer)
    return losses(trainer), trainer


def check_equal(ours: list[float], stock: list[float], bound: float = FLOAT32_BOUND) -> None:
    assert len(ours) == len(stock) == STEPS
    assert len(set(ours)) > STEPS // 2, "it trains"
    for step, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert abs(a - b) <= bound * abs(b), f"step {step}: {a} against {b}"
