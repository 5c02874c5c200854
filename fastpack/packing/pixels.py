"""The pixel inputs whose entries are those of one image, patch, row of images or video after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

PIXEL_INPUTS = (
    "pixel_values",
    "pixel_values_videos",
    "high_res_pixel_values",
    "flattened_patches",
    "pixel_attention_mask",
    "image_grid_thw",
    "image_grid_hw",
    "image_merge_sizes",
    "image_position_ids",
    "image_sizes",
    "spatial_shapes",
    "video_grid_thw",
    "second_per_grid_ts",
    "qformer_input_ids",
    "qformer_attention_mask",
)
"""The pixel inputs that processors join along the first dimension, for all rows of a batch."""
PIXEL_PADDING = {"image_position_ids": -1}
"""The values that pad pixel inputs of several sizes, if not 0."""


def join_pixels(parts: Sequence[Tensor], name: str, dim: int = 0) -> Tensor:
    """Return the parts of a pixel input joined along a dimension, each padded at the end of its other dimensions.

    Args:
        parts: tensors with as many dimensions each.
        name: the name of the input, which decides on the value that pads it (:data:`PIXEL_PADDING`).
        dim: the dimension along which they are joined.
    """
    sizes = [max(each) for each in zip(*(part.shape for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [0 if at == dim else size - part.shape[at] for at, size in enumerate(sizes)]
        widths = [side for width in reversed(missing) for side in (0, width)]
        padded.append(pad(part, widths, value=PIXEL_PADDING.get(name, 0)))
    return torch.cat(padded, dim)
