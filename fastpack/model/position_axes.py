"""Positions of several axes, by which vision-language models rotate (mRoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastpack.packing.reading import AXES
from fastpack.packing.seqlens import PackedSeqLens


def position_axes(config: Any) -> int:
    """Return the number of rotary axes of a model's positions, by its config; 3 if the config doesn't say."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    sections = (parameters.get("mrope_section") for parameters in each)
    return next((len(section) for section in sections if section), AXES)


def rotary_positions(position_ids: Tensor | None, packed: PackedSeqLens, axes: int) -> Tensor:
    """Return the positions of the tokens that run: ``[1, T]``, or ``[axes, 1, T]`` for positions of several axes.

    Text positions before the axes are left out: they have told sequences apart, and not every model takes them.
    """
    if position_ids is not None and position_ids.ndim == 3:
        positions = packed.unpad_axes(position_ids[-axes:])
        return positions if packed.kept is None else positions.index_select(-1, packed.kept.indices)
    return packed.position_ids if packed.kept is None else packed.kept.position_ids


def positions_by_row(composite: Any, arguments: Mapping[str, Any]) -> Tensor | None:
    """Return rotary positions ``[axes, B, S]``, those of each row alone; None for a batch without images.

    Args:
        composite: a composite model whose ``get_rope_index`` takes the sizes of images in ``image_grid_thw [N, 3]``.
        arguments: the arguments of its forward: ``input_ids``, ``mm_token_type_ids`` (1 for the tokens of an image) and
            a 2-D ``attention_mask`` or None. The host waits for the device.
    """
    grids, types, mask = (arguments.get(n) for n in ("image_grid_thw", "mm_token_type_ids", "attention_mask"))
    if grids is None or types is None:
        return None
    is_image = (types == 1).long()
    counts = (is_image.diff(dim=1, prepend=torch.zeros_like(is_image[:, :1])) == 1).sum(1).tolist()
    if sum(counts) != len(grids):
        return None  # the model's own check says what is wrong
    rows = zip(arguments["input_ids"], types, grids.split(counts), strict=True)
    each = [
        composite.get_rope_index(
            ids[None],
            image_grid_thw=grid if len(grid) else None,
            attention_mask=None if mask is None else mask[at : at + 1],
            mm_token_type_ids=kinds[None],
        )[0]
        for at, (ids, kinds, grid) in enumerate(rows)
    ]
    return torch.cat(each, dim=1)
