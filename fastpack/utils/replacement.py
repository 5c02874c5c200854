"""Replace a method of one object by a function that can be disabled, undone, pickled and inspected."""

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
"""A function that restores what was removed, or enables what was disabled."""
SpecT = TypeVar("SpecT")
RuntimeT = TypeVar("RuntimeT")

FORWARDS = ("forward", "_old_forward")
"""The attributes that hold a module's forward. Accelerate's hooks keep the forward that they wrap in the second."""
FORWARD_COPY = "_fastpack_forward"
"""The attribute that holds a second reference to our forward of a norm or MLP, in case a drop-in is put over that
forward (:mod:`fastpack.layers.liger`)."""


@dataclass(eq=False, slots=True, weakref_slot=True)  # no __dict__, which functools.wraps would copy onto a wrapper
class Replacement(Generic[SpecT, RuntimeT]):
    """A function of fastpack that takes the place of one method of one object.

    A call runs ``function(replacement, *args, **kwargs)`` with the method's arguments. Trainers and accelerate wrap an
    object's method, and keep a reference to it that can't be removed. If they keep a replacement, it is disabled
    instead of removed: it then calls the method that was there before.

    Attributes:
        owner: the module or trainer.
        name: the attribute of the instance that holds the replacement; ``_old_forward`` if accelerate's hooks wrap it.
        function: the function that computes.
        spec: the facts that the function reads, mostly those in the family's row about the module.
        runtime: the object that all replacements of one model share.
        earlier: the method that the instance itself had before, or None if it had only its class's.
        enabled: whether a call runs ``function``; if not, it runs :meth:`stock`.
    """

    owner: Any
    name: str
    function: Forward
    spec: SpecT
    runtime: RuntimeT
    earlier: Forward | None = None
    enabled: bool = True

    def install(self) -> None:
        """Set the replacement on the instance."""
        self.earlier = vars(self.owner).get(self.name)
        setattr(self.owner, self.name, self)

    @property
    def module(self) -> Any:
        """The owner, under the name that :class:`PreHook` has too."""
        return self.owner

    @property
    def method(self) -> str:
        """The name of the class's method."""
        return "forward" if self.name in FORWARDS else self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, or the stock method if the replacement is disabled."""
        if args and args[0] is self.owner:  # accelerate's unwrap_model binds it as a method
            args = args[1:]
        return self.function(self, *args, **kwargs) if self.enabled else self.stock(*args, **kwargs)

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method that was there before: the instance's own (accelerate's, TRL's), else the class's."""
        if self.earlier is not None:
            return self.earlier(*args, **kwargs)
        return getattr(type(self.owner), self.method)(self.owner, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the class's method. Trainers drop columns that are not in it.

        ``__wrapped__`` would give the same signature, but accelerate would unwrap the replacement by it.
        """
        return inspect.signature(getattr(type(self.owner), self.method).__get__(self.owner))

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields; an earlier method of the owner is stored as its function."""
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        earlier = state["earlier"]
        if isinstance(earlier, MethodType) and earlier.__self__ is self.owner:
            # a method is pickled as its owner's attribute, which is this replacement by now
            function = earlier.__func__
            own = function is getattr(type(self.owner), self.method)
            # TRL's forward has the name of another function and can't be pickled: the copy runs the class's forward
            state["earlier"] = None if own or not _is_importable(function) else _Function(function)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields, and bind an earlier method to the owner again."""
        for name, value in state.items():
            setattr(self, name, value)
        if isinstance(self.earlier, _Function):
            self.earlier = MethodType(self.earlier.function, self.owner)

    def undo(self) -> Restore:
        """Remove the replacement, or disable it if other code wraps it. The returned function undoes this."""
        place = self.place()
        if place is None:
            return self.disable()
        current = vars(self.owner)[place]
        if self.earlier is not None:
            setattr(self.owner, place, self.earlier)
        else:
            restore_class_method(self.owner, place)
        return functools.partial(setattr, self.owner, place, current)

    def disable(self) -> Restore:
        """Let calls run :meth:`stock`, until the returned function is called."""
        return _disable(self)

    def remove_wrapper(self) -> Restore:
        """Remove the forward that other code put over this one, until the returned function is called."""
        theirs = vars(self.owner).get(self.name)
        if self.name not in FORWARDS or theirs is None or self.place() is not None:
            return do_nothing
        setattr(self.owner, self.name, self)
        return functools.partial(setattr, self.owner, self.name, theirs)

    def place(self) -> str | None:
        """Return the attribute that holds the replacement, or None if another method is there, which may call it."""
        for name in FORWARDS if self.name in FORWARDS else (self.name,):
            method = vars(self.owner).get(name)
            # accelerate's unwrap_model() binds the forward beneath its own as a method
            if method is self or (method is not None and getattr(method, "__func__", None) is self):
                return name
        return None


@dataclass(eq=False)
class PreHook(Generic[SpecT, RuntimeT]):
    """A forward pre-hook of fastpack, which calls ``function(hook, module, args, kwargs)``.

    Attributes:
        module: the module that it is registered on.
        function, spec, runtime, enabled: as in :class:`Replacement`.
        handle: the handle that removes the hook; None before it is registered.
    """

    module: nn.Module
    function: Forward
    spec: SpecT
    runtime: RuntimeT
    enabled: bool = True
    handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function, or do nothing if the hook is disabled."""
        return self.function(self, module, args, kwargs) if self.enabled else None

    def install(self) -> None:
        """Register the hook, with keyword arguments."""
        self.handle = self.module.register_forward_pre_hook(self, with_kwargs=True)

    def undo(self) -> Restore:
        """Remove the hook. The returned function registers it again."""
        assert self.handle is not None
        self.handle.remove()
        return self.install

    def disable(self) -> Restore:
        """Let the hook do nothing, until the returned function is called."""
        return _disable(self)


@dataclass(frozen=True)
class _Function:
    """The function of an earlier method of the owner, in a pickled replacement."""

    function: Callable[..., Any]


def _disable(change: Replacement[Any, Any] | PreHook[Any, Any]) -> Restore:
    before, change.enabled = change.enabled, False
    return functools.partial(setattr, change, "enabled", before)


def _is_importable(function: object) -> bool:
    """Return whether a function can be imported by its module and qualified name."""
    value: Any = sys.modules.get(getattr(function, "__module__", ""))
    for part in getattr(function, "__qualname__", "").split("."):
        value = getattr(value, part, None)
    return value is function


def replaces(value: object, function: Forward) -> TypeGuard[Replacement[Any, Any]]:
    """Return whether a value is a replacement that calls this function."""
    return isinstance(value, Replacement) and value.function is function


def replacement_on(module: nn.Module) -> Replacement[Any, Any] | None:
    """Return the replacement of a module's forward, or None if it has none or another forward wraps it."""
    return next((f for name in FORWARDS if isinstance(f := module.__dict__.get(name), Replacement)), None)


def restore_class_method(owner: Any, place: str) -> None:
    """Give an instance its class's method again."""
    if place == "_old_forward":  # accelerate's hook calls this attribute
        setattr(owner, place, MethodType(type(owner).forward, owner))
    else:
        delattr(owner, place)


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""
