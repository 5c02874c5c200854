"""The forward of a composite model: a vision tower, a projector and a text model, of which the text model runs packed.

The composite stays stock. Where it is entered, everything is read that its text model needs and may not get from it:
the mask and the packing. The text model's own forward (:mod:`fastpack.model.backbone`) takes it up.
In between, the tower and the projector see the batch as it came, without fastpack's keywords, and no mask is built.

Shape suffixes: A axes of positions; B rows and S columns of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastpack.errors import PackingError, UnsupportedModelError
from fastpack.families.composites import CompositeSpec
from fastpack.layers.hf_attention import naming_interface
from fastpack.layers.window_checks import mask_maker
from fastpack.model.backbone import pack, refuse_adapters
from fastpack.model.blocks import with_blocks
from fastpack.model.checks import MEDIA, refuse_packed_stock, takes_stock_path
from fastpack.model.model_runtime import ModelRuntime
from fastpack.model.position_axes import position_axes, positions_by_row
from fastpack.packing.handover import EnteredBatch
from fastpack.packing.inputs import take_packing
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.protocols import ModelLike
from fastpack.utils.replacement import Replacement
from fastpack.utils.signatures import accepted, bind, parameters, source_of

FOR_THE_LOSS = ("num_items_in_batch",)
"""Keywords that heads pass on to everything inside them, down to the vision tower, although only a loss reads them."""


def composite_forward(patched: Replacement[CompositeSpec, ModelRuntime], *args: Any, **kwargs: Any) -> Any:
    """Run a composite's stock forward, while its text model runs packed.

    Args:
        patched: the replacement of the composite's forward.
        *args: positional arguments of the stock forward.
        **kwargs: its keywords, and those of :data:`fastpack.packing.inputs.PACKING_KEYWORDS`.

    Raises:
        PackingError: see :func:`fastpack.packing.inputs.read_packing`; or a packed batch took the stock path; or images
            came in a flattened batch without their positions.
        UnsupportedModelError: the batch has inputs that this composite can't take when patched.
    """
    composite = patched.owner
    arguments = bind(type(composite), args, kwargs)
    for name in FOR_THE_LOSS:
        arguments.pop(name, None)
    with entered(composite, patched.spec, patched.runtime, arguments):
        return patched.stock(**accepted(type(composite).forward, arguments))


@contextmanager
def entered(
    composite: ModelLike, spec: CompositeSpec, runtime: ModelRuntime, arguments: dict[str, Any]
) -> Iterator[None]:
    """Hand a composite's batch to its text model inside a ``with`` block, and take from the arguments what is read.

    Args:
        composite: the composite model.
        spec: what the composite does besides embedding images.
        runtime: the runtime that it shares with its text model.
        arguments: the arguments of its forward by name, which this function changes.
    """
    handover = runtime.handover
    packing = take_packing(arguments)
    from_head = handover.take(source_of(arguments))
    packing = packing if from_head is None else {"packed_seq_lens": from_head}
    makes_masks = mask_maker(composite) is not None and not torch.compiler.is_compiling()
    turn = runtime.turn if makes_masks else nullcontext()
    if takes_stock_path(composite, arguments):
        refuse_packed_stock(arguments, packing)
        arguments.update(packing)  # continuous batching reads the packing
        with turn, handover.entering(EnteredBatch(None)):
            yield
        return
    refuse_adapters(composite, (), arguments)
    refuse_inputs(composite, spec, arguments)
    packed = pack(arguments, packing, axes=position_axes(composite.config), prefixes=runtime.sharing is not None)
    refuse_lost_positions(composite, arguments, packed)
    packed = with_blocks(composite, spec.blocks, arguments, packed)
    arguments["attention_mask"] = row_mask(arguments.get("attention_mask"), packed)
    if spec.counts_images and arguments.get("position_ids") is None:
        arguments["position_ids"] = positions_by_row(composite, arguments)
    named = parameters(type(composite).forward)
    if "use_cache" in named:
        arguments["use_cache"] = False
    positions = arguments.get("position_ids")
    if "position_ids" not in named and positions is not None and positions.ndim <= 2:
        del arguments["position_ids"]  # its tower would get them; the text model gets them with the packing
    batch = EnteredBatch(packed, own_ids(arguments))
    with (
        turn,
        handover.entering(batch),
        masks_off(composite, runtime.layers.attention) if makes_masks else nullcontext(),
    ):
        yield


def own_ids(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the ids of a batch whose embeddings the composite makes itself, of inputs that don't train; else None."""
    trains = any(isinstance(value, Tensor) and value.requires_grad for value in arguments.values())
    return None if trains or arguments.get("inputs_embeds") is not None else arguments.get("input_ids")


@contextmanager
def masks_off(composite: Any, attention: str) -> Iterator[None]:
    """Let a composite build no mask inside a ``with`` block.

    Some composites build the masks of their text model, of ``[B, 1, S, S]``
    (:func:`fastpack.layers.window_checks.mask_maker`). For an attention implementation without a
    mask function, which fastpack's is, transformers builds none. The composite gets a copy of its config that names it.
    """
    config = composite.config
    copied, text = naming_interface(config, attention), config.get_text_config(decoder=True)
    places = [name for name in config.sub_configs if getattr(config, name, None) is text]
    vars(copied).update({place: naming_interface(text, attention) for place in places})
    composite.config = copied
    try:
        yield
    finally:
        composite.config = config


def row_mask(mask: Any, packed: PackedSeqLens) -> Any:
    """Return the mask for the composite: 1 for real tokens and 0 for padding, ``[B, S]``, or None.

    Composites compute the positions of images from it, and would take other kinds of masks for something else.
    """
    names_rows = isinstance(mask, Tensor) and mask.ndim == 2 and packed.num_sequences <= len(mask)
    return mask if names_rows else packed.padding.mask()


def refuse_inputs(composite: ModelLike, spec: CompositeSpec, arguments: Mapping[str, Any]) -> None:
    """Raise if a batch has inputs that a patched composite can't take.

    Raises:
        UnsupportedModelError: the message names the inputs, and says why.
    """
    for name, why in spec.refused_inputs.items():
        if arguments.get(name) is not None:
            raise UnsupportedModelError(
                f"{name} came with the batch: {why}. Send text only, or train this {type(composite).__name__} "
                "unpatched (fastpack.unpatch(model))."
            )


def refuse_lost_positions(composite: ModelLike, arguments: Mapping[str, Any], packed: PackedSeqLens) -> None:
    """Raise if a flattened batch has images but not the positions that its model would compute row by row.

    Raises:
        PackingError: several sequences share a row, and the model's positions have several axes.
    """
    rows = 1 if packed.padding.batch_shape is None else packed.padding.batch_shape[0]
    has_images = any(arguments.get(name) is not None for name in MEDIA)
    positions = arguments.get("position_ids")
    if not has_images or packed.num_sequences - len(packed.bucket_padding) <= rows or not has_axes(composite):
        return
    if isinstance(positions, Tensor) and positions.ndim == 3:
        return
    came = "no position_ids" if positions is None else f"position_ids of one axis ({tuple(positions.shape)})"
    raise PackingError(
        f"a flattened batch with images came with {came}, but {type(composite).__name__} rotates by positions of "
        f"several axes, which it computes for unflattened rows only. Pass position_ids "
        f"[{position_axes(composite.config) + 1}, B, S]: the text positions of each sequence, then the axes of "
        "get_rope_index for each row; or send a padded batch."
    )


def has_axes(composite: ModelLike) -> bool:
    """Return whether a composite computes positions of several axes."""
    return hasattr(composite, "get_rope_index")
