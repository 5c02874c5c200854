"""Decide whether a batch of a patched model runs the stock forward, and whether it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from fastpack.errors import PackingError, PatchError, UnsupportedModelError
from fastpack.families.composites import composite_spec
from fastpack.families.mixer_spec import MixerSpec
from fastpack.families.refused import REFUSED_IMAGES
from fastpack.families.spec import Family
from fastpack.layers.read_projection import method_of
from fastpack.layers.rope_tables import is_served
from fastpack.packing.inputs import PACKING_KEYWORDS, numbers_segments
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.classes import mentions
from fastpack.utils.protocols import HeadLike, ModelLike
from fastpack.utils.replacement import PreHook, replacement_on
from fastpack.utils.signatures import shape_of
from fastpack.utils.versions import version_of

CACHES = ("past_key_values", "cache_params", "state", "mems", "cache")
"""The argument names under which models take a cache object."""

MEDIA = (
    "pixel_values",
    "pixel_values_videos",
    "image_embeds",
    "image_features",
    "input_features",
    "input_values",
    "mm_encoder_outputs",
    "image_pixel_values",
    "audio_input_features",
    "image_patches",
    "cross_attention_states",
)
"""The argument names of images and audio, and of the features that encoders and layers make from them."""


_ABOUT_ROWS = "that describes its rows, and a patched model runs tokens without rows. Leave it out, or"
_NOT_COVERED = {
    ("encoder_hidden_states",): "cross-attention is not covered. Leave it out, or",
    MEDIA: "images and audio are not covered. Send text only, or",
}


def takes_stock_path(module: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return whether the stock forward has to run.

    It runs for a batch with a cache, with ``use_cache=True``, with a request for attention weights, or with a request
    for the results of some tokens only (``target_mapping``, as in generation).
    """
    if has_cache(arguments) or arguments.get("target_mapping") is not None:
        return True
    wants_attentions = arguments.get("output_attentions")
    if wants_attentions is None:
        wants_attentions = getattr(module.config, "output_attentions", False)
    return bool(arguments.get("use_cache")) or bool(wants_attentions)


def has_cache(arguments: Mapping[str, Any]) -> bool:
    """Return whether the arguments hold a cache, under any of its names."""
    return any(arguments.get(name) is not None for name in CACHES)


def refuse_packed_stock(arguments: Mapping[str, Any], packing: Mapping[str, Any]) -> None:
    """Raise if a packed batch takes the stock path, where its sequences would see each other.

    Generation is not checked, so that it never waits for the device.

    Args:
        arguments: the arguments of the forward, without the packing keywords.
        packing: the packing keywords.

    Raises:
        PackingError: the batch is packed.
    """
    if any(cls.__name__ == "PagedAttentionCache" for cls in type(arguments.get("cache")).__mro__):
        return  # transformers' continuous batching, whose cache keeps sequences apart
    why = (
        "a cache (past_key_values, which PEFT's prefix tuning passes too, or use_cache=True) or attention weights "
        "(output_attentions=True)"
    )
    mend = (
        "These run the stock forward, in which tokens would see other sequences. Pass use_cache=False and "
        "output_attentions=False, or send a padded batch."
    )
    if packing:
        raise PackingError(f"{', '.join(packing)} came with the batch, and {why} was asked for. {mend}")
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
        return
    cached = has_cache(arguments)
    if shape_of(arguments)[1] <= 1 or (cached and not _may_be_packed(arguments)):
        return
    if mask is not None and numbers_segments(mask):
        raise PackingError(
            f"attention_mask numbers several sequences in one row (1, 1, 2, 2), and {why} was asked for. {mend}"
        )
    if positions is None or (cached and positions.ndim > 2):  # positions of images have several axes, and may fall
        return
    steps = positions.diff()
    # without padding a jump may be a new sequence, as in a packed batch
    continues = steps > 0 if cached or mask is not None else steps == 1
    if mask is not None:  # with a cache, the mask covers the cached tokens first
        real = mask[:, -positions.shape[-1] :] > 0
        continues = continues | ~(real[:, 1:] & real[:, :-1])
    error = f"position_ids restart or jump inside a row (several sequences packed), and {why} was asked for. {mend}"
    if torch.compiler.is_compiling():  # reading the value would break the graph
        torch._assert_async(continues.all(), error)
    elif not bool(continues.all()):
        raise PackingError(error)


