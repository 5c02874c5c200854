"""Layouts of images: the pixel inputs of one image, as a family's processor hands them to the model.

Shape legend: N images, P patches, C channels. Each layout is a function of the model's config, the size of an image
``(height, width)`` in units of one token, and a generator; it returns the model's arguments for this image, with a
first dimension that the processor concatenates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Size = tuple[int, int]
Pixels = dict[str, Tensor]
CHANNELS = 3


@dataclass(frozen=True)
class Layout:
    """How the images of a family reach its model.

    Attributes:
        image: Makes the pixel inputs of one image.
        per_row: Whether images are stacked in a dimension behind the rows, ``[B, N, ...]``. Rows are then padded with
            images of zeros; else images are concatenated along the first dimension.
        around: The names of the settings with the ids of the tokens before and after each image; empty for none.
        masked: Whether each row has a mask, without which the model does not compute the positions of its images.
        required: Whether each row needs an image, since the model can't run without.
        typed: Whether text alone needs token types as well, so that ids alone are no input.
        single: Whether a row has one image at most.
        along: The dimensions along which inputs are concatenated, by name, if not the first.
        indices: The names of inputs that hold places in the list of all patches, which shift where images are joined.
    """

    image: Callable[[Any, Size, torch.Generator], Pixels]
    per_row: bool = False
    around: tuple[str, str] = ("", "")
    masked: bool = False
    required: bool = False
    typed: bool = False
    single: bool = False
    along: Mapping[str, int] | None = None
    indices: tuple[str, ...] = ()


def square(config: Any, _: Size, generator: torch.Generator) -> Pixels:
    """Return an image of the tower's one size: ``pixel_values [1, C, h, w]``."""
    vision = config.vision_config
    size = vision.image_size if hasattr(vision, "image_size") else vision.sam_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.rand(1, CHANNELS, height, width, generator=generator) + 0.1}


def tile(config: Any, _: Size, generator: torch.Generator) -> Pixels:
    """Return a tile of the tower's one size with its mask: ``pixel_values [1, 1, C, h, w]``."""
    pixels = square(config, _, generator)["pixel_values"]
    return {"pixel_values": pixels[None], "pixel_attention_mask": torch.ones(1, 1, *pixels.shape[-2:]).long()}


