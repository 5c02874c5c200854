"""Checks of a batch where a patched model is entered: what goes to the stock forward, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from fastpack.errors import PackingError, PatchError, UnsupportedModelError
from fastpack.families.spec import Family, MixerSpec
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
"""The names under which a cache object is passed."""

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
    "visual_pos_masks",
    "deepstack_visual_embeds",
    "cross_attention_states",
)
"""Images, audio, and what encoders and layers make of them."""


_ABOUT_ROWS = "that is about its rows, and a patched model runs tokens without rows. Leave it out, or"
_NOT_COVERED = {
    ("encoder_hidden_states",): "cross-attention is not covered. Leave it out, or",
    MEDIA: "images and audio are not covered. Send text only, or",
}


def takes_stock_path(module: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return whether the stock forward has to run.

    It does if a cache came or was asked for outright, if attention weights were asked for, or if only some tokens'
    results were, as in generating (``target_mapping``).
    """
    if has_cache(arguments) or arguments.get("target_mapping") is not None:
        return True
    wants_attentions = arguments.get("output_attentions")
    if wants_attentions is None:
        wants_attentions = getattr(module.config, "output_attentions", False)
    return bool(arguments.get("use_cache")) or bool(wants_attentions)


def has_cache(arguments: Mapping[str, Any]) -> bool:
    """Return whether a cache came, under any of its names."""
    return any(arguments.get(name) is not None for name in CACHES)


def refuse_packed_stock(arguments: Mapping[str, Any], packing: Mapping[str, Any]) -> None:
    """Raise if a packed batch is on the stock path, where it would leak. Generation is not checked: nothing waits."""
    if any(cls.__name__ == "PagedAttentionCache" for cls in type(arguments.get("cache")).__mro__):
        return  # continuous batching of transformers, whose cache keeps sequences apart
    why = (
        "a cache (past_key_values, which PEFT's prefix tuning passes too, or use_cache=True) or attention weights "
        "(output_attentions=True)"
    )
    mend = (
        "Those run the stock forward, whose tokens would see other sequences. Pass use_cache=False and "
        "output_attentions=False, or send a padded batch."
    )
    if packing:
        raise PackingError(f"{', '.join(packing)} came together with {why}. {mend}")
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
    if positions is None or (cached and positions.ndim > 2):  # of several axes, with images, they rise and fall
        return
    steps = positions.diff()
    grown = (
        steps > 0 if cached or mask is not None else steps == 1
    )  # a jump may be a new sequence, as in a packed batch
    if mask is not None:  # behind a cache it is that of the cache too
        real = mask[:, -positions.shape[-1] :] > 0
        grown = grown | ~(real[:, 1:] & real[:, :-1])
    error = f"position_ids restart or jump inside a row (several sequences packed), and {why} was asked for. {mend}"
    if torch.compiler.is_compiling():  # a look would break the graph
        torch._assert_async(grown.all(), error)
    elif not bool(grown.all()):
        raise PackingError(error)


def _may_be_packed(arguments: Mapping[str, Any]) -> bool:
    """Return False for what ``generate`` does with a cache: begin with an empty one, and train nothing."""
    if torch.is_grad_enabled() or arguments.get("labels") is not None:
        return True
    caches = [arguments[name] for name in CACHES if hasattr(arguments.get(name), "get_seq_length")]
    lengths = [cache.get_seq_length() for cache in caches if _counts_tokens(cache)]
    return any(isinstance(length, int) and length > 0 for length in lengths)  # a tensor's is of generation alone


def _counts_tokens(cache: object) -> bool:
    """Return False for a cache of recurrent states alone, which has no length."""
    layers = getattr(cache, "layers", ())
    return not layers or any(hasattr(layer, "get_seq_length") for layer in layers)


def refuse_uncovered(backbone: ModelLike, family: Family, arguments: Mapping[str, Any]) -> None:
    """Raise where images, audio, an encoder's states or something about rows came with the batch."""
    for names, why in ({family.of_rows: _ABOUT_ROWS} | _NOT_COVERED).items():
        found = [name for name in names if arguments.get(name) is not None]
        if found:
            raise UnsupportedModelError(
                f"{', '.join(found)} came with the batch: {why} train this model unpatched (fastpack.unpatch(model))."
            )
    _refuse_two_ways(backbone, family, arguments)


