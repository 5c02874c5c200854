"""The backbone's forward: un-pad a batch, or read how it is packed, run the layers, and re-pad the outputs.

If the batch has labels, the head does all this before it calls the backbone (:mod:`fastpack.model.head`), and the
head's loss runs on real tokens too.

Shape suffixes: B rows and S columns of the original batch; T real tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.families.spec import Family
from fastpack.layers.read_projection import refuse_row_adapters
from fastpack.model.blocks import with_blocks
from fastpack.model.checks import (
    refuse_masks,
    refuse_packed_stock,
    refuse_positions,
    refuse_uncovered,
    refuse_unmarked,
    refuse_unused_blocks,
    refuse_windows,
    takes_stock_path,
)
from fastpack.model.equal_rows import repadded_forward
from fastpack.model.model_runtime import ModelRuntime
from fastpack.model.outputs import copy_to_all_tokens, put_together, repad_outputs
from fastpack.model.per_token import PER_TOKEN, kept_arguments
from fastpack.model.position_axes import position_axes, rotary_positions
from fastpack.ops.row_count import RowsOfRanks
from fastpack.packing.context import PackingContext
from fastpack.packing.inputs import read_packing, take_packing
from fastpack.packing.mask import mask_placeholder
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.protocols import ModelLike
from fastpack.utils.replacement import Replacement
from fastpack.utils.signatures import accepted, bind, shape_of, source_of, wants_tuple


def backbone_forward(patched: Replacement[Family, ModelRuntime], *args: Any, **kwargs: Any) -> Any:
    """Run the backbone's forward on real tokens only.

    It takes the arguments of the stock forward, and the packing keywords. It returns the stock forward's outputs,
    re-padded: every token in the slot that it came from, and zeros in padding. A re-padded family runs the stock
    forward on rows of equal length. If a head has spread the batch over ranks, the last hidden states are those of this
    rank's tokens, ``[1, U, H]``.

    Args:
        patched: the replacement of the backbone's forward.
        *args: positional arguments of the stock forward.
        **kwargs: its keywords, and those of :data:`fastpack.packing.inputs.PACKING_KEYWORDS`.

    Raises:
        PackingError: see :func:`fastpack.packing.inputs.read_packing`; or a packed batch took the stock path.
        UnsupportedModelError: the batch has images or audio that the family doesn't take, or blocks that no layer uses;
            see also :func:`fastpack.model.checks.refuse_masks` and :func:`fastpack.model.blocks.with_blocks`.
        PatchError: see :meth:`fastpack.model.model_runtime.UserChanges.check` and
            :meth:`fastpack.layers.stock_attention.StockAttention.check`.
    """
    backbone, family, runtime = patched.owner, patched.spec, patched.runtime
    watch, context = runtime.user_changes, runtime.layers.context
    graphs, offload, sharing = runtime.graphs, runtime.offload, runtime.sharing
    arguments = bind(type(backbone), args, kwargs)
    packing = take_packing(arguments)
    entered = runtime.handover.entered
    from_outside = _from_outside(runtime, source_of(arguments), type(backbone).__name__)
    packing = packing if from_outside is None else {"packed_seq_lens": from_outside}
    if not torch.compiler.is_compiling():
        watch.follow()
    if takes_stock_path(backbone, arguments) if entered is None else entered.packed is None:
        if entered is None:
            refuse_packed_stock(arguments, packing)
        return patched.stock(**arguments, **packing)  # continuous batching reads the packing
    if entered is None:
        refuse_unmarked(backbone, runtime.composite)
    watch.attention.check()
    refuse_uncovered(backbone, family, arguments)
    refuse_adapters(backbone, (), arguments)
    arguments.pop("logits_to_keep", None)  # some backbones drop tokens by it
    if entered is not None:
        refuse_masks(backbone, arguments.get("attention_mask"))
        arguments["attention_mask"] = None  # what the composite made of the mask that was read where it was entered

    if torch.compiler.is_compiling():
        graphs = offload = sharing = None
    else:
        watch.check(backbone)
    axes = position_axes(backbone.config)
    packed = pack(arguments, packing, axes=axes, prefixes=sharing is not None)
    packed = with_blocks(backbone, family.blocks, arguments, packed)
    refuse_unused_blocks(backbone, family, packed)
    refuse_positions(backbone, family, arguments, packed)
    refuse_windows(watch.window, packed)
    run = packed
    if sharing is not None:
        run = sharing.serve(backbone, arguments, packed, entered, runtime.handover.images)
    elif runtime.context_parallel is not None and packed.shards is None:
        run = runtime.context_parallel.shard(arguments, packed, None if entered is None else entered.ids)
    if not torch.compiler.is_compiling() and watch.experts and watch.experts[0].may_be_spread:
        run = replace(run, rows_of_ranks=RowsOfRanks(run.run_tokens))
    kept = run.kept
    ids, embeddings = _embedded(backbone, arguments, packed, shared_row=run.shards is not None)
    as_tuple = wants_tuple(backbone, arguments)
    arguments.update({name: packed.unpad(arguments[name]) for name in PER_TOKEN if arguments.get(name) is not None})
    if kept is not None:
        ids = None if ids is None else kept.keep_ids(ids)
        embeddings = None if embeddings is None else kept.keep(embeddings)
        arguments.update(kept_arguments(arguments, kept))
    arguments.update(
        input_ids=ids,
        inputs_embeds=embeddings,
        attention_mask=None if family.unmasked else mask_placeholder(packed),
        position_ids=rotary_positions(arguments.get("position_ids"), run, axes),
        packed_seq_lens=run,
        use_cache=False,
        return_dict=True,
    )
    forward_context = None if offload is None else offload.forward_context
    stock = patched.stock if context is None else functools.partial(_run_in_context, patched, context)
    if graphs is not None:
        outputs = graphs.run(backbone, stock, arguments, forward_context)
    else:
        with nullcontext() if forward_context is None else forward_context(backbone, packed.cu_seqlens.device):
            outputs = stock(**arguments)
    if run.shared is not None:
        outputs = copy_to_all_tokens(outputs, run.shared)
    if run.shards is not None:
        outputs = put_together(outputs, run.shards, hidden=packed.shards is None)
    outputs = repad_outputs(outputs, packed)
    return outputs.to_tuple() if as_tuple else outputs


def _run_in_context(patched: Replacement[Family, ModelRuntime], context: PackingContext, /, **arguments: Any) -> Any:
    """Run the stock forward, whose modules find the packing in the context."""
    backbone, family = patched.owner, patched.spec
    packed: PackedSeqLens = arguments["packed_seq_lens"]
    arguments = accepted(type(backbone).forward, arguments)
    with context.around(backbone, packed):
        if family.repadded:
            return repadded_forward(backbone, family, patched.stock, arguments, packed)
        return patched.stock(**arguments)


def _from_outside(runtime: ModelRuntime, source: Tensor | None, name: str) -> PackedSeqLens | None:
    """Return the packing that the composite or the head has read, or None.

    Raises:
        PatchError: a head has read the packing, but the composite's forward, which hands it down, was not run.
    """
    handover = runtime.handover
    if handover.entered is not None:
        return handover.entered.packed
    if runtime.composite is not None and handover.is_pending:
        handover.take(None)
        raise PatchError(
            f"{name} was called without the forward of the {type(runtime.composite).__name__} around it, and can't "
            "know how the batch is packed. Remove the forward that other code has put in its place, or train this "
            "model unpatched (fastpack.unpatch(model))."
        )
    return handover.take(source)


def refuse_adapters(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise if a patched module has PEFT adapters that read the rows of a batch, unless the stock forward will run."""
    if "peft_config" not in module.__dict__ or torch.compiler.is_compiling():
        return
    if not takes_stock_path(module, bind(type(module), args, kwargs)):
        refuse_row_adapters(module)


