"""The changes that a patch makes to a model.

Each change can be undone or disabled, even if other code has wrapped it since. A new forward is a
:class:`fastpack.utils.replacement.Replacement`; the other kinds of changes are here. The backbone keeps all of them
(:mod:`fastpack.patching.state`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpack.layers.attention import attention_forward
from fastpack.layers.hf_attention import SCOPE, stock_config
from fastpack.layers.liger import is_drop_in
from fastpack.layers.mlp import mlp_forward
from fastpack.layers.norm import norm_forward
from fastpack.layers.runtime import Runtime
from fastpack.model.log_probs import log_probs_forward
from fastpack.packing.context import PackingContext
from fastpack.patching.mxfp4_order import PlainOrder
from fastpack.utils.hooks import has_hooks
from fastpack.utils.replacement import (
    FORWARD_COPY,
    FORWARDS,
    PreHook,
    Replacement,
    Restore,
    do_nothing,
    replacement_on,
    replaces,
    restore_class_method,
)

_PARTS = (attention_forward, mlp_forward, norm_forward)
"""The forwards of parts that a layer computes itself, fused with neighbouring operations."""
QUANTIZER = "hf_quantizer"
"""The attribute of a model of transformers that holds its quantizer."""


@dataclass(eq=False)
class Attribute:
    """An attribute of a module other than its forward: a private config, or a forward under a second name.

    It has the methods of a :class:`PreHook`.
    """

    module: nn.Module
    name: str
    ours: Any
    previous: Any = None

    def install(self) -> None:
        """Set the attribute."""
        self.previous = self.module.__dict__.get(self.name)
        setattr(self.module, self.name, self.ours)

    def undo(self) -> Restore:
        """Restore the attribute's earlier value, and return a function that sets fastpack's value again."""
        if self.module.__dict__.get(self.name) is not self.ours:
            return do_nothing
        if self.previous is not None:
            setattr(self.module, self.name, self.previous)
        else:
            delattr(self.module, self.name)
        return self.install

    def disable(self) -> Restore:
        """Undo the change, since an attribute can't be wrapped."""
        return self.undo()


Change = Replacement[Any, Any] | PreHook[Any, Any] | Attribute | PlainOrder
"""One change of a module."""


def forward_replacement(
    module: nn.Module, function: Callable[..., Any], spec: object, runtime: object
) -> Replacement[Any, Any]:
    """Return a replacement of a module's forward."""
    # under this name accelerate keeps the forward that its hooks wrap
    name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
    return Replacement(module, name, function, spec, runtime)


def restore_copies(model: nn.Module, changed: Sequence[nn.Module]) -> list[Restore]:
    """Restore the modules that PEFT copied from patched modules.

    These are ``modules_to_save``, tuned norms and replicated layers. Other modules with fastpack's forwards belong to
    another model, which stays patched.

    Args:
        model: The model, with its wrappers.
        changed: The modules that the patch itself changed, which are restored already.

    Returns:
        Functions that set fastpack's forwards on the copies again.
    """
    restored, weights = {id(module) for module in changed}, {_weights(module) for module in changed} - {None}
    saved = (
        each
        for module in model.modules()
        for name in ("modules_to_save", "ln_tuning_layers")
        if isinstance(each := getattr(module, name, None), nn.ModuleDict)
    )
    copies = {id(module): module for each in saved for module in each.modules()}
    copies |= {id(module): module for module in model.modules() if _weights(module) in weights}
    restores: list[Restore] = []
    for module in copies.values():
        if id(module) in restored or not carries_ours(module):
            continue
        for place in (*FORWARDS, FORWARD_COPY, "config"):
            if place in module.__dict__:
                restores.append(functools.partial(setattr, module, place, module.__dict__[place]))
        _restore_forwards(module)
        stock = stock_config(module)
        if stock is not None:
            module.config = stock
    return restores


def _weights(module: nn.Module) -> tuple[type, int] | None:
    """Return a module's class and the address of its weights, which copies share, or None if there is no address.

    Weights have no address on the meta device, or if they are spread over ranks.
    """
    first = next(module.parameters(), None)
    place = 0 if first is None else first.data_ptr()  # zero on meta, and for weights that are spread over ranks
    return (type(module), place) if place else None


def carries_ours(module: nn.Module) -> bool:
    """Return whether a module has a forward of fastpack's, or attends through fastpack's interface."""
    ours = FORWARD_COPY in module.__dict__ or replacement_on(module) is not None
    return ours or stock_config(module) is not None


def count_drop_ins(backbone: nn.Module, changes: Sequence[Change]) -> int:
    """Count the modules with a drop-in forward, such as Liger's, bound before or after fastpack's forward."""
    return sum(
        any(_is_drop_in(change, forward) for forward in (change.owner.__dict__.get("forward"), change.earlier))
        for change in _forwards(backbone, changes)
    )


def unfused(backbone: nn.Module, changes: Sequence[Change]) -> tuple[tuple[str, str], ...]:
    """Return the classes of parts of layers that now run unfused, and why.

    Since the patch, a user has put hooks on them, or has replaced fastpack's forward.
    """
    reasons: Counter[tuple[str, str]] = Counter()
    for change in _forwards(backbone, changes):
        module = change.owner
        if change.place() is None and not _is_drop_in(change, module.__dict__.get("forward")):
            reasons[type(module).__name__, "another forward has replaced fastpack's, and runs"] += 1
        elif has_hooks(module) and change.function in _PARTS:
            reasons[
                type(module).__name__, "with hooks: called as a module, so its neighbours are not fused with it"
            ] += 1
    return tuple((name, f"{count}: {why}") for (name, why), count in reasons.items())


def _forwards(backbone: nn.Module, changes: Sequence[Change]) -> list[Replacement[Any, Any]]:
    """Return fastpack's forwards of modules that are still inside the backbone."""
    inside = {id(module) for module in backbone.modules() if module is not backbone}
    return [
        change
        for change in changes
        if isinstance(change, Replacement) and change.name in FORWARDS and id(change.owner) in inside
    ]


def _is_drop_in(ours: Replacement[Any, Any], forward: object) -> bool:
    """Return whether another forward computes the same as fastpack's."""
    return ours.function in (mlp_forward, norm_forward) and is_drop_in(ours.owner, forward, ours.spec)


def contexts_of(module: nn.Module) -> tuple[PackingContext | None, PackingContext | None]:
    """Return the contexts that hold the packing for a module's forward and for its attention.

    They are used if no keyword passes the packing. None means that there is no context.
    """
    ours = replacement_on(module)
    of_forward = ours.runtime.context if ours is not None and isinstance(ours.runtime, Runtime) else None
    return of_forward, getattr(module.__dict__.get("config"), SCOPE, None)


def restore_head(head: nn.Module) -> None:
    """Restore a head after its backbone, which held the record of the patch, was replaced."""
    _restore_forwards(head)
    if isinstance(head.__dict__.get("generate"), Replacement):
        restore_class_method(head, "generate")
    for hook in list(head._forward_pre_hooks.values()):
        if isinstance(hook, PreHook):
            hook.undo()


def _restore_forwards(module: nn.Module) -> None:
    module.__dict__.pop(FORWARD_COPY, None)
    for place in FORWARDS:
        forward = module.__dict__.get(place)
        if isinstance(forward, Replacement) and not replaces(forward, log_probs_forward):  # a trainer's own undoes that
            restore_class_method(module, place)
