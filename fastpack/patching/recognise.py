"""Recognise a model: which classes are its family's own, which of them are proved, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fastpack.errors import PatchError
from fastpack.families.lock import hash_of, is_proved, proved_spec, stock_mixing
from fastpack.families.mixer_spec import MixerSpec
from fastpack.families.spec import AnyAttentionSpec, AttentionSpec, ExpertsSpec, Family, Spec
from fastpack.layers.liger import stands_for
from fastpack.layers.read_projection import refuse_rows
from fastpack.layers.rope_tables import unknown_tables
from fastpack.layers.stock_attention import StockAttention
from fastpack.model.unwrap import Parts
from fastpack.patching.support import covered_family
from fastpack.utils.classes import changes_of, mentions, place_of, replaced_forward, shadowed, stock_class
from fastpack.utils.hooks import own_forward


def own_class(module: nn.Module, family: Family) -> str | None:
    """Return the name of a module's class if the class is from this family's file in transformers, else None.

    A class of the same name from elsewhere gives None, too.
    """
    cls = stock_class(module)
    return cls.__name__ if cls.__module__ == family.module else None


Skipped = tuple[tuple[str, str], ...]
"""Classes and options that are left alone, each with the reason."""


@dataclass(frozen=True, eq=False)
class Recognised:
    """Everything that fastpack knows about a model.

    Attributes:
        backbone: The model's backbone.
        family: The family, adjusted to this very model.
        specs: The specs of the classes with fast forwards, by class name. The source of a class is proved, or a twin
            matched its spec.
        unknown: Classes with a row in the family's table whose source was not proved.
        untried: Classes that mix tokens in their stock forward, and with whose source fastpack was not tried.
        replaced_layers: Modules around attention whose forward other code has replaced.
        attends_by: The attention functions of the stock model.
        skipped: Classes that keep their own forward, and why.
        matched: The classes among ``specs`` that a twin matched.
    """

    backbone: nn.Module
    family: Family
    specs: Mapping[str, Spec]
    unknown: tuple[str, ...]
    untried: tuple[str, ...]
    replaced_layers: tuple[nn.Module, ...]
    attends_by: StockAttention
    skipped: Skipped
    matched: tuple[str, ...] = ()


def recognise(parts: Parts, family: Family | None = None) -> Recognised:
    """Recognise a model's family and classes.

    Args:
        parts: The model's backbone and head.
        family: The model's family; None looks it up.

    Raises:
        UnsupportedModelError: No family that is known to be exact covers the model.
        PatchError: A module that mixes tokens, or an adapter, is unknown.
    """
    family, backbone = family or covered_family(parts), parts.backbone
    refuse_rows((parts.head or backbone).modules())
    refuse_unknown_mixers(backbone, family)
    refuse_replaced_attention(backbone, family)
    attends_by = stock_attention(backbone, family)
    family = with_known_backbone(backbone, family)
    layers, skipped = layers_replaced(backbone, family)
    classes, others = known_classes(backbone, family)
    if parts.head is not None and own_class(parts.head, family) and replaced_forward(parts.head) is None:
        classes.append(stock_class(parts.head))
    specs = {
        cls.__name__: proved_spec(cls, family)
        for cls in classes
        if cls.__name__ in family.fast and not _other_experts(backbone, family, cls)
    }
    mixing = [cls for cls in classes if cls.__name__ in stock_mixing(family)]
    if (strange := unknown_tables(backbone)) is not None:
        attention = [name for name in specs if isinstance(family.fast[name], AnyAttentionSpec)]
        specs = {name: spec for name, spec in specs.items() if name not in attention}
        others += tuple((name, f"{strange}: stock forward") for name in attention)
    return Recognised(
        backbone,
        family,
        specs={name: spec for name, spec in specs.items() if spec is not None},
        unknown=tuple(name for name, spec in specs.items() if spec is None),
        untried=tuple(cls.__name__ for cls in mixing if not is_proved(cls.__name__, hash_of(cls, family))),
        replaced_layers=tuple(layers),
        attends_by=attends_by,
        skipped=skipped + others,
    )


def _other_experts(backbone: nn.Module, family: Family, cls: type) -> bool:
    """Return whether a class of experts has no such stacks as its spec names: in this release it is of another kind."""
    spec = family.fast[cls.__name__]
    return isinstance(spec, ExpertsSpec) and not any(
        hasattr(module, spec.inner) for module in backbone.modules() if stock_class(module) is cls
    )


def with_specs(recognised: Recognised, specs: Mapping[str, Spec], **others: Any) -> Recognised:
    """Return the same model with these specs of its classes."""
    return replace(recognised, specs=specs, family=_keeping_windows(recognised.family, specs), **others)


def known_classes(backbone: Any, family: Family) -> tuple[list[Any], Skipped]:
    """Return the family's classes that run their own forwards, and the skipped classes, which run other forwards."""
    own: list[Any] = []
    skipped: list[tuple[str, str]] = []
    classes: dict[Any, str | None] = {stock_class(m): replaced_forward(m) for m in backbone.modules()}
    for cls, replaced in sorted(classes.items(), key=lambda pair: pair[0].__name__):
        if cls.__module__ != family.module:
            skipped += _own_class_skipped(cls, family)
        elif replaced is not None:
            skipped.append((cls.__name__, f"its class's forward is {replaced} now, not transformers': that runs"))
        else:
            own.append(cls)
    return own, tuple(skipped)


