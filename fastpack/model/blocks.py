"""Read from a batch's token types which tokens see each other in both directions: images, or a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fastpack.errors import UnsupportedModelError
from fastpack.families.spec import BlockSpec
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.packing.two_way import TwoWayBlocks
from fastpack.utils.protocols import ModelLike


def with_blocks(
    model: ModelLike, spec: BlockSpec | None, arguments: Mapping[str, Any], packed: PackedSeqLens
) -> PackedSeqLens:
    """Return the packing of a batch with its blocks, if the batch has any.

    If the batch has token types, the host waits for the device.

    Args:
        model: the model that the batch came to.
        spec: how its batches mark blocks; None if they can't.
        arguments: the arguments of the model's forward by name.
        packed: the batch's packing, without blocks.

    Raises:
        PackingError: there is not one type for each token.
        UnsupportedModelError: the model needs the token types; or a sequence has several runs of tokens that its stock
            mask makes one block.
    """
    if spec is None or packed.padding.is_empty or not applies(spec, model.config):
        return packed
    types = arguments.get(spec.argument)
    if types is None:
        if spec.required:
            raise UnsupportedModelError(f"the batch came without {spec.argument}: {spec.required}")
        return packed
    types = packed.unpad(types)
    marked = torch.stack([types == kind for kind in spec.types]).any(0)
    blocks = TwoWayBlocks.of(packed, marked.long() - 1)
    is_split = _several_runs(packed, marked[0], blocks) if spec.one_each else marked.new_zeros(())
    why = (
        f"{spec.argument} marks tokens of one sequence with others between them. {type(model).__name__} would let all "
        "of them see each other, which is not covered: only neighbours can be. Send one such run (an image, or a "
        "prompt) in each sequence, or train the model unpatched (fastpack.unpatch(model))."
    )
    if torch.compiler.is_compiling():  # reading the value would break the graph
        torch._assert_async(~is_split, why)
        return replace(packed, two_way=blocks, _memo={})
    has_blocks, split = torch.stack([marked.any(), is_split]).tolist()
    if split:
        raise UnsupportedModelError(why)
    return replace(packed, two_way=blocks, _memo={}) if has_blocks else packed


def applies(spec: BlockSpec, config: Any) -> bool:
    """Return whether batches of a model with this config have blocks."""
    if spec.setting is None:
        return True
    name, value = spec.setting
    return bool(getattr(config.get_text_config(decoder=True), name, None) == value)


def _several_runs(packed: PackedSeqLens, marked_T: torch.Tensor, blocks: TwoWayBlocks) -> torch.Tensor:
    """Return whether a sequence has several runs of marked tokens, as a tensor."""
    token = torch.arange(len(marked_T), device=marked_T.device)
    starts = (marked_T & (blocks.first == token)).long()
    return (starts.new_zeros(len(packed.cu_seqlens)).index_add(0, packed.seq_idx[0].long(), starts) > 1).any()
