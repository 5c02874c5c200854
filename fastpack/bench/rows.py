"""The rows that a run trains on."""

from __future__ import annotations

import math
from typing import Any

from fastpack.bench.images import ImageCollator, make_image_rows
from fastpack.bench.lengths import make_rows
from fastpack.bench.settings import RunSettings
from fastpack.bench.shapes import has_images, make_config


def training_rows(settings: RunSettings) -> list[dict[str, Any]]:
    """Return every row of a run, or GRPO's prompts: ids and labels, and the grid of the image, if there is one."""
    config = make_config(settings.shape)
    if not has_images(settings.shape):
        rows = make_rows(settings.text_lengths(), config.vocab_size, settings.seed)
        return [{"input_ids": row, "labels": row} for row in rows]
    end_of_text = min(config.image_token_id, config.vision_start_token_id, config.vision_end_token_id)
    texts = make_rows(settings.text_lengths(), end_of_text, settings.seed)
    return make_image_rows(texts, settings.grids(), config)


def image_collator(settings: RunSettings) -> ImageCollator:
    """Return the collator of rows with images, with pixels for the largest batch."""
    patches = [math.prod(grid) for grid in settings.grids()]
    largest = max(sum(patches[at : at + settings.rows]) for at in range(0, len(patches), settings.rows))
    return ImageCollator(make_config(settings.shape), largest, settings.seed)
