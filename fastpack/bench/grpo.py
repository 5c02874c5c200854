"""The update of TRL's ``GRPOTrainer``."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from fastpack.bench.callbacks import LearnLater
from fastpack.bench.models import lora_config, patch
from fastpack.bench.rollouts import DrawnRollouts, make_rollouts, rollout_arguments
from fastpack.bench.settings import RunSettings
from fastpack.testing.id_tokenizer import tokenizer_of_ids


class DrawnGRPO(DrawnRollouts, GRPOTrainer):
    """A ``GRPOTrainer`` on drawn rollouts."""


def grpo_trainer(model: Any, settings: RunSettings, arguments: dict[str, Any]) -> Any:
    """Return the ``GRPOTrainer`` of a variant: every step updates once with new rollouts, without a reference."""
    trainer = DrawnGRPO(
        make_rollouts(settings),
        model=model,
        reward_funcs=_no_reward,
        args=GRPOConfig(
            **rollout_arguments(settings, arguments),
            num_generations=settings.generations,
            steps_per_generation=settings.micro_batches,
            use_liger_kernel=settings.spec.liger,
        ),
        train_dataset=Dataset.from_list([{"prompt": "<s>"}] * settings.rows * settings.generations),
        processing_class=tokenizer_of_ids(),
        peft_config=lora_config(settings) if settings.mode != "full" else None,
        callbacks=[LearnLater()],
    )
    if settings.spec.patched:
        patch(trainer, settings)
    return trainer


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)
