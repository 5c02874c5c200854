"""Rollouts that are drawn instead of generated, so that a trainer's update alone is timed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastpack.bench.images import ImageCollator
from fastpack.bench.lengths import make_rows
from fastpack.bench.rows import image_collator, training_rows
from fastpack.bench.settings import RunSettings
from fastpack.bench.shapes import has_images, make_config

Rollouts = dict[str, Any]
"""The rollouts of one update: padded prompts and completions and their masks, and for GRPO their advantages."""


class DrawnRollouts:
    """A base class before one of TRL's trainers, which then gets its rollouts instead of generating and scoring them.

    Args:
        rollouts: those of each step.
        **arguments: the trainer's own arguments.
    """

    accelerator: Any

    def __init__(self, rollouts: Iterator[Rollouts], **arguments: Any) -> None:
        """Set up the trainer with its rollouts."""
        super().__init__(**arguments)
        self._rollouts = rollouts

    def _generate_and_score_completions(self, inputs: Any) -> Rollouts:
        device = self.accelerator.device
        return {name: _moved(value, device) for name, value in next(self._rollouts).items()}


def rollout_arguments(settings: RunSettings, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the config arguments of a trainer that generates: those that it knows, and its micro-batches."""
    return {
        name: value for name, value in arguments.items() if name not in ("max_length", "train_sampling_strategy")
    } | {
        "per_device_train_batch_size": settings.rows * settings.branches // settings.micro_batches,
        "gradient_accumulation_steps": settings.micro_batches,
    }


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def make_rollouts(settings: RunSettings) -> Iterator[Rollouts]:
    """Yield the rollouts of each step: prompts, each with the same image for all of its completions.

    GRPO's completions have advantages of a normal distribution.
    """
    config = make_config(settings.shape)
    prompts = iter(training_rows(settings))
    vocabulary = min(config.get_text_config().vocab_size, getattr(config, "vision_start_token_id", 1 << 30))
    completions = iter(make_rows(settings.completion_lengths(), vocabulary, settings.seed + 1))
    sequences = settings.rows * settings.branches
    advantages = torch.randn(settings.total_steps, sequences, generator=torch.Generator().manual_seed(settings.seed))
    pixels = image_collator(settings) if has_images(settings.shape) else None
    for own in advantages:
        rows = [row for row in islice(prompts, settings.rows) for _ in range(settings.branches)]
        prompt_ids, prompt_mask = _padded([row["input_ids"] for row in rows], left=True)
        completion_ids, completion_mask = _padded(list(islice(completions, len(rows))), left=False)
        yield {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            **({"advantages": own} if settings.trainer == "grpo" else {}),
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
