"""Rows with an image each, for a vision-language shape: sizes are drawn, and pixels are random.

Shape suffixes: P patches of all images, C values of a patch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SIDES = (256, 1280)
"""The shortest and the longest side of an image in pixels. A side's logarithm is drawn uniformly."""

Grid = tuple[int, int]
"""The patches in the height and in the width of an image."""
AROUND = 2
"""The tokens that begin and end an image."""


def make_grids(count: int, vision: Any, seed: int = 0) -> list[Grid]:
    """Return the grids of ``count`` images.

    Args:
        count: the number of images.
        vision: the config of the image tower. Sides are rounded to whole tokens, of ``spatial_merge_size`` patches.
        seed: the seed of the draws.
    """
    draw, merge = random.Random(seed), vision.spatial_merge_size
    shortest, longest = map(math.log, SIDES)
    sides = [math.exp(draw.uniform(shortest, longest)) for _ in range(2 * count)]
    patches = [max(round(side / (vision.patch_size * merge)), 1) * merge for side in sides]
    return list(zip(patches[::2], patches[1::2], strict=True))


def tokens_of(grid: Grid, vision: Any) -> int:
    """Return the tokens of an image, with those around it."""
    return math.prod(grid) // vision.spatial_merge_size**2 + AROUND


def make_image_rows(texts: Sequence[Sequence[int]], grids: Sequence[Grid], config: Any) -> list[dict[str, Any]]:
    """Return rows of an image and a text behind it: ids, labels of the text alone, and the image's grid.

    Args:
        texts: the ids of each row's text.
        grids: the grid of each row's image.
        config: the composite's config.
    """
    rows = []
    for text, grid in zip(texts, grids, strict=True):
        inside = tokens_of(grid, config.vision_config) - AROUND
        image = [config.vision_start_token_id, *[config.image_token_id] * inside, config.vision_end_token_id]
        rows.append({"input_ids": [*image, *text], "labels": [-100] * len(image) + list(text), "grid": list(grid)})
    return rows


class ImageCollator:
    """Pads rows of :func:`make_image_rows`, and adds pixels as a processor lays them out.

    The pixels of a batch are the beginning of one tensor of random numbers, so that drawing them takes no time.

    Attributes:
        image_token: the id of an image's tokens.

    Args:
        config: the composite's config.
        patches: the most patches of a batch.
        seed: the seed of the pixels.
    """

    def __init__(self, config: Any, patches: int, seed: int = 0) -> None:
        """Set up the collator with its pixels."""
        vision = config.vision_config
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self._pixels_PC = torch.randn(patches, values, generator=torch.Generator().manual_seed(seed))
        self.image_token: int = config.image_token_id

    def of(self, patches: int) -> Tensor:
        """Return the pixels of this many patches, float32 ``[P, C]``."""
        return self._pixels_PC[:patches]

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return a batch padded on the right, with a mask, token types, pixels and grids."""
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, value: int) -> Tensor:
            return torch.tensor([list(row[name]) + [value] * (longest - len(row[name])) for row in rows])

        ids, grids = padded("input_ids", 0), torch.tensor([[1, *row["grid"]] for row in rows])
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        return {
            "input_ids": ids,
            "labels": padded("labels", -100),
            "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
            "mm_token_type_ids": (ids == self.image_token).long(),
            "pixel_values": self.of(int(grids.prod(1).sum())),
            "image_grid_thw": grids,
        }
