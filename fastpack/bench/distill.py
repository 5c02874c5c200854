"""The update of TRL's ``DistillationTrainer``: a student learns a teacher's distribution on given completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from datasets import Dataset
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer

from fastpack.bench.callbacks import LearnLater
from fastpack.bench.models import build_base, lora_config, patch
from fastpack.bench.rollouts import DrawnRollouts, make_rollouts, rollout_arguments
from fastpack.bench.settings import RunSettings
from fastpack.testing.id_tokenizer import tokenizer_of_ids


class DrawnDistillation(DrawnRollouts, DistillationTrainer):
    """A ``DistillationTrainer`` on given completions."""


def distill_trainer(model: Any, settings: RunSettings, arguments: dict[str, Any]) -> Any:
    """Return the ``DistillationTrainer`` of a variant: every step updates once with new completions.

    The teacher is dense and has other random weights than the student. It attends as the student does.
    """
    assert settings.teacher is not None
    teacher, _ = build_base(replace(settings, shape=settings.teacher, seed=settings.seed + 1), model.device)
    trainer = DrawnDistillation(
        make_rollouts(settings),
        model=model,
        teacher_model=teacher.requires_grad_(False).eval(),
        args=DistillationConfig(**rollout_arguments(settings, arguments), use_liger_kernel=settings.spec.liger),
        train_dataset=Dataset.from_list([{"prompt": "<s>"}] * settings.rows),
        processing_class=tokenizer_of_ids(),
        peft_config=lora_config(settings) if settings.mode != "full" else None,
        callbacks=[LearnLater()],
    )
    if settings.spec.patched:
        patch(trainer, settings)
    return trainer
