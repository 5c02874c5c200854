"""The changes that a patch makes to a model: each can be undone, or disabled, whoever put theirs over it since.

A forward is a :class:`fastpack.utils.replacement.Replacement`; what else changes is here. All of them are kept on the
backbone (:mod:`fastpack.patching.state`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.layers.attention import attention_forward
from fastpack.layers.hf_attention import SCOPE, stock_config
from fastpack.layers.liger import is_drop_in
from fastpack.layers.mlp import mlp_forward
from fastpack.layers.norm import norm_forward
from fastpack.layers.runtime import Runtime
from fastpack.packing.context import PackingContext
from fastpack.utils.hooks import has_hooks
from fastpack.utils.replacement import (
    FORWARD_COPY,
    FORWARDS,
    PreHook,
    Replacement,
    Restore,
    do_nothing,
    replacement_on,
    restore_class_method,
)

_PARTS = (attention_forward, mlp_forward, norm_forward)
"""The parts that a layer computes itself, fused with what lies around them."""


@dataclass(eq=False)
class Attribute:
    """An attribute of a module that is no forward: a private config, or a forward kept under a second name.

    Its methods are those of a :class:`PreHook`.
    """

    module: nn.Module
    name: str
    ours: Any
    previous: Any = None

    def install(self) -> None:
        self.previous = self.module.__dict__.get(self.name)
        setattr(self.module, self.name, self.ours)

    def undo(self) -> Restore:
        if self.module.__dict__.get(self.name) is not self.ours:
            return do_nothing
        if self.previous is not None:
            setattr(self.module, self.name, self.previous)
        else:
            delattr(self.module, self.name)
        return self.install

    def disable(self) -> Restore:
        return self.undo()


Change = Replacement[Any, Any] | PreHook[Any, Any] | Attribute
"""One thing that is set on a module."""


def take_off_copies(model: nn.Module, changed: Sequence[nn.Module]) -> list[Restore]:
    """Take what is ours off the modules that PEFT copied from patched ones: ``modules_to_save``, tuned norms,
    replicated layers.

    Others that carry something of ours are somebody's: another model's, whose patch is in force.

    Args:
        changed: those that the patch itself changed, from which it was taken already.

    Returns:
        What puts it on again.
    """
    known, weights = {id(module) for module in changed}, {_weights(module) for module in changed} - {None}
    saved = (
        found
        for module in model.modules()
        for name in ("modules_to_save", "ln_tuning_layers")
        if isinstance(found := getattr(module, name, None), nn.ModuleDict)
    )
    copies = {id(module): module for each in saved for module in each.modules()}
    copies |= {id(module): module for module in model.modules() if _weights(module) in weights}
    restores: list[Restore] = []
    for module in copies.values():
        if id(module) in known or not carries_ours(module):
            continue
        for place in (*FORWARDS, FORWARD_COPY, "config"):
            if place in module.__dict__:
                restores.append(functools.partial(setattr, module, place, module.__dict__[place]))
        _take_off_forwards(module)
        stock = stock_config(module)
        if stock is not None:
            module.config = stock
    return restores


def _weights(module: nn.Module) -> tuple[type, int] | None:
    """A module's class and its weights' place, which copies that share them have too; None where they lie elsewhere."""
    first = next(module.parameters(), None)
    place = 0 if first is None else first.data_ptr()  # zero on meta, and of weights that are spread over ranks
    return (type(module), place) if place else None


def carries_ours(module: nn.Module) -> bool:
    """True where a module has a forward of ours, or attends through our interface."""
    ours = FORWARD_COPY in module.__dict__ or replacement_on(module) is not None
    return ours or stock_config(module) is not None


def count_drop_ins(backbone: nn.Module, changes: Sequence[Change]) -> int:
    """Count the modules that have a drop-in over our forward, or had one under it."""
    return sum(
        any(_is_drop_in(change, forward) for forward in (change.owner.__dict__.get("forward"), change.earlier))
        for change in _forwards(backbone, changes)
    )


def unfused(backbone: nn.Module, changes: Sequence[Change]) -> tuple[tuple[str, str], ...]:
    """Parts of layers that what a user did since the patch has run by themselves, by class, and why."""
    found: Counter[tuple[str, str]] = Counter()
    for change in _forwards(backbone, changes):
        module = change.owner
        if change.place() is None and not _is_drop_in(change, module.__dict__.get("forward")):
            found[type(module).__name__, "another forward was put over fastpack's, and runs"] += 1
        elif has_hooks(module) and change.function in _PARTS:
            found[type(module).__name__, "with hooks: called as a module, with nothing around it fused"] += 1
    return tuple((name, f"{count}: {why}") for (name, why), count in found.items())


def _forwards(backbone: nn.Module, changes: Sequence[Change]) -> list[Replacement[Any, Any]]:
    """Our forwards of modules that are inside the backbone still."""
    inside = {id(module) for module in backbone.modules() if module is not backbone}
    return [
        change
        for change in changes
        if isinstance(change, Replacement) and change.name in FORWARDS and id(change.owner) in inside
    ]


def _is_drop_in(ours: Replacement[Any, Any], forward: object) -> bool:
    """True for a forward of somebody's that computes what ours does."""
    return ours.function in (mlp_forward, norm_forward) and is_drop_in(ours.owner, forward, ours.spec)


def contexts_of(module: nn.Module) -> tuple[PackingContext | None, PackingContext | None]:
    """The contexts that tell a module of the packing where no keyword does: of its forward, and of its attention."""
    ours = replacement_on(module)
    of_forward = ours.runtime.context if ours is not None and isinstance(ours.runtime, Runtime) else None
    return of_forward, getattr(module.__dict__.get("config"), SCOPE, None)


def take_off_head(head: nn.Module) -> None:
    """Take off what is ours on a head whose backbone, and with it all that was known of the patch, was replaced."""
    _take_off_forwards(head)
    if isinstance(head.__dict__.get("generate"), Replacement):
        restore_class_method(head, "generate")
    for hook in list(head._forward_pre_hooks.values()):
        if isinstance(hook, PreHook):
            hook.undo()


def _take_off_forwards(module: nn.Module) -> None:
    module.__dict__.pop(FORWARD_COPY, None)
    for place in FORWARDS:
        if isinstance(module.__dict__.get(place), Replacement):
            restore_class_method(module, place)
