"""A contestant of ``fastpack bench --trainer dpo``: TRL's unmodified ``DPOTrainer`` on pairs of random tokens."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch

from fastpack.bench.clock import Clock
from fastpack.bench.lengths import Pair
from fastpack.bench.loops import (
    GATE_STEPS,
    LEARNING_RATE,
    clock_callback,
    logged_of_first_steps,
    trainer_arguments,
)
from fastpack.bench.models import lora_config, patch
from fastpack.bench.settings import Settings
from fastpack.bench.variants import CONTESTANTS
from fastpack.testing.id_tokenizer import tokenizer_of_ids


def train_with_dpo(
    model: Any, backend: str, settings: Settings, vocabulary: int, clock: Clock
) -> tuple[list[float], list[float], str]:
    """As a user would call it. Returns loss and norm of the gradients of the first steps, and the attention kernel.

    With LoRA the reference is the policy with its adapters off, else a copy. ``backend`` is the stock model's. Nothing
    is learned in the first steps, which are compared: see :func:`learn_later`.
    """
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    lora = settings.mode != "full"
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(**trainer_arguments(settings, folder))
        trainer = DPOTrainer(
            model,
            ref_model=None if lora else copy.deepcopy(model),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "<s>", "chosen": "<s>", "rejected": "<s>"}]),
            processing_class=tokenizer_of_ids(),
            peft_config=lora_config() if lora else None,
            callbacks=[clock_callback(clock), learn_later()],
        )
        # which tokenizes texts and takes nothing else; these are token ids already
        trainer.train_dataset = Dataset.from_list(make_pairs(settings.pair_lengths(), vocabulary, settings.seed))
        if CONTESTANTS[settings.contestant].patched:
            backend = patch(trainer, settings)
        trainer.train()
    return *logged_of_first_steps(trainer), backend


def learn_later() -> Any:
    """What holds the learning rate at 0 while contestants are compared.

    A reward is beta times the difference of two log-probabilities near -7,000 (700 tokens of random weights), each a
    sum of terms that half precision rounds by some hundredths. As soon as policy and reference differ, however little,
    that leaves noise of some hundredths in a loss of 0.7, and of a sixth in the gradients' norm. As long as they are
    the same computation they round alike: the norms of stock and patched models agree to 1e-3.
    """
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            for group in given["optimizer"].param_groups:
                group["lr"] = LEARNING_RATE if state.global_step >= GATE_STEPS else 0.0

    return Callback()


def make_pairs(lengths: list[Pair], vocab_size: int, seed: int) -> list[dict[str, list[int]]]:
    """Random tokens, pairs of these lengths, under the names that TRL's collator reads."""
    generator = torch.Generator().manual_seed(seed)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [
        {
            name: torch.randint(3, vocab_size, (length,), generator=generator).tolist()
            for name, length in zip(names, pair, strict=True)
        }
        for pair in lengths
    ]
