"""The backbone's forward: un-pad a batch, or read how it is packed, run, and re-pad what comes out.

Where labels come, the head does so before it calls the backbone (:mod:`fastpack.model.head`), and its loss runs on real
tokens too.

Shape suffixes: B rows, S columns of the batch as it came; T real tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.families.spec import Family
from fastpack.layers.read_projection import refuse_rows_at_the_door
from fastpack.model.checks import (
    refuse_packed_stock,
    refuse_positions,
    refuse_uncovered,
    refuse_windows,
    takes_stock_path,
)
from fastpack.model.equal_rows import repadded_forward
from fastpack.model.outputs import repad_outputs, spread_out
from fastpack.model.runtime import ModelRuntime
from fastpack.packing.inputs import read_packing, take_packing
from fastpack.packing.mask import mask_placeholder
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.protocols import ModelLike
from fastpack.utils.replacement import Replacement
from fastpack.utils.signatures import accepted, bind, shape_of, source_of, wants_tuple

PER_TOKEN = (
    "token_type_ids",
    "mm_token_type_ids",
    "task_type_ids",
    "input_shape_ids",
    "input_pronunciation_ids",
    "langs",
    "ple_input_ids",
    "per_layer_inputs",
)
"""Other arguments of shape ``[B, S, ...]``, un-padded with the tokens."""


def backbone_forward(patched: Replacement[Family, ModelRuntime], *args: Any, **kwargs: Any) -> Any:
    """Run the backbone's forward on real tokens only.

    It takes what the stock forward takes, and the packing keywords. It returns what the stock forward returns,
    re-padded: every token in the slot that it came from, zeros in padding. A re-padded family runs the stock forward on
    rows of equal length.

    Raises:
        PackingError: see :func:`fastpack.packing.inputs.read_packing`; or a packed batch was sent on the stock path.
        UnsupportedModelError: images or audio came with the batch.
        PatchError: see :meth:`fastpack.model.runtime.Watch.check` and
            :meth:`fastpack.layers.stock_attention.StockAttention.check`.
    """
    backbone, family, runtime = patched.owner, patched.spec, patched.runtime
    watch, context = runtime.watch, runtime.layers.context
    graphs, offload, sharing = runtime.graphs, runtime.offload, runtime.sharing
    arguments = bind(type(backbone), args, kwargs)
    packing = take_packing(arguments)
    if context is not None:
        offered = context.take(source_of(arguments))
        packing = packing if offered is None else {"packed_seq_lens": offered}
    if not torch.compiler.is_compiling():
        watch.follow()
    if takes_stock_path(backbone, arguments):
        refuse_packed_stock(arguments, packing)
        return patched.stock(**arguments, **packing)  # continuous batching's, which its attention reads
    watch.attention.check()
    refuse_uncovered(backbone, family, arguments)
    refuse_adapters(backbone, (), arguments)
    arguments.pop("logits_to_keep", None)  # some leave out layers' tokens by it, which were those of a row

    if torch.compiler.is_compiling():
        graphs = offload = sharing = None
    else:
        watch.check(backbone)
    packed = pack(arguments, packing, prefixes=sharing is not None)
    refuse_positions(backbone, family, arguments, packed)
    refuse_windows(watch.window, packed)
    run = packed if sharing is None else sharing.serve(backbone, arguments, packed)
    shared = run.shared
    ids, embeddings = _embedded(backbone, arguments, packed)
    if shared is not None:
        assert ids is not None
        ids = shared.keep_ids(ids)
    as_tuple = wants_tuple(backbone, arguments)
    arguments.update({name: packed.unpad(arguments[name]) for name in PER_TOKEN if arguments.get(name) is not None})
    arguments.update(
        input_ids=ids,
        inputs_embeds=embeddings,
        attention_mask=None if family.unmasked else mask_placeholder(packed),
        position_ids=packed.position_ids if shared is None else shared.position_ids,
        packed_seq_lens=run,
        use_cache=False,
        return_dict=True,
    )
    around = None if offload is None else offload.around
    if graphs is not None:
        outputs = graphs.run(backbone, patched.stock, arguments, around)
    else:
        if context is not None:
            arguments = accepted(type(backbone).forward, arguments)
        with (
            nullcontext() if around is None else around(backbone, packed.cu_seqlens.device),
            nullcontext() if context is None else context.around(backbone, run),
        ):
            if family.repadded:
                outputs = repadded_forward(backbone, family, patched.stock, arguments, packed)
            else:
                outputs = patched.stock(**arguments)
    if shared is not None:
        outputs = spread_out(outputs, shared)
    outputs = repad_outputs(outputs, packed)
    return outputs.to_tuple() if as_tuple else outputs


def refuse_adapters(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise where PEFT has put adapters on a patched module that read the rows of a batch, unless it runs as stock."""
    if "peft_config" not in module.__dict__ or torch.compiler.is_compiling():
        return
    if not takes_stock_path(module, bind(type(module), args, kwargs)):
        refuse_rows_at_the_door(module)


def pack(arguments: Mapping[str, Any], packing: Mapping[str, Any], *, prefixes: bool) -> PackedSeqLens:
    """Read the packing from the arguments of a head or a backbone; see :func:`read_packing`."""
    return read_packing(
        shape_of(arguments),
        source_of(arguments).device,
        attention_mask=arguments.get("attention_mask"),
        position_ids=arguments.get("position_ids"),
        packing=packing,
        ids=arguments.get("input_ids") if prefixes else None,
    )


def _embedded(
    backbone: ModelLike, arguments: Mapping[str, Any], packed: PackedSeqLens
) -> tuple[Tensor | None, Tensor | None]:
    """Ids or embeddings of the real tokens, whichever the backbone is to start from."""
    ids, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if embeddings is None and adds_noise(backbone, packed):
        embeddings = backbone.get_input_embeddings()(ids)
    if embeddings is not None:
        return None, packed.unpad(embeddings)
    assert ids is not None
    ids = packed.unpad(ids)
    if torch.compiler.is_compiling():
        embedding = backbone.get_input_embeddings()
        hooks = [getattr(hook, "__name__", "") for hook in embedding._forward_hooks.values()]
        if hooks and all(name.startswith("make_inputs_require_grad") for name in hooks):
            # transformers' and PEFT's hook, for checkpointing, can't be compiled, nor does compiled checkpointing need
            # an input with a gradient
            return None, type(embedding).forward(embedding, ids)
    return ids, None


def adds_noise(backbone: ModelLike, packed: PackedSeqLens) -> bool:
    # NEFTune scales its noise by the width of what the embedding returns, which un-padding would change.
    """Return whether NEFTune adds noise to a batch that will be un-padded, which would change the noise's scale."""
    embedding = backbone.get_input_embeddings()
    noisy = getattr(embedding, "neftune_noise_alpha", None) is not None and embedding.training
    return noisy and not packed.padding.is_packed_row