def _refuse_two_ways(backbone: ModelLike, family: Family, arguments: Mapping[str, Any]) -> None:
    """Raise where the batch marks tokens that attend in both directions; where such marks came, the host waits."""
    marks = None if family.two_way_marks is None else arguments.get(family.two_way_marks)
    if marks is None:
        return
    if family.two_way_if is not None:
        setting, value = family.two_way_if
        if getattr(backbone.config.get_text_config(decoder=True), setting, None) != value:
            return
    error = (
        f"{family.two_way_marks} came with numbers other than 0: these mark tokens that attend in both directions (of "
        "images, or of a prompt), and only causal attention is covered. Leave it out, let its numbers be all 0, or "
        "train the model unpatched (fastpack.unpatch(model))."
    )
    if torch.compiler.is_compiling():  # a look would break the graph
        torch._assert_async(~marks.any(), error)
    elif bool(marks.any()):
        raise UnsupportedModelError(error)


def refuse_positions(backbone: nn.Module, family: Family, arguments: Mapping[str, Any], packed: PackedSeqLens) -> None:
    """Raise where a batch's own ``position_ids`` say what this family can't follow; for others nothing is computed.

    Where it is asked, it waits for the device.

    Raises:
        PackingError: any but each sequence's 0, 1, 2, ..., or those that the family makes itself, where they are
            counted anew; or a sequence that goes on above the one before it, where frequencies depend on each
            sequence's length, which is read where positions fall.
    """
    if arguments.get("position_ids") is None or packed.padding.is_empty or torch.compiler.is_compiling():
        return
    by_length = any(map(is_served, backbone.children()))
    recounted = family.repadded or any("position_ids" in spec.left_out for spec in family.mixers.values())
    if not (recounted or by_length):
        return
    positions, starts = packed.position_ids[0], packed.cu_seqlens[:-1]
    starts = starts[starts < len(positions)].long()
    if recounted:
        begun = torch.zeros_like(positions).index_fill(0, starts, 1).cumsum(0) - 1
        counted = torch.arange(len(positions), device=positions.device) - starts[begun]
        padding_id = _padding_id(backbone)
        wrong, allowed = (positions != counted).any(), "0, 1, 2, ..."
        if padding_id is not None:
            own = counted + (padding_id + 1)
            if arguments.get("input_ids") is not None:
                real = packed.unpad(arguments["input_ids"])[0] != padding_id
                before = real.cumsum(0) - real.long()
                own = torch.where(real, before + 1 - before[starts][begun], 0) + padding_id
            wrong &= (positions != own).any()
            allowed += f" (or {padding_id + 1}, {padding_id + 2}, ..., past ids of padding)"
        if bool(wrong):
            raise PackingError(
                f"position_ids that do not count {allowed} in each sequence came to {type(backbone).__name__}, "
                f"whose family ({family.model_type}) counts anew by itself. Leave them out, and pass packed_seq_lens "
                "or a mask; or train this model unpatched (fastpack.unpatch(model))."
            )
    elif bool((positions[starts[1:]] > positions[starts[1:] - 1]).any()):
        raise PackingError(
            "position_ids of a sequence go on above those of the one before it, and this model's rotary frequencies "
            "depend on each sequence's length, which is read from where positions fall. Let each begin at 0, or leave "
            "position_ids out."
        )


def _padding_id(backbone: nn.Module) -> int | None:
    """Return the id from which a module of a patched backbone counts positions, or None if none counts."""
    for module in backbone.modules():
        ours = replacement_on(module)
        if ours is not None and isinstance(ours.spec, MixerSpec) and ours.spec.counts_from is not None:
            return getattr(module, ours.spec.counts_from)
    return None


def refuse_windows(window: int | None, packed: PackedSeqLens) -> None:
    """Raise where a 4-D mask lets tokens see more of their sequence than this model's narrowest window or chunk.

    Raises:
        PackingError: stock would follow the mask, and leave its window out.
    """
    if window is not None and packed.is_unwindowed and packed.max_seqlen > window:
        raise PackingError(
            f"attention_mask (4-D) lets tokens see all of a sequence of {packed.max_seqlen} before them, and this "
            f"model has layers that see {window} tokens. Pass the [B, S] mask of segment numbers (1, 1, 2, 2, 0), "
            "which leaves that to the model, or shorter sequences."
        )


