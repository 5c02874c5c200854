"""Find the class that defines what a module computes, beneath the classes that other code put over it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from fastpack.errors import PatchError
from fastpack.utils.compile import cached_constant

_COMPUTING_METHODS = ("__call__", "__getattr__", "__getattribute__", "__setattr__")
"""Special methods that change what a module computes; the other special methods copy, restore or print it."""


_DESCRIPTIVE_NAMES = (
    "_auto_class",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save",
    "_no_split_modules",
    "_skip_keys_device_placement",
    "_tied_weights_keys",
    "base_model_prefix",
    "config_class",
    "main_input_name",
    "model_tags",
)
"""Attributes that only describe a model, for loading, saving and placing it: no forward reads them."""


def stock_class(module: nn.Module) -> Any:
    """Return a module's class, or the one beneath if FSDP2, a parametrization or a user put other classes over it.

    A user's subclass is skipped only if it changes nothing that it inherits. A subclass with its own forward counts as
    the stock class.
    """
    return _stock_of(type(module))


def _stock_of(cls: type) -> Any:
    return next(each for each in cls.__mro__ if issubclass(each, nn.Module) and not _adds_nothing(each))


def mentions(module: nn.Module, name: str) -> bool:
    """Return whether the stock forward of a module's class reads this global or attribute."""
    return name in names_in(stock_class(module).forward)


def shadowed(module: nn.Module) -> list[str]:
    """Return the methods that a module's stock forward calls and that the instance overrides."""
    cls = stock_class(module)
    overridden = [name for name in names_in(cls.forward) if name in module.__dict__]
    return [name for name in overridden if inspect.isfunction(inspect.getattr_static(cls, name, None))]


@cached_constant
def names_in(function: Any) -> tuple[str, ...]:
    """Return the globals and attributes that a function reads, beneath all of its wrappers."""
    return inspect.unwrap(function).__code__.co_names


def _adds_nothing(cls: type) -> bool:
    # over an abstract class, such as those of PEFT's layers, FSDP2's class is said to be of the module abc
    placed = cls.__bases__[0] if cls.__module__ == "abc" and cls.__bases__ else cls
    if placed.__module__.startswith("torch.distributed."):
        return True
    if cls.__module__.split(".")[0] in ("transformers", "builtins"):
        return False
    inherits = any(issubclass(base, nn.Module) and base is not nn.Module for base in cls.__bases__)
    return inherits and not changes_of(cls)


def changes_of(cls: Any) -> list[str]:
    """Return the names that a class, or a mixin of it that is not a module, overrides.

    Descriptive names such as a config class don't count: remote code sets them. An ``__init__`` counts only if the
    class also has its own config class: it may then build something else, from settings that no other class has.
    """
    modules = [base for base in cls.__bases__ if issubclass(base, nn.Module)]
    mixins = [base for base in cls.__bases__ if base not in modules]
    spaces = [cls, *(each for base in mixins for each in base.__mro__ if each is not object)]
    names = dict.fromkeys(name for space in spaces for name in vars(space))
    relevant = [name for name in names if name in (*_COMPUTING_METHODS, "__init__") or not name.startswith("__")]
    own = [name for name in relevant if any(hasattr(base, name) and _differ(cls, base, name) for base in modules)]
    ignored = _DESCRIPTIVE_NAMES if "config_class" in own else (*_DESCRIPTIVE_NAMES, "__init__")
    return [name for name in own if name not in ignored]


def _differ(cls: object, base: object, name: str) -> bool:
    """Return whether two classes differ in an attribute.

    A wrapper counts as what it wraps, since transformers wraps the forward of every subclass of its layers.
    """
    mine, its = inspect.getattr_static(cls, name), inspect.getattr_static(base, name)
    return unwrapped(mine) is not unwrapped(its)


