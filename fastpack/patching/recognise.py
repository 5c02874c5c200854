"""Which classes of a model are the family's own, and what is to become of those that stand for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from fastpack.errors import PatchError
from fastpack.families import FORMS, source_hash
from fastpack.families.spec import AnyAttentionSpec, Family, Spec
from fastpack.layers.rope_tables import gives_known_tables, is_rotary
from fastpack.layers.stock_attention import StockAttention
from fastpack.utils.classes import changes_of, mentions, place_of, replaced_forward, stock_class
from fastpack.utils.hooks import own_forward


def own_class(module: nn.Module, family: Family) -> str | None:
    """The name of a class of this family's upstream module, None for a look-alike of the same name and all others."""
    cls = stock_class(module)
    return cls.__name__ if cls.__module__ == family.module else None


def trusted_specs(backbone: Any, family: Family, skipped: list[tuple[str, str]]) -> dict[str, Spec]:
    """What the classes compute that get fast forwards, those whose source is known."""
    trusted: dict[str, Spec] = {}
    classes: dict[Any, str | None] = {stock_class(m): replaced_forward(m) for m in backbone.modules()}
    for cls, replaced in sorted(classes.items(), key=lambda pair: pair[0].__name__):
        if cls.__module__ != family.module:
            _look_at_stranger(cls, family, skipped)
            continue
        if replaced is not None:
            skipped.append((cls.__name__, f"its class's forward is {replaced} now, not transformers': that runs"))
            continue
        if cls.__name__ not in family.fast:
            continue
        found = source_hash(cls)
        if found in FORMS:
            trusted[cls.__name__] = FORMS[found]
        else:
            skipped.append(
                (cls.__name__, f"its source ({found}) is not one that fastpack was proved on: stock forward")
            )
    strange = [type(m).__name__ for m in backbone.modules() if is_rotary(m) and not gives_known_tables(m)]
    if strange:
        fast = [name for name, spec in trusted.items() if isinstance(spec, AnyAttentionSpec)]
        trusted = {name: spec for name, spec in trusted.items() if name not in fast}
        skipped += [(name, f"its cos and sin may be any of {strange[0]}'s: stock forward") for name in fast]
    return trusted


def refuse_look_alikes(backbone: nn.Module, family: Family) -> None:
    """Raise for a class of somebody's own that stands for one which mixes tokens, and would get none of the packing.

    It has that one's name, as in a copied file; or it stands where other layers have a recurrent module.
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
        stands = _place(name) in places and not any(own_class(m, family) in mixing for m in module.modules())
        if cls.__name__ in mixing or stands:
            raise PatchError(
                f"{name} is a {cls.__name__} of {cls.__module__}, which is not the class of {family.module}: how it "
                "mixes tokens is not known, and its sequences would see each other. Give it a class of that module. "
                "Nothing was changed."
            )


def refuse_replaced_attention(backbone: nn.Module, family: Family) -> None:
    """Raise where somebody has put a forward on a module that mixes tokens by attention, or on its class.

    Raises:
        PatchError: how it mixes them is not known, and nothing says that it would be told of the packing.
    """
    for module in backbone.modules():
        if own_class(module, family) not in family.attention:
            continue
        own, replaced = _put_on(module), replaced_forward(module)
        if own is not None:
            raise PatchError(
                f"the forward of a {stock_class(module).__name__} was already replaced ({own!r}); undo that first: its "
                "attention would not be packed. Nothing was changed."
            )
        if replaced is not None:
            name = stock_class(module).__name__
            raise PatchError(
                f"the forward of {name} is {replaced} now, not transformers': how it mixes tokens is not known, and "
                f"sequences might see each other. Put the class's own back ({name}.forward), or train this model "
                "unpatched. Nothing was changed."
            )


def _put_on(module: nn.Module) -> Any:
    """The forward that somebody has put on an instance; None for none, and for accelerate's hooks."""
    return None if hasattr(module, "_hf_hook") else own_forward(module)


def layers_replaced(backbone: nn.Module, family: Family, skipped: list[tuple[str, str]]) -> list[nn.Module]:
    """Modules around attention, the backbone apart, with a forward that somebody put on them or on their class.

    What reaches their attention is for that forward to say.
    """
    attentions = {id(module) for module in backbone.modules() if own_class(module, family) in family.attention}
    found = []
    for module in backbone.modules():
        if module is backbone or id(module) in attentions or not attentions.intersection(map(id, module.modules())):
            continue
        own = _put_on(module)
        if own is not None:
            skipped.append((type(module).__name__, f"its forward is {place_of(own)}, somebody's own: that runs"))
        if own is not None or replaced_forward(module) is not None:
            found.append(module)
    return found


def with_known_backbone(backbone: nn.Module, family: Family) -> Family:
    """The family; where somebody has put a forward on the backbone's class, of which it may make anything, its last
    rung: the backbone runs on rows of equal length, as it would on each sequence alone."""
    if replaced_forward(backbone) is None:
        return family
    return replace(family, attention=(), mixers={}, fast=(), repadded=True)


def stock_attention(backbone: Any, family: Family) -> StockAttention:
    """What this backbone attends by without a patch: every module that reads transformers' table of functions."""
    found: dict[tuple[int, type], tuple[nn.Module, str]] = {}
    bypassed = False
    for module in backbone.modules():
        attends = own_class(module, family) in family.attention
        bypassed = bypassed or attends
        if hasattr(module, "config") and (attends or mentions(module, "ALL_ATTENTION_FUNCTIONS")):
            cls = stock_class(module)
            found.setdefault((id(module.config), cls), (module, cls.__module__))
    usable = ("sdpa", "eager") if getattr(backbone, "_supports_sdpa", False) else ("eager",)
    return StockAttention(tuple(found.values()), bypassed, usable)


def _place(name: str) -> str:
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def _look_at_stranger(cls: Any, family: Family, skipped: list[tuple[str, str]]) -> None:
    """A class of somebody's own over one of this family's, with something of its own in place of what that has."""
    bases = [base.__name__ for base in cls.__mro__ if base.__module__ == family.module]
    if not bases:
        return
    what = f"a {bases[0]} with its own {', '.join(changes_of(cls))}"
    if any(name in family.attention or name in family.mixers for name in bases):
        raise PatchError(
            f"{cls.__name__} is {what}: how it mixes tokens is not known, and its sequences would see each other. Give "
            f"it another class, or change what {bases[0]} holds instead. Nothing was changed."
        )
    if bases[0] in family.fast:
        skipped.append((cls.__name__, f"{what}: its own forward runs"))
