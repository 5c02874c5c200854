"""Helpers for tests of reference log-probabilities: data, trainers, and expected values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import lora_config, with_lora
from datasets import Dataset
from preferences import judged, pairs, settings, word_tokenizer
from tiny import VOCAB, tiny_model
from torch import Tensor
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from fastpack.trainers.reference import compute
from fastpack.trainers.reference.compute import PAIR_COLUMNS

BOUND, BETA = 1e-6, 0.1
COLUMNS = (*PAIR_COLUMNS, "ref_logps", "ref_KL_logps")


def columns_of(dataset: Any) -> dict[str, Tensor]:
    return {
        name: torch.tensor(dataset[name][:], dtype=torch.float64) for name in COLUMNS if name in dataset.column_names
    }


def off_by(result: Any, want: Any) -> float:
    """Return the largest relative difference of any example's log-probability."""
    ours, theirs = columns_of(result), columns_of(want)
    assert ours.keys() == theirs.keys()
    assert ours
    return max(float(((ours[name] - theirs[name]) / theirs[name]).abs().max()) for name in ours)


def policy(seed: int = 0) -> Any:
    return tiny_model("llama", attn_implementation="sdpa", seed=seed)


def pair_trainer(folder: Path, **further: Any) -> Any:
    """Build a trainer with a reference model; with ``peft``, the reference is the policy's base or adapter copy."""
    peft = further.pop("peft", None)
    model = with_lora(policy()) if peft == "a copy of the adapter" else policy()
    if peft == "base":
        further.setdefault("max_length", None)
    return DPOTrainer(
        model,
        ref_model=None if peft else policy(seed=1),
        args=DPOConfig(**settings(folder, beta=BETA, **{"max_length": None, **further})),
        train_dataset=pairs(),
        eval_dataset=pairs(5, seed=1),
        processing_class=word_tokenizer(),
        peft_config=lora_config() if peft == "base" else None,
    )


def judged_trainer(folder: Path, **further: Any) -> Any:
    return KTOTrainer(
        policy(),
        ref_model=policy(seed=1),
        args=KTOConfig(**settings(folder, **{"max_length": None, **further})),
        train_dataset=judged(),
        processing_class=word_tokenizer(),
    )


def tokenised(count: int = 12, seed: int = 0) -> Dataset:
    """Return pairs of ids as DPOTrainer makes them."""
    generator = torch.Generator().manual_seed(seed)

    def ids(shortest: int, longest: int) -> list[int]:
        length = int(torch.randint(shortest, longest, (), generator=generator))
        return torch.randint(3, VOCAB, (length,), generator=generator).tolist()

    return Dataset.from_list(
        [{"prompt_ids": ids(1, 9), "chosen_ids": ids(1, 20), "rejected_ids": ids(1, 20)} for _ in range(count)]
    )


@torch.no_grad()
def alone(dataset: Any, model: Any) -> Any:
    """Return log-probabilities by the stock model on each sequence alone."""
    for column in ("chosen", "rejected"):
        values = []
        for row in dataset:
            ids = torch.tensor([row["prompt_ids"] + row[f"{column}_ids"]], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
            each = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            values.append(float(each[len(row["prompt_ids"]) - 1 :].sum()))
        dataset = dataset.add_column(f"ref_{column}_logps", values)
    return dataset


class Kill(Exception):
    """An error that ends a run as if the process had been killed."""


class Scoring:
    """A recorder of each batch's sequences, which ends the run before batch number ``end``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[str]] = []
        self.end: int | None = None
        stock = compute._log_probs

        def counted(parts: Any, spec: Any, sequences: Any) -> Tensor:
            if len(self.batches) == self.end:
                raise Kill
            self.batches.append([sequence.id for sequence in sequences])
            return stock(parts, spec, sequences)

        monkeypatch.setattr(compute, "_log_probs", counted)
