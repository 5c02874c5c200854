"""TRL's DPO trainer on preferences of a small language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapter_cases import with_lora
from preferences import STEPS, pairs, settings, word_tokenizer
from tiny import tiny_model
from trl import DPOConfig, DPOTrainer

import fastpack

BETA = 0.1
LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)
"""Every ``loss_type`` of TRL's ``DPOConfig``."""
SMOOTHING = {"exo_pair": 0.1, "robust": 0.1}
"""The label smoothing of the losses that need some."""


def dpo(folder: Path, *, patch: str | None, lora: bool = False, reference_seed: int = 1, **further: Any) -> Any:
    model = tiny_model("llama", attn_implementation="sdpa")
    reference = None if lora else tiny_model("llama", attn_implementation="sdpa", seed=reference_seed)
    if lora:
        model = with_lora(model)
    if patch == "model":
        fastpack.patch(model)
        if reference is not None:
            fastpack.patch(reference)
    trainer = DPOTrainer(
        model,
        ref_model=reference,
        args=DPOConfig(**settings(folder, beta=BETA, max_length=None, **further)),
        train_dataset=pairs(),
        processing_class=word_tokenizer(),
    )
    return fastpack.patch(trainer) if patch == "trainer" else trainer


def check_equal(ours: list[dict[str, float]], stock: list[dict[str, float]]) -> None:
    assert len(ours) == len(stock) == STEPS
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.keys() == theirs.keys()
        largest = max(abs(theirs[f"logps/{side}"]) for side in ("chosen", "rejected"))
        for name, value in theirs.items():
            if name.startswith("rewards/") and name != "rewards/accuracies":
                bound = 2e-6 * BETA * largest + 1e-7
            elif name.startswith("logps/"):
                bound = 2e-6 * abs(value)
            elif name in ("loss", "grad_norm"):
                bound = 1e-5 * abs(value)
            else:
                continue
            assert abs(mine[name] - value) <= bound, (name, mine[name], value)