def refuse_unknown_mixers(backbone: nn.Module, family: Family) -> None:
    """Raise if a module that seems to mix tokens has a class of unknown origin: it would not know the packing.

    A module seems to mix tokens if its class has the name of a class that does (as in a copied file), or if other
    layers have a recurrent module in the same place.
    """
    mixing = {*family.attention, *family.mixers}
    named = dict(backbone.named_modules())
    places = {_place(name) for name, module in named.items() if own_class(module, family) in family.mixers}
    for name, module in named.items():
        cls = stock_class(module)
        if cls.__module__.split(".")[0] in ("transformers", "torch"):
            continue
        if any(base.__module__ == family.module for base in cls.__mro__):
            continue
        replaces_mixer = _place(name) in places and not any(own_class(m, family) in mixing for m in module.modules())
        if cls.__name__ in mixing or replaces_mixer:
            raise PatchError(
                f"{name} is a {cls.__name__} of {cls.__module__}, which is not the class of {family.module}: how it "
                "mixes tokens is not known, and its sequences would see each other. Give it a class of that module. "
                "Nothing was changed."
            )


def refuse_replaced_attention(backbone: nn.Module, family: Family) -> None:
    """Raise if other code has replaced the forward of a module that mixes tokens by attention.

    The new forward may be on the module or on its class. A replaced method that the forward calls counts as well.

    Raises:
        PatchError: The forward was replaced. How the new one mixes tokens, and whether it knows the packing, is
            unknown.
    """
    for module in backbone.modules():
        if own_class(module, family) not in family.attention:
            continue
        own, replaced = replaced_on_instance(module) or ", ".join(shadowed(module)), replaced_forward(module)
        if own:
            raise PatchError(
                f"the forward of a {stock_class(module).__name__} was already replaced ({own!r}); undo that first: its "
                "attention would not be packed. Nothing was changed."
            )
        if replaced is not None:
            name = stock_class(module).__name__
            raise PatchError(
                f"the forward of {name} is {replaced} now, not transformers': how it mixes tokens is not known, and "
                f"sequences might see each other. Restore the class's own ({name}.forward), or train this model "
                "unpatched. Nothing was changed."
            )


def replaced_on_instance(module: nn.Module) -> Any:
    """Return the forward that other code has set on a module, or None; accelerate's hooks don't count."""
    return None if hasattr(module, "_hf_hook") else own_forward(module)


