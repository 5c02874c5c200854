"""What a patch sets on a model or a trainer: each change can be undone, or sleep, whoever put theirs over it since.

Trainers and accelerate wrap the forward that they find. Ours can't be taken away from under a wrapper, which holds it;
but it is a ``functools.partial`` of its own, and can be turned, in place, into a call of what was there before it.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from fastpack.layers.attention import attention_forward
from fastpack.layers.hf_attention import SCOPE, stock_config
from fastpack.layers.liger import is_drop_in
from fastpack.layers.mlp import mlp_forward
from fastpack.layers.norm import norm_forward
from fastpack.packing.context import PackingScope
from fastpack.utils.forwards import FORWARDS, HELD, Held, binds, bound_with, call_stock, without_itself
from fastpack.utils.hooks import has_hooks

TakeBack = Callable[[], None]

_PARTS = (attention_forward, mlp_forward, norm_forward)
"""What a layer computes itself, fused with what lies around it."""


class Change(Protocol):
    """Something set on a module."""

    module: nn.Module

    def undo(self) -> TakeBack:
        """Take it off; what this returns puts it on again."""

    def sleep(self) -> TakeBack:
        """As if it were undone, until what this returns is called."""

    def uncover(self) -> TakeBack:
        """Take off what somebody put over it, until what this returns is called."""


@dataclass(eq=False)
class Attribute:
    """An attribute of a module, or of a trainer, that was set to ``ours``; ``previous`` is what the instance had there,
    or None."""

    module: Any
    name: str
    ours: Any
    previous: Any

    @classmethod
    def put(cls, module: nn.Module, name: str, make: Callable[[Any], Any]) -> Attribute:
        """Set it to what ``make`` makes of the previous one."""
        previous = module.__dict__.get(name)
        change = cls(module, name, make(previous), previous)
        if isinstance(change.ours, functools.partial):
            vars(change.ours)["fastpack"] = name  # a partial of one that carries nothing would hold the function alone
        setattr(module, name, change.ours)
        return change

    @classmethod
    def over(cls, owner: Any, name: str, function: Callable[..., Any], *bound: Any) -> Attribute:
        """Put ``function`` over a method; it gets the owner, the method as it was, ``bound``, and what is passed."""
        stock = getattr(owner, name)
        return cls.put(owner, name, lambda _: functools.partial(function, owner, stock, *bound))

    def undo(self) -> TakeBack:
        place = self._place()
        if place is not None:
            found = self.module.__dict__[place]
            self._put_back(place)
            return functools.partial(setattr, self.module, place, found)
        return self._pass_through(self.ours) if isinstance(self.ours, functools.partial) else _nothing

    def sleep(self) -> TakeBack:
        return self._pass_through(self.ours) if isinstance(self.ours, functools.partial) else self.undo()

    def uncover(self) -> TakeBack:
        theirs = self.module.__dict__.get(self.name)
        if self.name not in FORWARDS or theirs is None or self._place() is not None:
            return _nothing
        setattr(self.module, self.name, self.ours)
        return functools.partial(setattr, self.module, self.name, theirs)

    def is_covered(self) -> bool:
        """True where somebody's forward stands where ours was, and computes something else."""
        theirs, held = self.module.__dict__.get("forward"), self.module.__dict__.get(HELD)
        return self._place() is None and not (held is not None and is_drop_in(self.module, theirs, held.spec))

    def _place(self) -> str | None:
        """Under which name ours is; None where somebody's is, which may call it."""
        names = FORWARDS if self.name in FORWARDS else (self.name,)
        for name in names:
            found = self.module.__dict__.get(name)
            # accelerate's unwrap_model() makes a method of what it finds beneath its own
            if found is self.ours or (found is not None and getattr(found, "__func__", None) is self.ours):
                return name
        return None

    def _put_back(self, place: str) -> None:
        if self.previous is not None:
            setattr(self.module, place, self.previous)
        else:
            _take_off(self.module, place)

    def _pass_through(self, ours: functools.partial[Any]) -> TakeBack:
        if self.name in FORWARDS:
            return _become(ours, pass_through, self.module, self.previous)
        if self.previous is not None:
            return _become(ours, self.previous)
        return _become(ours, getattr(type(self.module), self.name), self.module)


@dataclass(eq=False)
class Hook:
    """A forward pre-hook, a ``functools.partial`` of its own."""

    module: nn.Module
    hook: functools.partial[Any]
    handle: RemovableHandle

    @classmethod
    def put(cls, module: nn.Module, hook: Callable[..., Any]) -> Hook:
        """Register it; it takes keywords too."""
        own = functools.partial(hook)
        return cls(module, own, module.register_forward_pre_hook(own, with_kwargs=True))

    def undo(self) -> TakeBack:
        self.handle.remove()
        return self._redo

    def _redo(self) -> None:
        self.handle = self.module.register_forward_pre_hook(self.hook, with_kwargs=True)

    def sleep(self) -> TakeBack:
        return _become(self.hook, _nothing)

    def uncover(self) -> TakeBack:
        return _nothing


