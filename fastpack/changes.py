"""What a patch sets on a model: each change can be undone, or sleep for a while, whoever put theirs over it since.

Trainers and accelerate wrap the forward that they find. Ours can't be taken away from under a wrapper, which holds it;
but it is a ``functools.partial`` of its own, and can be turned, in place, into a call of what was there before it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from fastpack.layers.stock import call_stock

_ABSENT = "absent"
_FORWARDS = ("forward", "_old_forward")
"""Where a forward may be: accelerate's hooks keep the one they wrap under the second."""

TakeBack = Callable[[], None]


class Change(Protocol):
    """Something set on a module."""

    def undo(self) -> None:
        """For good."""

    def sleep(self) -> TakeBack:
        """As if it were undone, until what this returns is called."""

    def uncover(self) -> TakeBack:
        """Take off what somebody put over it, until what this returns is called."""


@dataclass(eq=False)
class Attribute:
    """An attribute of a module that was set to ``ours``."""

    module: nn.Module
    name: str
    ours: Any
    previous: Any = _ABSENT

    @classmethod
    def put(cls, module: nn.Module, name: str, make: Callable[[Any], Any]) -> Attribute:
        """Set it to what ``make`` makes of what the instance had there, or of None."""
        previous = module.__dict__.get(name, _ABSENT)
        change = cls(module, name, make(None if isinstance(previous, str) else previous), previous)
        setattr(module, name, change.ours)
        return change

    def undo(self) -> None:
        place = self._place()
        if place is not None:
            self._put_back(place)
        elif isinstance(self.ours, functools.partial):
            self._pass_through(self.ours)

    def sleep(self) -> TakeBack:
        place = self._place()
        if isinstance(self.ours, functools.partial):
            return self._pass_through(self.ours)
        if place is None:
            return _nothing
        self._put_back(place)
        return functools.partial(setattr, self.module, place, self.ours)

    def uncover(self) -> TakeBack:
        theirs = self.module.__dict__.get(self.name)
        if self.name not in _FORWARDS or theirs is None or self._place() is not None:
            return _nothing
        setattr(self.module, self.name, self.ours)
        return functools.partial(setattr, self.module, self.name, theirs)

    def _place(self) -> str | None:
        """Under which name ours is; None where somebody's is, which may call it."""
        names = _FORWARDS if self.name in _FORWARDS else (self.name,)
        return next((name for name in names if self.module.__dict__.get(name) is self.ours), None)

    def _put_back(self, place: str) -> None:
        if not isinstance(self.previous, str):
            setattr(self.module, place, self.previous)
        elif place == "_old_forward":  # a hook came since, and calls what is there
            setattr(self.module, place, types.MethodType(type(self.module).forward, self.module))
        else:
            del self.module.__dict__[place]

    def _pass_through(self, ours: functools.partial[Any]) -> TakeBack:
        previous = None if isinstance(self.previous, str) else self.previous
        if self.name in _FORWARDS:
            return _become(ours, call_stock, self.module, previous)
        return _become(ours, previous or getattr(type(self.module), self.name), *(() if previous else (self.module,)))


@dataclass(eq=False)
class Hook:
    """A forward pre-hook, a ``functools.partial`` of its own."""

    hook: functools.partial[Any]
    handle: RemovableHandle

    @classmethod
    def put(cls, module: nn.Module, hook: Callable[..., Any]) -> Hook:
        """Register it; it takes keywords too."""
        own = functools.partial(hook)
        return cls(own, module.register_forward_pre_hook(own, with_kwargs=True))

    def undo(self) -> None:
        self.handle.remove()

    def sleep(self) -> TakeBack:
        return _become(self.hook, _nothing)

    def uncover(self) -> TakeBack:
        return _nothing


def take_off_strays(model: nn.Module) -> None:
    """Take off what is ours on modules of which no patch knows any more.

    Somebody copied them from patched ones, as PEFT does for ``modules_to_save``, or replaced the backbone under a head.
    """
    for module in model.modules():
        for name in _FORWARDS:
            if _is_ours(module.__dict__.get(name)):
                del module.__dict__[name]
        for key in [key for key, hook in module._forward_pre_hooks.items() if _is_ours(hook)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _is_ours(found: Any) -> bool:
    return isinstance(found, functools.partial) and found.func.__module__.startswith("fastpack.layers.")


def _become(partial: functools.partial[Any], function: Callable[..., Any], *args: Any) -> TakeBack:
    """Turn a partial into another in place; what this returns turns it back."""
    set_state = partial.__setstate__  # type: ignore[attr-defined]  # what unpickling calls
    before = partial.__reduce__()[2]
    set_state((function, args, {}, partial.__dict__))
    return functools.partial(set_state, before)


def _nothing(*_: Any, **__: Any) -> None:
    pass