def pack(arguments: Mapping[str, Any], packing: Mapping[str, Any], *, axes: int, prefixes: bool) -> PackedSeqLens:
    """Read the packing from the arguments of a head or a backbone; see :func:`read_packing`.

    Args:
        arguments: the arguments of the forward.
        packing: the packing keywords that were among these arguments.
        axes: the number of the model's rotary axes.
        prefixes: whether to find the prefixes that sequences share as well.
    """
    return read_packing(
        shape_of(arguments),
        source_of(arguments).device,
        attention_mask=arguments.get("attention_mask"),
        position_ids=arguments.get("position_ids"),
        axes=axes,
        packing=packing,
        ids=arguments.get("input_ids") if prefixes else None,
    )


def _embedded(
    backbone: ModelLike, arguments: Mapping[str, Any], packed: PackedSeqLens, *, shared_row: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids ``[1, T]`` or the embeddings ``[1, T, H]`` that the backbone starts from; else None.

    Args:
        backbone: the backbone.
        arguments: its arguments.
        packed: the batch's packing.
        shared_row: whether ranks will share a packed row, whose length NEFTune's noise depends on.
    """
    ids, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if embeddings is None and adds_noise(backbone, packed, cut=shared_row):
        embeddings = backbone.get_input_embeddings()(ids)
    if embeddings is not None:
        return None, packed.unpad(embeddings)
    assert ids is not None
    ids = packed.unpad(ids)
    if torch.compiler.is_compiling():
        embedding = backbone.get_input_embeddings()
        hooks = [getattr(hook, "__name__", "") for hook in embedding._forward_hooks.values()]
        if hooks and all(name.startswith("make_inputs_require_grad") for name in hooks):
            # the checkpointing hook of transformers and PEFT can't be compiled, and compiled checkpointing needs no
            # input with a gradient
            return None, type(embedding).forward(embedding, ids)
    return ids, None


def adds_noise(backbone: ModelLike, packed: PackedSeqLens, *, cut: bool = False) -> bool:
    """Return whether NEFTune adds noise to a batch that will be un-padded, or ``cut`` into shares.

    NEFTune scales its noise by the length of the embedding's rows, which un-padding changes.
    """
    embedding = backbone.get_input_embeddings()
    noisy = getattr(embedding, "neftune_noise_alpha", None) is not None and embedding.training
    return noisy and (cut or not packed.padding.is_packed_row)
