"""A method of one object, computed by fastpack: put on the instance, disabled, undone, pickled, inspected."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Generic, TypeGuard, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

Forward = Callable[..., Any]
Restore = Callable[[], None]
"""Puts back what was taken off, or enables what was disabled."""
SpecT = TypeVar("SpecT")
RuntimeT = TypeVar("RuntimeT")

FORWARDS = ("forward", "_old_forward")
"""The attributes that hold a module's forward: accelerate's hooks keep the one that they wrap under the second."""
KEPT_FORWARD = "_fastpack_forward"
"""The attribute that holds ours of a norm or MLP too, for when a drop-in is put over it
(:mod:`fastpack.layers.liger`)."""


@dataclass(eq=False, slots=True, weakref_slot=True)  # no __dict__, which functools.wraps would copy onto a wrapper
class Replacement(Generic[SpecT, RuntimeT]):
    """A function of fastpack's in the place of one method of one object.

    It is called as ``function(replacement, *args, **kwargs)`` with what the method was called with. Trainers and
    accelerate wrap the method that they find, and one that they hold can't be taken from them: disabled, it is the
    method that was there before.

    Attributes:
        owner: the module or trainer.
        name: the attribute of the instance that it stands under, ``_old_forward`` where accelerate's hooks wrap it.
        function: what computes.
        spec: what it computes: mostly what the family's row says of the module.
        runtime: what all replacements of one model share.
        earlier: what the instance had there before; None where it had its class's.
        enabled: whether a call computes, or is one of :meth:`stock`.
    """

    owner: Any
    name: str
    function: Forward
    spec: SpecT
    runtime: RuntimeT
    earlier: Forward | None = None
    enabled: bool = True

    def put(self) -> None:
        """Set it on the instance."""
        self.earlier = vars(self.owner).get(self.name)
        setattr(self.owner, self.name, self)

    @property
    def module(self) -> Any:
        """The owner, of what was changed on a model."""
        return self.owner

    @property
    def method(self) -> str:
        """The name of the class's method."""
        return "forward" if self.name in FORWARDS else self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.owner:  # accelerate's unwrap_model makes a method of it
            args = args[1:]
        return self.function(self, *args, **kwargs) if self.enabled else self.stock(*args, **kwargs)

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was there before: the instance's own (accelerate's, TRL's), else the class's."""
        if self.earlier is not None:
            return self.earlier(*args, **kwargs)
        return getattr(type(self.owner), self.method)(self.owner, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        # trainers drop columns by it; not by __wrapped__, along which accelerate unwraps
        return inspect.signature(getattr(type(self.owner), self.method).__get__(self.owner))

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        earlier = state["earlier"]
        if isinstance(earlier, MethodType) and earlier.__self__ is self.owner:
            # a method is pickled as an attribute of its owner, which would be this very replacement
            function = earlier.__func__
            own = function is getattr(type(self.owner), self.method)
            # one that goes by another's name (TRL's) can't be pickled: the class's runs in the copy
            state["earlier"] = None if own or not _is_importable(function) else _Function(function)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        if isinstance(self.earlier, _Function):
            self.earlier = MethodType(self.earlier.function, self.owner)

    def undo(self) -> Restore:
        """Take it off, or disable it where somebody holds it; what this returns puts it on again."""
        place = self.place()
        if place is None:
            return self.disable()
        found = vars(self.owner)[place]
        if self.earlier is not None:
            setattr(self.owner, place, self.earlier)
        else:
            take_off(self.owner, place)
        return functools.partial(setattr, self.owner, place, found)

    def disable(self) -> Restore:
        """Let a call be one of :meth:`stock`, until what this returns is called."""
        return _disable(self)

    def uncover(self) -> Restore:
        """Take off what somebody put over a forward, until what this returns is called."""
        theirs = vars(self.owner).get(self.name)
        if self.name not in FORWARDS or theirs is None or self.place() is not None:
            return nothing
        setattr(self.owner, self.name, self)
        return functools.partial(setattr, self.owner, self.name, theirs)

    def place(self) -> str | None:
        """Return the attribute that it stands under; None where somebody's is there, which may call it."""
        for name in FORWARDS if self.name in FORWARDS else (self.name,):
            found = vars(self.owner).get(name)
            # accelerate's unwrap_model() makes a method of what it finds beneath its own
            if found is self or (found is not None and getattr(found, "__func__", None) is self):
                return name
        return None


@dataclass(eq=False)
class PreHook(Generic[SpecT, RuntimeT]):
    """A forward pre-hook of fastpack's, called as ``function(hook, module, args, kwargs)``.

    Attributes: those of :class:`Replacement`.
    """

    module: nn.Module
    function: Forward
    spec: SpecT
    runtime: RuntimeT
    enabled: bool = True
    handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.function(self, module, args, kwargs) if self.enabled else None

    def put(self) -> None:
        """Register it; it takes keywords too."""
        self.handle = self.module.register_forward_pre_hook(self, with_kwargs=True)

    def undo(self) -> Restore:
        """Remove it; what this returns registers it again."""
        assert self.handle is not None
        self.handle.remove()
        return self.put

    def disable(self) -> Restore:
        """Let it do nothing, until what this returns is called."""
        return _disable(self)


@dataclass(frozen=True)
class _Function:
    """A function that a pickled replacement found bound to its owner."""

    function: Callable[..., Any]


def _disable(change: Replacement[Any, Any] | PreHook[Any, Any]) -> Restore:
    before, change.enabled = change.enabled, False
    return functools.partial(setattr, change, "enabled", before)


def _is_importable(function: object) -> bool:
    """True for a function that stands where its name says."""
    found: Any = sys.modules.get(getattr(function, "__module__", ""))
    for part in getattr(function, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is function


def replaces(found: object, function: Forward) -> TypeGuard[Replacement[Any, Any]]:
    """True for a replacement that calls this function."""
    return isinstance(found, Replacement) and found.function is function


def replacement_on(module: nn.Module) -> Replacement[Any, Any] | None:
    """The replacement of a module's forward; None where there is none, or somebody's forward covers it."""
    return next((f for name in FORWARDS if isinstance(f := module.__dict__.get(name), Replacement)), None)


def take_off(owner: Any, place: str) -> None:
    """Leave an instance its class's method."""
    if place == "_old_forward":  # accelerate's hook calls what is there
        setattr(owner, place, MethodType(type(owner).forward, owner))
    else:
        delattr(owner, place)


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""