def pass_through(module: nn.Module, stock: Any, *args: Any, **kwargs: Any) -> Any:
    """What is left of a forward of ours that somebody holds: a call of what was there before."""
    return call_stock(module, stock, *without_itself(module, args), **kwargs)


def take_off_copies(model: nn.Module, changed: Sequence[nn.Module]) -> list[TakeBack]:
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
    take_backs: list[TakeBack] = []
    for module in copies.values():
        if id(module) in known or not carries_ours(module):
            continue
        for place in (*FORWARDS, HELD, "config"):
            if place in module.__dict__:
                take_backs.append(functools.partial(setattr, module, place, module.__dict__[place]))
        _take_off_forwards(module)
        stock = stock_config(module)
        if stock is not None:
            module.config = stock
    return take_backs


def _weights(module: nn.Module) -> tuple[type, int] | None:
    """What copies that share their weights with a module have in common with it; None where these lie elsewhere."""
    first = next(module.parameters(), None)
    place = 0 if first is None else first.data_ptr()  # zero on meta, and of weights that are spread over ranks
    return (type(module), place) if place else None


def carries_ours(module: nn.Module) -> bool:
    """True where a module has a forward of ours, or attends through our interface."""
    ours = HELD in module.__dict__ or any(_is_ours(module.__dict__.get(place)) for place in FORWARDS)
    return ours or stock_config(module) is not None


def count_drop_ins(backbone: nn.Module, changes: Sequence[Change]) -> int:
    """How many modules have a drop-in over our forward, or had one under it."""
    found: set[int] = set()
    forwards = (change for change in changes if isinstance(change, Attribute) and change.name in FORWARDS)
    before = {id(change.module): change.previous for change in forwards}
    for module in backbone.modules():
        held: Held | None = module.__dict__.get(HELD)
        if held is None:
            continue
        stands = (module.__dict__.get("forward"), before.get(id(module)))
        if any(is_drop_in(module, forward, held.spec) for forward in stands):
            found.add(id(module))
    return len(found)


def unfused(backbone: nn.Module, changes: Sequence[Change]) -> tuple[tuple[str, str], ...]:
    """Parts of layers that what a user did since the patch has run by themselves, by class, and why."""
    inside = {id(module) for module in backbone.modules() if module is not backbone}
    found: Counter[tuple[str, str]] = Counter()
    for change in changes:
        module = change.module
        if not isinstance(change, Attribute) or change.name not in FORWARDS or id(module) not in inside:
            continue
        if change.is_covered():
            found[type(module).__name__, "another forward was put over fastpack's, and runs"] += 1
        elif has_hooks(module) and any(binds(change.ours, function) for function in _PARTS):
            found[type(module).__name__, "with hooks: called as a module, with nothing around it fused"] += 1
    return tuple((name, f"{count}: {why}") for (name, why), count in found.items())


def scopes_of(module: nn.Module) -> tuple[PackingScope | None, PackingScope | None]:
    """What tells a module of the packing where no keyword does: its forward, its attention."""
    return bound_with(module, PackingScope), getattr(module.__dict__.get("config"), SCOPE, None)


def take_off_head(head: nn.Module) -> None:
    """Take off what is ours on a head whose backbone, and with it all that was known of the patch, was replaced."""
    _take_off_forwards(head)
    if _is_ours(head.__dict__.get("generate")):
        _take_off(head, "generate")
    for key in [key for key, hook in head._forward_pre_hooks.items() if _is_ours(hook)]:
        del head._forward_pre_hooks[key]
        head._forward_pre_hooks_with_kwargs.pop(key, None)


def _take_off_forwards(module: nn.Module) -> None:
    module.__dict__.pop(HELD, None)
    for place in FORWARDS:
        if _is_ours(module.__dict__.get(place)):
            _take_off(module, place)


def _take_off(module: nn.Module, place: str) -> None:
    if place == "_old_forward":  # accelerate's hook calls what is there
        setattr(module, place, types.MethodType(type(module).forward, module))
    else:
        del module.__dict__[place]


def _is_ours(found: Any) -> bool:
    function = found.func if isinstance(found, functools.partial) else None
    return str(getattr(function, "__module__", None)).startswith("fastpack.layers.")


def _become(partial: functools.partial[Any], function: Callable[..., Any], *args: Any) -> TakeBack:
    """Turn a partial into another in place; what this returns turns it back."""
    set_state = partial.__setstate__  # type: ignore[attr-defined]  # what unpickling calls
    before = partial.__reduce__()[2]
    set_state((function, args, {}, partial.__dict__))
    return functools.partial(set_state, before)


def _nothing(*_: Any, **__: Any) -> None:
    pass