def whole_tile(config: Any, _: Size, generator: torch.Generator) -> Pixels:
    """Return a tile of the tower's one size, ``pixel_values [1, 1, C, h, w]``, marked as real in a mask ``[1, 1]``."""
    pixels = square(config, _, generator)["pixel_values"]
    return {"pixel_values": pixels[None], "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}


def any_size(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return an image of its own size, which a batch pads: ``pixel_values [1, C, h, w]``, ``image_sizes [1, 2]``."""
    unit = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    height, width = (side * unit for side in size)
    pixels = torch.rand(1, CHANNELS, height, width, generator=generator) + 0.1
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}


def grid(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return an image's patches side by side: ``pixel_values [P, C t p p]``, ``image_grid_thw [1, 3]``."""
    vision = config.vision_config
    height, width = (side * _merged(vision) for side in size)
    frames = _first(vision, ("temporal_patch_size", "patch_temporal"), 1)
    pixels = torch.randn(height * width, CHANNELS * frames * vision.patch_size**2, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def grid_of_squares(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return an image's patches side by side, as squares: ``pixel_values [P, C, p, p]``, ``image_grid_thw [1, 3]``."""
    side = config.vision_config.patch_size
    image = grid(config, size, generator)
    return {**image, "pixel_values": image["pixel_values"].unflatten(1, (CHANNELS, side, side))}


def grid_with_sizes(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return a :func:`grid` with the number of patches that are merged on each side, ``image_merge_sizes [1]``."""
    merged = torch.tensor([_merged(config.vision_config)])
    return {**grid(config, size, generator), "image_merge_sizes": merged}


def _merged(vision: Any) -> int:
    """Return how many patches on each side become one token."""
    merged = _first(vision, ("spatial_merge_size", "merge_size", "merge_kernel_size"), 2)
    return int(merged if isinstance(merged, int) else merged[0])


def _first(config: Any, names: Sequence[str], default: Any) -> Any:
    """Return the first of these settings that a config has."""
    return next((getattr(config, name) for name in names if hasattr(config, name)), default)


def spatial_shapes(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return an image's patches, padded: ``pixel_values [1, P, C p p]`` with ``spatial_shapes [1, 2]`` and a mask."""
    height, width = (side * config.downsample_factor for side in size)
    pixels = torch.randn(1, height * width, CHANNELS * config.vision_config.patch_size**2, generator=generator)
    mask = torch.ones(1, height * width, dtype=torch.long)
    return {
        "pixel_values": pixels,
        "spatial_shapes": torch.tensor([[height, width]]),
        "pixel_attention_mask": mask,
    }


def placed_patches(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return an image's patches, padded, with places ``image_position_ids [1, P, 2]`` (column, row), -1 for padding."""
    vision = config.vision_config
    height, width = (side * vision.pooling_kernel_size for side in size)
    pixels = torch.rand(1, height * width, CHANNELS * vision.patch_size**2, generator=generator)
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
    return {"pixel_values": pixels, "image_position_ids": places[None]}


def any_resolution(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return the whole image and its tiles, each of the tower's one size: ``pixel_values [1, P, C, h, w]``.

    ``image_sizes [1, 2]`` is the image's own size, by which the model finds the number of tiles. A batch pads with
    tiles of zeros.
    """
    from transformers.image_processing_utils import select_best_resolution

    side = config.vision_config.image_size
    image_size = [length * side * 2 // 3 for length in size]
    height, width = select_best_resolution((image_size[0], image_size[1]), config.image_grid_pinpoints)
    tiles = 1 + (height // side) * (width // side)
    pixels = torch.rand(1, tiles, CHANNELS, side, side, generator=generator) + 0.1
    return {"pixel_values": pixels, "image_sizes": torch.tensor([image_size])}


def two_resolutions(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return a :func:`square` image and another of the second tower's size, ``high_res_pixel_values [1, C, h, w]``."""
    side = config.high_res_vision_config.image_size
    fine = torch.rand(1, CHANNELS, side, side, generator=generator) + 0.1
    return {**square(config, size, generator), "high_res_pixel_values": fine}


def with_question(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return a :func:`square` image with the text that its Q-Former reads, ``qformer_input_ids [1, 3]``."""
    question = torch.randint(4, config.qformer_config.vocab_size, (1, 3), generator=generator)
    return {**square(config, size, generator), "qformer_input_ids": question}


def frames(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return a video of two :func:`square` frames, ``pixel_values [1, 2, C, h, w]``, with a text for its Q-Former."""
    video = with_question(config, size, generator)
    other = square(config, size, generator)["pixel_values"]
    return {**video, "pixel_values": torch.stack([video["pixel_values"], other], dim=1)}


def patches_of_one_size(config: Any, _: Size, generator: torch.Generator) -> Pixels:
    """Return the patches of an image of the model's one size: ``pixel_values [1, P, C p p]``."""
    count = (config.image_size // config.patch_size) ** 2
    return {"pixel_values": torch.rand(1, count, CHANNELS * config.patch_size**2, generator=generator) + 0.1}


def token_squares(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return the squares of an image's tokens, ``pixel_values [n, h, w, C]``, ``image_grid_thw [1, 3]`` in tokens."""
    side = config.vision_config.patch_size * _merged(config.vision_config)
    pixels = torch.randn(size[0] * size[1], side, side, CHANNELS, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, *size]])}


def grid_of_two_axes(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return a :func:`grid` without time, whose size is ``image_grid_hw [1, 2]``."""
    side = config.vision_config.patch_size
    height, width = (round(length / config.downsample_ratio) for length in size)
    pixels = torch.randn(height * width, CHANNELS * side**2, generator=generator)
    return {"pixel_values": pixels, "image_grid_hw": torch.tensor([[height, width]])}


def target_sizes(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return an image whose patches stand in one line: ``pixel_values [1, C, p, P p]``, ``target_sizes [1, 2]``."""
    side = config.vision_config.patch_size
    height, width = (4 * length for length in size)
    pixels = torch.randn(1, CHANNELS, side, height * width * side, generator=generator)
    return {"pixel_values": pixels, "target_sizes": torch.tensor([[height, width]])}


def pooled_crops(config: Any, _: Size, generator: torch.Generator) -> Pixels:
    """Return the patches of one crop, and which of them each token pools.

    These are ``pixel_values [1, P, C p p]``, ``image_token_pooling [n, 4]``, and ``image_grids [1, 4]`` in tokens.
    """
    vision = config.vision_config
    side = vision.image_size[0] // vision.patch_size
    pixels = torch.rand(1, side**2, CHANNELS * vision.patch_size**2, generator=generator) + 0.1
    blocks = torch.arange(side**2).view(side // 2, 2, side // 2, 2).transpose(1, 2)
    grids = torch.tensor([[side // 2, side // 2, 0, 0]])
    return {"pixel_values": pixels, "image_token_pooling": blocks.reshape(-1, 4), "image_grids": grids}


def placed_tokens(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return the pixels of each token, ``pixel_values [1, n, C w w]``, with places as :func:`placed_patches` has."""
    vision = config.vision_config
    side = vision.patch_size * vision.pooling_kernel_size
    pixels = torch.rand(1, size[0] * size[1], CHANNELS * side**2, generator=generator)
    places = torch.cartesian_prod(torch.arange(size[0]), torch.arange(size[1])).flip(-1)
    return {"pixel_values": pixels, "image_position_ids": places[None]}


def of_resolution(config: Any, _: Size, generator: torch.Generator) -> Pixels:
    """Return an image of its tokenizer's one size: ``pixel_values [1, C, h, w]``."""
    side = config.vq_config.resolution
    return {"pixel_values": torch.randn(1, CHANNELS, side, side, generator=generator)}


def tokenized(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return an image of its own size, two pixels a token, for a tokenizer; the rest is as in :func:`any_size`."""
    height, width = (2 * side for side in size)
    pixels = torch.randn(1, CHANNELS, height, width, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}


def tokenized_alike(config: Any, _: Size, generator: torch.Generator) -> Pixels:
    """Return a :func:`tokenized` image of one size, for a tokenizer that sees the padding of smaller images."""
    return tokenized(config, (2, 2), generator)


def numbered_patches(config: Any, _: Size, generator: torch.Generator) -> Pixels:
    """Return four patches, each behind its row and column: ``flattened_patches [1, 4, 2 + patch]``."""
    patches = torch.rand(4, config.vision_config.patch_embed_hidden_size, generator=generator) + 0.1
    places = torch.tensor([[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [2.0, 2.0]])
    return {"flattened_patches": torch.cat([places, patches], dim=1)[None]}


def one_tile(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return a :func:`square` image as the one tile of an image: ``pixel_values [1, 1, C, h, w]``."""
    return {"pixel_values": square(config, size, generator)["pixel_values"][None]}


def token_blocks(config: Any, size: Size, generator: torch.Generator) -> Pixels:
    """Return the pixels of each token at each time: ``pixel_values [n, t, p, p, C]``."""
    vision = config.vision_config
    shape = (size[0] * size[1], vision.temporal_patch_size, vision.patch_size, vision.patch_size, CHANNELS)
    return {"pixel_values": torch.rand(shape, generator=generator)}