def unwrapped(function: Any) -> Any:
    """Return the function beneath the decorators of transformers and torch; decorators of other packages stay."""

    def is_foreign(wrapper: object) -> bool:
        return defined_in(wrapper).split(".")[0] not in ("transformers", "torch", "contextlib")

    return inspect.unwrap(function, stop=is_foreign)


def defined_in(forward: object) -> str:
    """Return the name of the module whose globals a forward reads.

    ``__module__`` does not show it: TRL gives its forward the names of the forward that it replaces.
    """
    return str(getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__"))


def place_of(code: object) -> str:
    """Return the dotted name of a function, a class or an object's class, with the module in which it was written.

    A function's module is the one whose globals it reads, whatever its ``__module__`` says. Decorators of torch and
    transformers are looked through.
    """
    while isinstance(code, functools.partial | MethodType):
        code = code.func if isinstance(code, functools.partial) else code.__func__
    code = unwrapped(code) if isinstance(code, FunctionType) else code
    named = code if hasattr(code, "__qualname__") else type(code)
    module = getattr(code, "__globals__", {}).get("__name__", getattr(named, "__module__", None))
    return f"{module}.{named.__qualname__.rpartition('<locals>.')[2]}"


def package_of(code: object) -> str:
    """Return the top-level package of :func:`place_of`."""
    return place_of(code).partition(".")[0]


@cached_constant
def is_upstreams(function: Any) -> bool:
    """Return whether a function is written in transformers or torch, and decorated by these packages alone."""
    return package_of(function) in ("transformers", "torch")


def replaced_forward(module: nn.Module) -> str | None:
    """Return the place of a forward that other code assigned to a module's class, or None if the class has its own.

    The class is that of :func:`stock_class`; a class that a user wrote has its own forward.
    """
    return foreign_forward(stock_class(module))


def foreign_forward(cls: Any) -> str | None:
    """Return the place of a forward that other code assigned to a class, or None if the class has its own."""
    own = cls.__module__.split(".")[0] not in ("transformers", "torch") or is_upstreams(cls.forward)
    return None if own else place_of(cls.forward)


class Classes:
    """The classes of the patched modules, as they were at the last check.

    Our forward computes what the module's class computed at the patch. If other code later puts a class over it, or
    assigns a forward to the class, the model's next forward notices.
    """

    def __init__(self) -> None:
        """Set up with no class to check."""
        self._classes: list[tuple[nn.Module, type]] = []
        self._forwards: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the places of forwards, since some forwards can't be pickled."""
        return {"classes": self._classes, "places": {cls: place_of(forward) for cls, forward in self._forwards.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the forwards again by their places."""
        self._classes, places = state["classes"], state["places"]
        self._forwards = {cls: cls.forward if place_of(cls.forward) == place else None for cls, place in places.items()}

    def watch(self, modules: Iterable[nn.Module], *, forwards: Iterable[nn.Module] = ()) -> None:
        """Check the classes of ``modules`` from now on, and the forwards of the classes of ``forwards``."""
        self._classes += [(module, type(module)) for module in modules]
        self._forwards |= {cls: cls.forward for cls in map(stock_class, forwards)}

    def check(self) -> None:
        """Raise if a module computes something other than at the patch. This costs one comparison for each class.

        Raises:
            PatchError: a module has another class, or a class has another forward; the message names both.
        """
        for cls, forward in self._forwards.items():
            if cls.forward is not forward:
                raise PatchError(
                    f"the forward of {cls.__name__} became {place_of(cls.forward)} after the patch; fastpack computes "
                    "the earlier one. Assign the class's own forward again, or call unpatch(model) and patch anew."
                )
        for at, (module, before) in enumerate(self._classes):
            now = type(module)
            if now is before:
                continue
            if _stock_of(now) is not _stock_of(before):
                raise PatchError(
                    f"a {before.__name__} became a {now.__name__} after the patch, and their forwards differ. "
                    "Call unpatch(model), and patch it again."
                )
            self._classes[at] = (module, now)
