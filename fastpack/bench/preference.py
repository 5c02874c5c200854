"""TRL's unmodified ``DPOTrainer`` on pairs of random tokens, for ``fastpack bench --trainer dpo``."""

from __future__ import annotations

import copy
from typing import Any

from transformers import TrainerCallback

from fastpack.bench.lengths import Pair, make_rows
from fastpack.bench.models import lora_config, patch
from fastpack.bench.settings import GATE_STEPS, LEARNING_RATE, Settings
from fastpack.testing.id_tokenizer import tokenizer_of_ids


def dpo_trainer(model: Any, settings: Settings, arguments: dict[str, Any]) -> Any:
    """Return the ``DPOTrainer`` of a variant, as a user would call it.

    With LoRA the reference is the policy with its adapters off, else a copy. Nothing is learned in the first steps,
    which are compared: see :class:`LearnLater`.
    """
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    lora = settings.mode != "full"
    trainer = DPOTrainer(
        model,
        ref_model=None if lora else copy.deepcopy(model),
        args=DPOConfig(**arguments),
        train_dataset=Dataset.from_list([{"prompt": "<s>", "chosen": "<s>", "rejected": "<s>"}]),
        processing_class=tokenizer_of_ids(),
        peft_config=lora_config() if lora else None,
        callbacks=[LearnLater()],
    )
    # which tokenizes texts and takes nothing else; these are token ids already
    pairs = make_pairs(settings.pair_lengths(), model.config.vocab_size, settings.seed)
    trainer.train_dataset = Dataset.from_list(pairs)
    if settings.variant.patched:
        patch(trainer, settings)
    return trainer


class LearnLater(TrainerCallback):
    """Holds the learning rate at 0 while variants are compared.

    A reward is beta times the difference of two log-probabilities near -7,000 (700 tokens of random weights), each a
    sum of terms that half precision rounds by some hundredths. As soon as policy and reference differ, however little,
    that leaves noise of some hundredths in a loss of 0.7, and of a sixth in the gradients' norm. As long as they are
    the same computation they round alike: the norms of stock and patched models agree to 1e-3.
    """

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Set the step's learning rate."""
        for group in given["optimizer"].param_groups:
            group["lr"] = LEARNING_RATE if state.global_step >= GATE_STEPS else 0.0


def make_pairs(lengths: list[Pair], vocabulary: int, seed: int) -> list[dict[str, list[int]]]:
    """Return pairs of these lengths of random tokens, under the names that TRL's collator reads."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = iter(make_rows([length for pair in lengths for length in pair], vocabulary, seed))
    return [{name: next(rows) for name in names} for _ in lengths]
