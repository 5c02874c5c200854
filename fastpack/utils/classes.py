"""Find the class of a module that says what it computes, where others were put over it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from fastpack.errors import PatchError
from fastpack.utils.compile import constant, known_once

_SAYING = ("__call__", "__getattr__", "__getattribute__", "__setattr__")
"""Special methods that change what a module computes; the others copy, restore or print it."""


_NAMING = (
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
"""Attributes that only name things, for loading, saving and placing a model that exists: no forward reads them."""


def stock_class(module: nn.Module) -> Any:
    """The class of a module, or the one under those that FSDP2, a parametrization or a user has put over it.

    Of a user's only such as changes nothing that it inherits; one with a forward of its own stays what it is.
    """
    return _stock_of(type(module))


def _stock_of(cls: type) -> Any:
    return next(each for each in cls.__mro__ if issubclass(each, nn.Module) and not _adds_nothing(each))


def mentions(module: nn.Module, name: str) -> bool:
    """True where the stock forward of a module's class reads this global or attribute."""
    return name in names_in(stock_class(module).forward)


def shadowed(module: nn.Module) -> list[str]:
    """Methods of a module's class that its stock forward calls, and in whose place the instance has another."""
    cls = stock_class(module)
    held = [name for name in names_in(cls.forward) if name in module.__dict__]
    return [name for name in held if inspect.isfunction(inspect.getattr_static(cls, name, None))]


@known_once
def names_in(function: Any) -> tuple[str, ...]:
    """The globals and attributes that a function reads, whatever wraps it."""
    return inspect.unwrap(function).__code__.co_names


def _adds_nothing(cls: type) -> bool:
    if cls.__module__.startswith("torch.distributed."):
        return True
    if cls.__module__.split(".")[0] in ("transformers", "builtins"):
        return False
    inherits = any(issubclass(base, nn.Module) and base is not nn.Module for base in cls.__bases__)
    return inherits and not changes_of(cls)


def changes_of(cls: Any) -> list[str]:
    """Return the names that a class, or a mixin of it that is no module, has in place of what it inherits.

    Names don't count (a config class, as remote code sets it). An ``__init__`` counts together with a config class: it
    may build something else of settings that are nobody's but its own.
    """
    modules = [base for base in cls.__bases__ if issubclass(base, nn.Module)]
    mixins = [base for base in cls.__bases__ if base not in modules]
    spaces = [cls, *(each for base in mixins for each in base.__mro__ if each is not object)]
    names = dict.fromkeys(name for space in spaces for name in vars(space))
    said = [name for name in names if name in (*_SAYING, "__init__") or not name.startswith("__")]
    own = [name for name in said if any(hasattr(base, name) and _differ(cls, base, name) for base in modules)]
    unknown = () if "config_class" in own else ("__init__",)
    return [name for name in own if name not in (*_NAMING, *unknown)]


def _differ(cls: object, base: object, name: str) -> bool:
    """Unless one wraps the other, as transformers wraps the forward of every subclass of its layers."""
    mine, its = inspect.getattr_static(cls, name), inspect.getattr_static(base, name)
    return unwrapped(mine) is not unwrapped(its)


def unwrapped(function: Any) -> Any:
    """The function beneath transformers' and torch's own decorators; one that somebody else put over it stays."""

    def is_somebodys(wrapper: object) -> bool:
        return defined_in(wrapper).split(".")[0] not in ("transformers", "torch", "contextlib")

    return inspect.unwrap(function, stop=is_somebodys)


def defined_in(forward: object) -> str:
    """The module in which a forward was written, whatever it says: TRL's has the name of what it replaces."""
    return str(getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__"))


def place_of(code: object) -> str:
    """Return the dotted name of a function, a class or an object's class, under the module in which it was written.

    Of a function that is the module whose globals it reads, whatever its ``__module__`` says, beneath decorators of
    torch and transformers.
    """
    while isinstance(code, functools.partial | MethodType):
        code = code.func if isinstance(code, functools.partial) else code.__func__
    code = unwrapped(code) if isinstance(code, FunctionType) else code
    named = code if hasattr(code, "__qualname__") else type(code)
    module = getattr(code, "__globals__", {}).get("__name__", getattr(named, "__module__", None))
    return f"{module}.{named.__qualname__.rpartition('<locals>.')[2]}"


def package_of(code: object) -> str:
    """The top-level package of :func:`place_of`."""
    return place_of(code).partition(".")[0]


@constant
def is_upstreams(function: object) -> bool:
    """True for a function of transformers or torch, decorated by these alone."""
    return package_of(function) in ("transformers", "torch")


def replaced_forward(module: nn.Module) -> str | None:
    """Return the place of a forward that somebody has put on a module's class; None for the class's own.

    A class of somebody's own counts as what it is: see :func:`stock_class`.
    """
    return foreign_forward(stock_class(module))


def foreign_forward(cls: Any) -> str | None:
    """The same of a class."""
    own = cls.__module__.split(".")[0] not in ("transformers", "torch") or is_upstreams(cls.forward)
    return None if own else place_of(cls.forward)


class Classes:
    """The classes of modules whose forward a patch replaced, as they were when they were last looked at.

    A forward of ours computes what the class did that the module had; one that comes over it later, or is put on that
    class, is seen at the next forward of the model.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[nn.Module, type]] = []
        self._forwards: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # somebody's forward can't always be pickled
        return {"seen": self._seen, "places": {cls: place_of(forward) for cls, forward in self._forwards.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._seen, places = state["seen"], state["places"]
        self._forwards = {cls: cls.forward if place_of(cls.forward) == place else None for cls, place in places.items()}

    def watch(self, modules: Iterable[nn.Module], *, forwards: Iterable[nn.Module] = ()) -> None:
        """Look at the classes of these from now on, and at what forward is on the classes of ``forwards``."""
        self._seen += [(module, type(module)) for module in modules]
        self._forwards |= {cls: cls.forward for cls in map(stock_class, forwards)}

    def check(self) -> None:
        """Raise where a module computes something else now; costs a look at each class while none was changed.

        Raises:
            PatchError: it names both classes, or the forward that was put on one.
        """
        for cls, forward in self._forwards.items():
            if cls.forward is not forward:
                raise PatchError(
                    f"the forward of {cls.__name__} became {place_of(cls.forward)} after the patch, which is another "
                    "than the one that fastpack computes, or calls. Put the class's own back, or call unpatch(model) "
                    "and patch it again."
                )
        for at, (module, before) in enumerate(self._seen):
            now = type(module)
            if now is before:
                continue
            if _stock_of(now) is not _stock_of(before):
                raise PatchError(
                    f"a {before.__name__} became a {now.__name__} after the patch, whose forward is another than the "
                    "one that fastpack computes. Call unpatch(model), and patch it again."
                )
            self._seen[at] = (module, now)