def refuse_pooled_padding(head: HeadLike, arguments: Mapping[str, Any], packed: PackedSeqLens) -> None:
    """Raise where a sequence classifier would pool a slot of padding, which holds zeros; it waits for the device.

    Those of transformers that look for padding pool the last slot whose id is not ``config.pad_token_id``, and the very
    last one where they see no ids.

    Raises:
        PackingError: that slot is padding, of which stock makes what the model says of padding.
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
    """Raise where ``module`` is a replica that ``nn.DataParallel`` made, whose forward is bound to the original."""
    if getattr(module, "_is_replica", False):
        raise PatchError(
            "a patched model can't run under nn.DataParallel (its replicas would run the original's weights). Start "
            "one process a GPU with `torchrun --nproc-per-node N script.py`, or show one GPU (CUDA_VISIBLE_DEVICES=0)."
        )


def replica_pre_hook(
    hook: PreHook[None, None], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse ``nn.DataParallel`` before a bare backbone, and packed batches that PEFT put prompts into."""
    refuse_replica(module)
    refuse_packed_prompts(args, kwargs)


def learns_prompts(module: nn.Module) -> bool:
    """Return whether a wrapper of PEFT has an adapter that puts virtual tokens before each row."""
    configs = getattr(module, "peft_config", None)
    return isinstance(configs, dict) and any(getattr(each, "is_prompt_learning", False) for each in configs.values())


def passes_a_cache(module: Any) -> bool:
    """Return whether the active prompts of such a wrapper are keys and values, which reach the model as a cache."""
    return method_of(module.peft_config[module.active_adapter]) in _PROMPTS_IN_A_CACHE


def refuse_dropped_positions(wrapper: nn.Module) -> None:
    """Raise where a wrapper of PEFT's that learns prompts drops ``position_ids`` before a backbone without a head.

    Raises:
        PatchError: PEFT is older than 0.19, and the prompts reach the model as a cache: nothing would tell it that the
            batch is packed.
    """
    if learns_prompts(wrapper) and passes_a_cache(wrapper) and Version(version_of("peft") or "0") < Version("0.19"):
        raise PatchError(
            f"{type(wrapper).__name__} of PEFT {version_of('peft')} drops position_ids, so that a packed batch would "
            "be taken for one sequence. Update PEFT (pip install -U 'peft>=0.19'), or wrap a model with a head."
        )


def refuse_packed_prompts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise where a packed batch comes from a wrapper of PEFT's that learns prompts, put on before the patch or after.

    A model does not know what wraps it, and ``position_ids`` don't reach it: PEFT passes None in their place, and only
    where some came. What tells its call are the keywords that it always passes, and those that it never does.

    Raises:
        PackingError: ``position_ids`` were dropped, whatever they said; or the batch says in another way that it is
            packed.
    """
    if args or any(name not in kwargs for name in _PASSED_BY_PEFT):
        return
    mask, to_a_head = kwargs["attention_mask"], "labels" in kwargs  # heads pass on None for what did not come
    lengthened = mask is None or (isinstance(mask, Tensor) and mask.ndim == 2 and mask.is_floating_point())
    embedded = kwargs.get("inputs_embeds") is not None and kwargs.get("input_ids") is None
    embedded = embedded and lengthened and (to_a_head or not any(name in kwargs for name in CACHES))
    cached = to_a_head and has_cache(kwargs)  # PEFT before 0.19 drops them there too
    if (embedded or cached) and "position_ids" in kwargs and kwargs["position_ids"] is None:
        raise PackingError(f"position_ids came to PEFT's virtual tokens, which drop them. {_BEFORE_EACH_ROW}")
    packed = "input_ids" not in kwargs and any(kwargs.get(name) is not None for name in PACKING_KEYWORDS)
    if embedded and (packed or (mask is not None and numbers_segments(mask))):
        raise PackingError(f"a packed batch came to PEFT's virtual tokens: {_BEFORE_EACH_ROW}")


_PASSED_BY_PEFT = ("attention_mask", "output_attentions", "output_hidden_states", "return_dict")
"""The keywords that PEFT's wrappers always pass to the model inside."""

_BEFORE_EACH_ROW = (
    "PEFT puts its virtual tokens before each row, so that only the first sequence of a row would see them. Send a "
    "padded batch without position_ids, or train with LoRA."
)


_PROMPTS_IN_A_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
