"""The arguments of a backbone with an entry for each token: their names, their fingerprints, and those of kept tokens.

Shape suffixes: B rows and S columns of the original batch, T real tokens, U kept tokens, A axes of positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.packing.fingerprints import fingerprints, joined
from fastpack.packing.prefixes import SharedTokens
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.packing.shards import TokenShards

PER_TOKEN = (
    "token_type_ids",
    "mm_token_type_ids",
    "task_type_ids",
    "input_shape_ids",
    "input_pronunciation_ids",
    "langs",
    "ple_input_ids",
    "per_layer_inputs",
    "visual_pos_masks",
    "vision_mask",
    "moe_mm_token_type_ids",
    "image_embeds_position_mask",
)
"""The other arguments of shape ``[B, S, ...]``, which are un-padded with the tokens."""
PER_VISUAL_TOKEN = {"deepstack_visual_embeds": "visual_pos_masks", "deepstack_features": "vision_mask"}
"""The arguments with features for layers, for the tokens of images alone: a list or dict of ``[V, H]``. Each has the
argument that marks these tokens, bool ``[B, S]`` or ``[B, S, H]``."""


@dataclass(frozen=True, eq=False)
class Origin:
    """The origin of the tokens of a composite's text model, to which their gradients go.

    Attributes:
        ids: the composite's ids, int64 ``[B, S]``.
        embedding: the module that embeds them.
        images: see :class:`fastpack.packing.handover.Handover`.
    """

    ids: Tensor
    embedding: nn.Module
    images: Sequence[list[int] | None]

    def of_tokens(self, packed: PackedSeqLens, embeds_TH: Tensor | None) -> dict[str, Tensor]:
        """Return the id of each token, int64 ``[T]``, and the number of the image that it shows, int64 ``[T]``.

        A token shows an image, a video or a sound if its embedding is not that of its id. Text has -1. Tokens of an
        image that is not known have numbers of their own below -1.

        Args:
            packed: the batch's packing.
            embeds_TH: what the text model gets instead of ids, ``[T, H]``, or None.
        """
        ids_T = packed.unpad(self.ids)[0]
        if embeds_TH is None:
            return {"ids": ids_T}
        count = getattr(self.embedding, "num_embeddings", None)
        with torch.no_grad():
            own = self.embedding(ids_T if count is None else ids_T.clamp(max=count - 1))
        shows = (own != embeds_TH).any(1)
        numbers = torch.where(shows, -2 - torch.arange(len(ids_T), device=ids_T.device), -1)
        known, places = self.images[0] if len(self.images) == 1 else None, shows.nonzero()[:, 0]
        if known is not None and len(known) == len(places):
            numbers = numbers.index_copy(0, places, torch.tensor(known, device=ids_T.device))
        return {"ids": ids_T, "image": numbers}


def token_fingerprints(arguments: Mapping[str, Any], packed: PackedSeqLens, origin: Origin | None = None) -> Tensor:
    """Return a fingerprint of all that a backbone gets for each token, positions and blocks included: int64 ``[T, 2]``.

    Args:
        arguments: the backbone's arguments, before they are un-padded.
        packed: the batch's packing.
        origin: where the tokens come from, if that counts as well.
    """
    names = ("input_ids", "inputs_embeds", *PER_TOKEN)
    given = {name: packed.unpad(arguments[name])[0] for name in names if arguments.get(name) is not None}
    positions = arguments.get("position_ids")
    given["positions"] = packed.position_ids[0]
    if positions is not None and positions.ndim == 3:
        given["axes"] = packed.unpad_axes(positions)[:, 0].T
    if packed.two_way is not None:
        given["blocks"] = packed.two_way.first - packed.cu_seqlens.index_select(0, packed.seq_idx[0])
    if origin is not None:
        given |= origin.of_tokens(packed, given.get("inputs_embeds"))
    prints = [fingerprints(value) for value in given.values()]
    for name, mask in PER_VISUAL_TOKEN.items():
        if arguments.get(name) is None or arguments.get(mask) is None:
            continue
        visual = _marked(given[mask])
        place = (visual.cumsum(0) - 1).clamp(min=0)
        prints += [
            torch.where(visual[:, None], fingerprints(layer)[place], 0)
            for layer in _layers(arguments[name])
            if len(layer)
        ]
    return joined(prints)


def kept_arguments(arguments: Mapping[str, Any], tokens: SharedTokens | TokenShards) -> dict[str, Any]:
    """Return the arguments for the kept tokens of a batch: ``[1, T, ...]`` to ``[1, U, ...]``."""
    kept: dict[str, Any] = {name: tokens.keep(arguments[name]) for name in PER_TOKEN if arguments.get(name) is not None}
    for name, mask in PER_VISUAL_TOKEN.items():
        layers = arguments.get(name)
        if layers is None or arguments.get(mask) is None:
            continue
        visual, indices = _marked(arguments[mask][0]), tokens.indices
        rows = (visual.cumsum(0) - 1)[indices][visual[indices]]
        of_kept = [layer.index_select(0, rows) for layer in _layers(layers)]
        kept[name] = dict(zip(layers, of_kept, strict=True)) if isinstance(layers, dict) else of_kept
    return kept


def _marked(mask: Tensor) -> Tensor:
    """Return the tokens that a mask ``[T]`` or ``[T, H]`` marks, bool ``[T]``."""
    return mask.bool() if mask.ndim == 1 else mask[:, 0].bool()


def _layers(features: Any) -> list[Tensor]:
    """Return the features of each layer, from a list or a dict."""
    return list(features.values() if isinstance(features, dict) else features)
