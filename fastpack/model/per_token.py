"""The arguments of a backbone with an entry for each token: their names, their fingerprints, and those of kept tokens.

Shape suffixes: B rows and S columns of the original batch, T real tokens, U kept tokens, A axes of positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastpack.packing.fingerprints import fingerprints, joined
from fastpack.packing.prefixes import SharedTokens
from fastpack.packing.seqlens import PackedSeqLens

VISUAL_TOKENS = "visual_pos_masks"
"""The mask of the tokens of images, bool ``[B, S]``."""
PER_TOKEN = (
    "token_type_ids",
    "mm_token_type_ids",
    "task_type_ids",
    "input_shape_ids",
    "input_pronunciation_ids",
    "langs",
    "ple_input_ids",
    "per_layer_inputs",
    VISUAL_TOKENS,
    "vision_mask",
    "moe_mm_token_type_ids",
    "image_embeds_position_mask",
)
"""The other arguments of shape ``[B, S, ...]``, which are un-padded with the tokens."""
PER_VISUAL_TOKEN = "deepstack_visual_embeds"
"""A list of tensors for the tokens of images alone, in the order of :data:`VISUAL_TOKENS`."""


def token_fingerprints(arguments: Mapping[str, Any], packed: PackedSeqLens) -> Tensor:
    """Return a fingerprint of all that a backbone gets for each token, positions and blocks included: int64 ``[T, 2]``.

    Args:
        arguments: the backbone's arguments, before they are un-padded.
        packed: the batch's packing.
    """
    names = ("input_ids", "inputs_embeds", *PER_TOKEN)
    given = {name: packed.unpad(arguments[name])[0] for name in names if arguments.get(name) is not None}
    positions, visual = arguments.get("position_ids"), given.get(VISUAL_TOKENS)
    given["positions"] = packed.position_ids[0]
    if positions is not None and positions.ndim == 3:
        given["axes"] = packed.unpad_axes(positions)[:, 0].T
    if packed.two_way is not None:
        given["blocks"] = packed.two_way.first - packed.cu_seqlens.index_select(0, packed.seq_idx[0])
    prints = [fingerprints(value) for value in given.values()]
    for layer in arguments.get(PER_VISUAL_TOKEN) or ():
        if visual is not None and len(layer):
            place = (visual.cumsum(0) - 1).clamp(min=0)
            prints.append(torch.where(visual[:, None], fingerprints(layer)[place], 0))
    return joined(prints)


def kept_arguments(arguments: Mapping[str, Any], shared: SharedTokens) -> dict[str, Any]:
    """Return the arguments for the kept tokens of a batch with shared prefixes: ``[1, T, ...]`` to ``[1, U, ...]``."""
    kept: dict[str, Any] = {name: shared.keep(arguments[name]) for name in PER_TOKEN if arguments.get(name) is not None}
    layers = arguments.get(PER_VISUAL_TOKEN)
    if layers is not None:
        visual, first = arguments[VISUAL_TOKENS][0], shared.copies.first
        rows = (visual.cumsum(0) - 1)[first][visual[first]]
        kept[PER_VISUAL_TOKEN] = [layer.index_select(0, rows) for layer in layers]
    return kept
