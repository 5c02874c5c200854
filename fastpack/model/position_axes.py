"""Positions of several axes, by which vision-language models rotate (mRoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        return positions if packed.shared is None else positions.index_select(-1, packed.shared.copies.first)
    return packed.position_ids if packed.shared is None else packed.shared.position_ids