def is_replaced(module: nn.Module, spec: Spec, recognised: Recognised) -> bool:
    """Return whether other code has replaced a module's forward, or a method that the forward calls.

    A forward that computes the same, such as Liger's, doesn't count.
    """
    if own_class(module, recognised.family) and shadowed(module):
        return True
    forward = replaced_on_instance(module)
    return forward is not None and not stands_for(module, forward, spec, recognised.backbone)


def layers_replaced(backbone: nn.Module, family: Family) -> tuple[list[nn.Module], Skipped]:
    """Return the modules around attention whose forward other code has replaced, and notes on them for the report.

    The new forward may be on the module or on its class. It decides what reaches the attention inside. The backbone
    doesn't count.
    """
    attentions = {id(module) for module in backbone.modules() if own_class(module, family) in family.attention}
    layers: list[nn.Module] = []
    skipped: list[tuple[str, str]] = []
    for module in backbone.modules():
        if module is backbone or id(module) in attentions or not attentions.intersection(map(id, module.modules())):
            continue
        own = replaced_on_instance(module)
        if own is not None:
            skipped.append((type(module).__name__, f"its forward is {place_of(own)}, of other code: that runs"))
        if own is not None or replaced_forward(module) is not None:
            layers.append(module)
    return layers, tuple(skipped)


def with_known_backbone(backbone: nn.Module, family: Family) -> Family:
    """Return the family, on the lowest tier if other code has replaced the forward of the backbone's class.

    Fastpack can't know how such a forward treats a batch. So the backbone runs on rows of equal length, as it would on
    each sequence alone.
    """
    if replaced_forward(backbone) is None:
        return family
    return replace(family, attention=(), mixers={}, fast={}, repadded=True)


def stock_attention(backbone: Any, family: Family) -> StockAttention:
    """Find every module that reads transformers' table of attention functions, with which the stock model attends."""
    readers: dict[tuple[int, type], tuple[nn.Module, str]] = {}
    bypassed = False
    for module in backbone.modules():
        attends = own_class(module, family) in family.attention
        bypassed = bypassed or attends
        if hasattr(module, "config") and (attends or mentions(module, "ALL_ATTENTION_FUNCTIONS")):
            cls = stock_class(module)
            readers.setdefault((id(module.config), cls), (module, cls.__module__))
    usable = ("sdpa", "eager") if getattr(backbone, "_supports_sdpa", False) else ("eager",)
    return StockAttention(tuple(readers.values()), bypassed, usable)


def _place(name: str) -> str:
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def _own_class_skipped(cls: Any, family: Family) -> Skipped:
    """Return the note on a class that derives from one of the family's classes and overrides some of its code.

    Raises:
        PatchError: The class mixes tokens.
    """
    bases = [base.__name__ for base in cls.__mro__ if base.__module__ == family.module]
    if not bases:
        return ()
    what = f"a {bases[0]} with its own {', '.join(changes_of(cls))}"
    if any(name in family.attention or name in family.mixers for name in bases):
        raise PatchError(
            f"{cls.__name__} is {what}: how it mixes tokens is not known, and its sequences would see each other. Give "
            f"it another class, or change the attributes of {bases[0]} instead. Nothing was changed."
        )
    return ((cls.__name__, f"{what}: its own forward runs"),) if bases[0] in family.fast else ()


def with_mask_window(module: Any, spec: AttentionSpec, family: Family) -> AttentionSpec:
    """Return an attention's spec, with the window if transformers applies it only in the mask."""
    kinds = getattr(module.config, "layer_types", None)
    if family.mask_window is None or (kinds is not None and kinds[module.layer_idx] != "sliding_attention"):
        return spec
    return replace(spec, window=f"config.{family.mask_window}")


def _keeping_windows(family: Family, specs: Mapping[str, Spec]) -> Family:
    """Return the family, with attention on rows if transformers applies its window only in the mask.

    The family is unchanged if every class of attention has a fast spec.
    """
    if family.mask_window is None or all(name in specs for name in family.attention):
        return family
    masked = MixerSpec("added", window=f"config.{family.mask_window}")
    return replace(family, attention=(), mixers=dict.fromkeys(family.attention, masked))