def _may_be_packed(arguments: Mapping[str, Any]) -> bool:
    """Return whether a batch with a cache may be packed.

    A batch from ``generate`` is not packed: its cache is empty at the beginning, and it has no gradients and no labels.
    """
    if torch.is_grad_enabled() or arguments.get("labels") is not None:
        return True
    caches = [arguments[name] for name in CACHES if hasattr(arguments.get(name), "get_seq_length")]
    lengths = [cache.get_seq_length() for cache in caches if _counts_tokens(cache)]
    return any(isinstance(length, int) and length > 0 for length in lengths)  # a tensor comes only from generation


def _counts_tokens(cache: object) -> bool:
    """Return whether a cache has a length; a cache of recurrent states alone has none."""
    layers = getattr(cache, "layers", ())
    return not layers or any(hasattr(layer, "get_seq_length") for layer in layers)


def refuse_uncovered(backbone: ModelLike, family: Family, arguments: Mapping[str, Any]) -> None:
    """Raise if a batch has media that the family doesn't take, an encoder's states or arguments about its rows."""
    own = REFUSED_IMAGES.get(family.model_type)
    of_media = {} if own is None else {MEDIA: f"{own}. Send text only, or"}
    for names, why in ({family.row_arguments: _ABOUT_ROWS} | _NOT_COVERED | of_media).items():
        refused = [name for name in names if arguments.get(name) is not None and name not in family.media]
        if refused:
            raise UnsupportedModelError(
                f"{', '.join(refused)} came with the batch: {why} train this model unpatched (fastpack.unpatch(model))."
            )


def refuse_unmarked(backbone: nn.Module, composite: Any) -> None:
    """Raise if a text model was called without the composite around it, whose token types say what is causal.

    Args:
        backbone: the text model.
        composite: the composite around it, or None.

    Raises:
        UnsupportedModelError: the stock text model attends in both directions.
    """
    blocks = None if composite is None else composite_spec(composite).blocks
    if blocks is not None and blocks.required:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} was called without the {type(composite).__name__} around it. Alone it attends "
            f"in both directions, and patched it follows {blocks.argument}. Call the {type(composite).__name__} or its "
            "head, or train the model unpatched (fastpack.unpatch(model))."
        )


def refuse_masks(backbone: nn.Module, mask: object) -> None:
    """Raise if a composite hands a mask of its own to its text model, the backbone.

    It is not checked while compiling, when the masks that transformers makes arrive as well.

    Args:
        backbone: the text model.
        mask: what came as its mask: one, or a dict of masks by the kind of layer. Those that transformers makes are
            left out where a composite is entered.

    Raises:
        UnsupportedModelError: a mask says more than which tokens are padding.
    """
    each = mask.values() if isinstance(mask, Mapping) else (mask,)
    if any(isinstance(one, Tensor) and one.ndim > 2 for one in each) and not torch.compiler.is_compiling():
        raise UnsupportedModelError(
            f"the model around {type(backbone).__name__} made a mask of its own for it, and which tokens this mask "
            "lets see each other is not known. Train this model unpatched (fastpack.unpatch(model))."
        )


def refuse_unused_blocks(backbone: nn.Module, family: Family, packed: PackedSeqLens) -> None:
    """Raise if a batch has blocks of tokens that see each other in both directions, but this family is causal.

    Raises:
        UnsupportedModelError: no layer would use the blocks.
    """
    if packed.two_way is not None and not family.uses_blocks:
        raise UnsupportedModelError(
            f"the batch has blocks of tokens that see each other in both directions (images, or a prompt), and the "
            f"layers of {type(backbone).__name__} are causal when patched. Send it without blocks, or train this model "
            "unpatched (fastpack.unpatch(model))."
        )


