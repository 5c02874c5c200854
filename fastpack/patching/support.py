"""Find the family that covers a model, or say why no family covers it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from packaging.version import Version
from torch import nn

from fastpack.errors import PatchError, UnsupportedModelError
from fastpack.families.composites import composite_spec
from fastpack.families.refused import REFUSED
from fastpack.families.registry import family_of
from fastpack.families.spec import BlockSpec, Family, Spec
from fastpack.layers.rope_tables import LENGTH_DEPENDENT
from fastpack.layers.window_checks import mask_maker
from fastpack.model.blocks import applies
from fastpack.model.unwrap import Parts
from fastpack.utils.protocols import ModelLike


def covered_family(parts: Parts) -> Family:
    """Return the family that covers a model.

    Raises:
        UnsupportedModelError: No family covers it.
    """
    backbone, config = parts.backbone, parts.backbone.config
    name = type(parts.head or backbone).__name__
    family = family_of(backbone)
    if family is None:
        raise UnsupportedModelError(f"{name} can't be patched: {_why_not_covered(backbone)}. Nothing was changed.")
    outdated = too_old(family)
    if outdated is not None:
        raise UnsupportedModelError(f"{name} can't be patched: {outdated}. Nothing was changed.")
    if family.causal_if_decoder and not config.is_decoder:
        raise UnsupportedModelError(
            f"{name} can't be patched: {family.model_type} is an encoder (bidirectional attention) unless its config "
            "says is_decoder=True, and packing is for decoders. Nothing was changed."
        )
    for setting, why in family.refused_if.items():
        if getattr(config, setting, None):
            raise UnsupportedModelError(
                f"{name} with {setting} in its config can't be patched: {why}. Train it unpatched, or without "
                f"{setting}. Nothing was changed."
            )
    text = config.get_text_config(decoder=True)  # a composite config holds a text config
    blocks = _blocks(parts)
    if blocks is None and mask_maker(parts.composite) is not None:
        raise UnsupportedModelError(
            f"{name} can't be patched: {type(parts.composite).__name__} makes the masks of its text model itself, and "
            "which tokens they let see each other is not known. Train it unpatched, or patch its text model alone and "
            "train on text. Nothing was changed."
        )
    if blocks is not None and not family.uses_blocks:
        raise UnsupportedModelError(
            f"{name} can't be patched: its {blocks.argument} mark tokens that see each other in both directions, and "
            f"the layers of {type(backbone).__name__} are causal when patched. Train it unpatched. Nothing was changed."
        )
    # "vision" means blocks of images
    set_to = [getattr(each, "use_bidirectional_attention", False) for each in (config, text)]
    bidirectional = any(value not in (False, None, "vision") for value in set_to)
    bidirectional = bidirectional and not marks_both_ways(parts)
    if not family.repadded and (bidirectional or getattr(text, "is_causal", True) is False):
        raise UnsupportedModelError(
            f"{name} is set to attend in both directions (its config has use_bidirectional_attention, or is_causal="
            "False); only causal attention is covered. Train it unpatched. Nothing was changed."
        )
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = getattr(text, "layer_types", None)
    nested = {k: p["rope_type"] for k, p in parameters.items() if isinstance(p, dict) and "rope_type" in p}
    by_length = [k for k, rope in nested.items() if rope in LENGTH_DEPENDENT and (kinds is None or k in kinds)]
    if by_length:
        raise UnsupportedModelError(
            f"{name} has rotary frequencies that depend on the length, set for each kind of layer separately "
            f"({', '.join(f'{k}: {nested[k]}' for k in by_length)}), which is not covered. Set another rotary type "
            "(rope_parameters of the config), or train it unpatched. Nothing was changed."
        )
    if any(getattr(config, name, None) for name in family.repadded_if):
        return replace(family, attention=(), mixers={}, repadded=True)
    return family


def _blocks(parts: Parts) -> BlockSpec | None:
    """Return how a composite's batches mark blocks; None if they can't, or if there is no composite."""
    return None if parts.composite is None else composite_spec(parts.composite).blocks


def has_blocks(parts: Parts) -> bool:
    """Return whether some batches of a model have blocks of images, whose tokens see each other in both directions."""
    blocks = _blocks(parts)
    return blocks is not None and applies(blocks, parts.composite.config)


def marks_both_ways(parts: Parts) -> bool:
    """Return whether a model is set to attend in both directions, but its batches must say which tokens do.

    Such a composite's row says that the token types are required.
    """
    blocks = _blocks(parts)
    return blocks is not None and bool(blocks.required)


def refuse_two_ways(
    parts: Parts, own: Mapping[nn.Module, str], attentions: Iterable[nn.Module], specs: Mapping[str, Spec]
) -> None:
    """Raise if an attention module attends in both directions, unless its composite's batches say where it does.

    Args:
        parts: the model's parts.
        own: each module's class name.
        attentions: the attention modules of the backbone.
        specs: the specs of the classes with fast forwards; other classes are checked when they attend.

    Raises:
        PatchError: the message names the class.
    """
    if marks_both_ways(parts):
        return
    for module in attentions:
        if own[module] in specs and getattr(module, "is_causal", True) is False:
            raise PatchError(
                f"a {own[module]} was set to attend in both directions (is_causal=False); only causal attention is "
                "covered. Train it unpatched, or set it to True. Nothing was changed."
            )


def too_old(family: Family) -> str | None:
    """Return why this release of transformers can't run the family, or None."""
    import transformers

    if family.since is None:
        return None
    release, before = family.since
    if Version(transformers.__version__).release >= release:
        return None
    return (
        f"in transformers {transformers.__version__} {family.model_type} {before}; "
        f"{'.'.join(map(str, release))} fixes this"
    )


def _why_not_covered(backbone: ModelLike) -> str:
    config = backbone.config
    model_type = getattr(config, "model_type", "?")
    if model_type in REFUSED:
        return f"family {model_type!r} is refused: {REFUSED[model_type]}"
    if hasattr(backbone, "encoder") and hasattr(backbone, "decoder"):
        return f"{model_type} is an encoder-decoder, and packing is for decoders"
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        return (
            f"{model_type} is a multimodal model (vision or audio), which is not covered; its text model alone may be "
            "(load it with AutoModelForCausalLM)"
        )
    if hasattr(backbone, "pooler") or not getattr(config, "is_decoder", True):
        return f"{model_type} is an encoder (bidirectional attention), and packing is for decoders"
    return (
        f"family {model_type!r} ({type(backbone).__name__}) is not covered yet; see `fastpack families` for the "
        "covered families"
    )
