"""Split a generated micro-batch so that completions of one prompt stay together, where the model runs a prompt once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack.data.bin_packing import split
from fastpack.data.token_budget import COST
from fastpack.model.checks import MEDIA
from fastpack.model.model_runtime import runtime_of
from fastpack.model.prefix_sharing import PrefixSharing
from fastpack.model.unwrap import find_parts
from fastpack.trainers.loss_units import Inputs


def split_units(model: Any, inputs: Inputs, tokens: list[int], most: int, parts: int = 1) -> list[list[int]]:
    """Return the units of each piece of a micro-batch.

    Each piece has at most ``most`` tokens, unless it is one longer unit. If the model shares prefixes, the tokens of a
    prompt count once in a piece. A prompt whose completions exceed the budget is in several pieces.

    Args:
        model: the model that trains.
        inputs: the micro-batch.
        tokens: the number of real tokens of each unit.
        most: the budget of a piece.
        parts: the least number of pieces.
    """
    sharing = _sharing(model, inputs)
    if sharing is not None:
        pieces = _split_by_prompt(inputs, tokens, most, parts, sharing)
        if pieces is not None:
            return pieces
    return split(tokens, most, COST, parts)


def _sharing(model: Any, inputs: Inputs) -> PrefixSharing | None:
    """Return the model's sharing of prefixes if it shares those of this micro-batch's prompts."""
    if "prompt_ids" not in inputs or any(inputs.get(name) is not None for name in MEDIA):
        return None  # equal ids may stand for different images
    backbone = find_parts(model).backbone
    runtime = runtime_of(backbone)
    sharing = None if runtime is None else runtime.sharing
    return sharing if sharing is not None and sharing.why_never(backbone) is None else None


def _split_by_prompt(
    inputs: Inputs, tokens: list[int], most: int, parts: int, sharing: PrefixSharing
) -> list[list[int]] | None:
    """Return the units of each piece; None if this makes too few pieces, or one that would run its prompts anew."""
    mask: Tensor = inputs["prompt_mask"]
    _, prompts = torch.unique(inputs["prompt_ids"].masked_fill(mask == 0, -1), dim=0, return_inverse=True)
    numbers, lengths = torch.stack([prompts, mask.sum(-1)]).tolist()
    members: dict[int, list[int]] = {}
    for unit, number in enumerate(numbers):
        members.setdefault(number, []).append(unit)
    groups: list[list[int]] = []
    for units in members.values():
        room = max(most - lengths[units[0]], 1)
        completions = [tokens[unit] - lengths[unit] for unit in units]
        groups += [[units[at] for at in part] for part in split(completions, room, COST)]
    if len(groups) < parts:
        return None

    def kept(group: list[int]) -> int:
        return sum(tokens[unit] for unit in group) - lengths[group[0]] * (len(group) - 1)

    pieces = [[groups[at] for at in batch] for batch in split([*map(kept, groups)], most, COST, parts)]
    for piece in pieces:
        whole, shared = sum(tokens[unit] for group in piece for unit in group), sum(map(kept, piece))
        if whole > most and not sharing.saves_enough(whole - shared, whole):
            return None
    return [sorted(unit for group in piece for unit in group) for piece in pieces]