def refuse_positions(backbone: nn.Module, family: Family, arguments: Mapping[str, Any], packed: PackedSeqLens) -> None:
    """Raise if this family can't follow the ``position_ids`` of a batch.

    The host waits for the device if the family limits positions.

    Args:
        backbone: the backbone.
        family: its family.
        arguments: the backbone's arguments.
        packed: the batch's packing.

    Raises:
        PackingError: the family counts positions itself, and the batch's positions are neither 0, 1, 2, ... in each
            sequence nor the family's own; or rotary frequencies depend on each sequence's length, and positions have
            several axes, or a sequence's positions continue above those of the sequence before it. (Sequences are found
            where positions fall.)
    """
    if arguments.get("position_ids") is None or packed.padding.is_empty or torch.compiler.is_compiling():
        return
    by_length = any(map(is_served, backbone.children()))
    if by_length and arguments["position_ids"].ndim == 3:
        raise PackingError(
            f"position_ids of several axes came to {type(backbone).__name__}, whose rotary frequencies depend on each "
            "sequence's length (rope_type dynamic or longrope); the two together are not covered. Set another "
            "rope_type in the config, send text only, or train this model unpatched (fastpack.unpatch(model))."
        )
    counts_itself = family.repadded or any("position_ids" in spec.left_out for spec in family.mixers.values())
    if not (counts_itself or by_length):
        return
    positions, starts = packed.position_ids[0], packed.cu_seqlens[:-1]
    starts = starts[starts < len(positions)].long()
    if counts_itself:
        sequence = torch.zeros_like(positions).index_fill(0, starts, 1).cumsum(0) - 1
        from_zero = torch.arange(len(positions), device=positions.device) - starts[sequence]
        padding_id = _padding_id(backbone)
        wrong, allowed = (positions != from_zero).any(), "0, 1, 2, ..."
        if padding_id is not None:
            own = from_zero + (padding_id + 1)
            if arguments.get("input_ids") is not None:
                real = packed.unpad(arguments["input_ids"])[0] != padding_id
                before = real.cumsum(0) - real.long()
                own = torch.where(real, before + 1 - before[starts][sequence], 0) + padding_id
            wrong &= (positions != own).any()
            allowed += f" (or {padding_id + 1}, {padding_id + 2}, ..., past ids of padding)"
        if bool(wrong):
            raise PackingError(
                f"{type(backbone).__name__} got position_ids that do not count {allowed} in each sequence, and its "
                f"family ({family.model_type}) counts positions itself. Leave them out, and pass packed_seq_lens or a "
                "mask; or train this model unpatched (fastpack.unpatch(model))."
            )
    elif bool((positions[starts[1:]] > positions[starts[1:] - 1]).any()):
        raise PackingError(
            "position_ids of a sequence continue above those of the sequence before it. This model's rotary "
            "frequencies depend on each sequence's length, and its sequences are found where positions fall. Begin "
            "each sequence at 0, or leave position_ids out."
        )


def _padding_id(backbone: nn.Module) -> int | None:
    """Return the padding id from which a module of a patched backbone counts positions, or None."""
    for module in backbone.modules():
        ours = replacement_on(module)
        if ours is not None and isinstance(ours.spec, MixerSpec) and ours.spec.counts_from is not None:
            return getattr(module, ours.spec.counts_from)
    return None


def refuse_windows(window: int | None, packed: PackedSeqLens) -> None:
    """Raise if a 4-D mask lets tokens see more of their sequence than this model's narrowest window or chunk.

    The stock model would follow the mask and ignore its window.

    Args:
        window: the number of tokens that a query sees in the layer with the narrowest window or chunk; None for no
            window.
        packed: the batch's packing.

    Raises:
        PackingError: a sequence is longer than the window.
    """
    if window is not None and packed.is_unwindowed and packed.max_seqlen > window:
        raise PackingError(
            f"attention_mask (4-D) lets tokens see all of a sequence of {packed.max_seqlen} before them, and this "
            f"model has layers that see {window} tokens. Pass the [B, S] mask of segment numbers (1, 1, 2, 2, 0), "
            "with which the model applies its windows, or shorter sequences."
        )


def refuse_pooled_padding(head: HeadLike, arguments: Mapping[str, Any], packed: PackedSeqLens) -> None:
    """Raise if a sequence classifier would pool a slot of padding, which holds zeros. The host waits for the device.

    The classifiers of transformers that look for padding pool the last slot whose id is not ``config.pad_token_id``, or
    the very last slot if they get no ids.

    Args:
        head: the classifier.
        arguments: its arguments.
        packed: the batch's packing.

    Raises:
        PackingError: that slot is padding. The stock model would classify a row by its output at padding.
    """
    mask = packed.padding.mask()
    if mask is None or torch.compiler.is_compiling() or not mentions(head, "pad_token_id"):
        return
    ids, pad = arguments.get("input_ids"), head.config.get_text_config().pad_token_id
    real = mask > 0
    last = torch.full_like(mask[:, 0], mask.shape[1] - 1, dtype=torch.long)
    if ids is not None and pad is not None:
        last = (torch.arange(mask.shape[1], device=mask.device) * (ids != pad)).argmax(1)
    rows = (real.any(1) & ~real.gather(1, last[:, None])[:, 0]).nonzero()[:, 0].tolist()
    if rows:
        saw = "no input_ids" if ids is None else f"ids other than config.pad_token_id={pad} there"
        raise PackingError(
            f"{type(head).__name__} would pool a slot of padding in {len(rows)} of {len(mask)} rows (the first is row "
            f"{rows[0]}): it sees {saw}, and pools the last slot. Pad on the left, or pass input_ids padded with "
            "config.pad_token_id; PEFT's prompt tuning, which passes embeddings, needs rows of one length (or LoRA)."
        )


