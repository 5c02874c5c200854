"""The update of TRL's ``GRPOTrainer`` on rollouts that are drawn instead of generated, so that it alone is timed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from fastpack.bench.callbacks import LearnLater
from fastpack.bench.images import ImageCollator
from fastpack.bench.lengths import make_rows
from fastpack.bench.models import lora_config, patch
from fastpack.bench.rows import image_collator, training_rows
from fastpack.bench.settings import GENERATIONS, RunSettings
from fastpack.bench.shapes import has_images, make_config
from fastpack.testing.id_tokenizer import tokenizer_of_ids

Rollouts = dict[str, Any]
"""The rollouts of one update of a ``GRPOTrainer``: padded prompts and completions, their masks, and advantages."""


class DrawnRollouts(GRPOTrainer):
    """A ``GRPOTrainer`` that gets its rollouts instead of generating and scoring them.

    Args:
        rollouts: those of each step.
        **arguments: the trainer's own arguments.
    """

    def __init__(self, rollouts: Iterator[Rollouts], **arguments: Any) -> None:
        """Set up the trainer with its rollouts."""
        super().__init__(**arguments)
        self._rollouts = rollouts

    def _generate_and_score_completions(self, inputs: Any) -> Rollouts:
        device = self.accelerator.device
        return {name: _moved(value, device) for name, value in next(self._rollouts).items()}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def grpo_trainer(model: Any, settings: RunSettings, arguments: dict[str, Any]) -> Any:
    """Return the ``GRPOTrainer`` of a variant: every step updates once with new rollouts, without a reference."""
    size = settings.rows * GENERATIONS
    trainer = DrawnRollouts(
        make_rollouts(settings),
        model=model,
        reward_funcs=_no_reward,
        args=GRPOConfig(
            **{name: value for name, value in arguments.items() if name not in _NOT_GRPOS},
            per_device_train_batch_size=size,
            num_generations=GENERATIONS,
            steps_per_generation=1,
        ),
        train_dataset=Dataset.from_list([{"prompt": "<s>"}] * size),
        processing_class=tokenizer_of_ids(),
        peft_config=lora_config(settings) if settings.mode != "full" else None,
        callbacks=[LearnLater()],
    )
    if settings.spec.patched:
        patch(trainer, settings)
    return trainer


_NOT_GRPOS = ("max_length", "train_sampling_strategy", "per_device_train_batch_size")


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def make_rollouts(settings: RunSettings) -> Iterator[Rollouts]:
    """Yield the rollouts of each step: prompts, each with the same image for all of its completions."""
    config = make_config(settings.shape)
    prompts = iter(training_rows(settings))
    vocabulary = min(config.get_text_config().vocab_size, getattr(config, "vision_start_token_id", 1 << 30))
    completions = iter(make_rows(settings.completion_lengths(), vocabulary, settings.seed + 1))
    advantages = torch.randn(settings.total_steps, settings.rows * GENERATIONS, generator=torch.manual_seed(0))
    pixels = image_collator(settings) if has_images(settings.shape) else None
    for own in advantages:
        rows = [row for row in islice(prompts, settings.rows) for _ in range(GENERATIONS)]
        prompt_ids, prompt_mask = _padded([row["input_ids"] for row in rows], left=True)
        completion_ids, completion_mask = _padded(list(islice(completions, len(rows))), left=False)
        yield {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": own,
            "num_items_in_batch": completion_mask.sum(),
            **({} if pixels is None else _images(pixels, rows, prompt_ids, completion_ids)),
        }


def _images(pixels: ImageCollator, rows: list[dict[str, Any]], prompt_ids: Tensor, completion_ids: Tensor) -> Rollouts:
    types = (prompt_ids == pixels.image_token).long()
    grids = torch.tensor([[1, *row["grid"]] for row in rows])
    sizes = grids.prod(1).tolist()
    own = {tuple(row["grid"]): pixels.of(size) for row, size in zip(rows, sizes, strict=True)}
    return {
        "pixel_values": torch.cat([own[tuple(row["grid"])] for row in rows]),
        "image_grid_thw": grids,
        "num_images": [1] * len(rows),
        "mm_token_type_ids": torch.cat([types, torch.zeros_like(completion_ids)], 1),
    }


def _padded(rows: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    """Return ids and mask, ``[B, S]``."""
    longest = max(map(len, rows))
    padding = [[0] * (longest - len(row)) for row in rows]
    pairs = list(zip(rows, padding, strict=True))
    ids = torch.tensor([pad + row if left else row + pad for row, pad in pairs])
    ones = [([0] * len(pad), [1] * len(row)) for row, pad in pairs]
    return ids, torch.tensor([pad + real if left else real + pad for pad, real in ones])