def refuse_replica(module: nn.Module) -> None:
    """Raise if a module is a replica that ``nn.DataParallel`` made: its forward is bound to the original."""
    if getattr(module, "_is_replica", False):
        raise PatchError(
            "a patched model can't run under nn.DataParallel (its replicas would run the original's weights). Start "
            "one process a GPU with `torchrun --nproc-per-node N script.py`, or show one GPU (CUDA_VISIBLE_DEVICES=0)."
        )


def replica_pre_hook(
    hook: PreHook[None, None], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise if a bare backbone is a replica of ``nn.DataParallel``, or gets a packed batch with prompts of PEFT."""
    refuse_replica(module)
    refuse_packed_prompts(args, kwargs)


def learns_prompts(module: nn.Module) -> bool:
    """Return whether a PEFT wrapper has an adapter that puts virtual tokens before each row."""
    configs = getattr(module, "peft_config", None)
    return isinstance(configs, dict) and any(getattr(each, "is_prompt_learning", False) for each in configs.values())


def passes_a_cache(module: Any) -> bool:
    """Return whether the active prompts of a PEFT wrapper are keys and values: these reach the model as a cache."""
    return method_of(module.peft_config[module.active_adapter]) in _PROMPTS_IN_A_CACHE


def refuse_dropped_positions(wrapper: nn.Module) -> None:
    """Raise if a PEFT wrapper that learns prompts drops ``position_ids`` before a backbone without a head.

    Raises:
        PatchError: PEFT is older than 0.19, and the prompts reach the model as a cache, so that the model can't see
            that a batch is packed.
    """
    if learns_prompts(wrapper) and passes_a_cache(wrapper) and Version(version_of("peft") or "0") < Version("0.19"):
        raise PatchError(
            f"{type(wrapper).__name__} of PEFT {version_of('peft')} drops position_ids, so that a packed batch would "
            "be taken for one sequence. Update PEFT (pip install -U 'peft>=0.19'), or wrap a model with a head."
        )


def refuse_packed_prompts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise if a packed batch comes from a PEFT wrapper that learns prompts.

    The wrapper may have been added before the patch or after. A model does not know its wrappers, and ``position_ids``
    don't reach it: if a batch has them, PEFT passes None instead. A call by PEFT is recognised by the keywords that
    PEFT always passes, and those that it never passes.

    Args:
        args: the positional arguments of the call.
        kwargs: its keywords.

    Raises:
        PackingError: PEFT dropped ``position_ids``, whatever they held; or other arguments say that the batch is
            packed.
    """
    if args or any(name not in kwargs for name in _PASSED_BY_PEFT):
        return
    mask, to_a_head = kwargs["attention_mask"], "labels" in kwargs  # heads pass None for a missing argument
    lengthened = mask is None or (isinstance(mask, Tensor) and mask.ndim == 2 and mask.is_floating_point())
    embedded = kwargs.get("inputs_embeds") is not None and kwargs.get("input_ids") is None
    embedded = embedded and lengthened and (to_a_head or not any(name in kwargs for name in CACHES))
    cached = to_a_head and has_cache(kwargs)  # PEFT before 0.19 drops position_ids here too
    if (embedded or cached) and "position_ids" in kwargs and kwargs["position_ids"] is None:
        raise PackingError(f"position_ids came with PEFT's virtual tokens, and PEFT drops them. {_BEFORE_EACH_ROW}")
    packed = "input_ids" not in kwargs and any(kwargs.get(name) is not None for name in PACKING_KEYWORDS)
    if embedded and (packed or (mask is not None and numbers_segments(mask))):
        raise PackingError(f"a packed batch came with PEFT's virtual tokens. {_BEFORE_EACH_ROW}")


_PASSED_BY_PEFT = ("attention_mask", "output_attentions", "output_hidden_states", "return_dict")
"""The keywords that PEFT's wrappers always pass to the model inside."""

_BEFORE_EACH_ROW = (
    "PEFT puts its virtual tokens before each row, so that only the first sequence of a row would see them. Send a "
    "padded batch without position_ids, or train with LoRA."
)

_PROMPTS_IN_A_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
"""The PEFT methods whose prompts are keys and values."""
