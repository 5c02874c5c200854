"""Which class of a module says what it computes, where others were put over it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fastpack.compiling import known_once

_SAYING = ("__call__", "__getattr__", "__getattribute__", "__setattr__")
"""Special methods that change what a module computes; the others copy, restore or print it."""


def stock_class(module: nn.Module) -> Any:
    """The class of a module, or the one under those that FSDP2, a parametrization or a user has put over it.

    Of a user's only such as changes nothing that it inherits; one with a forward of its own stays what it is.
    """
    return next(cls for cls in type(module).__mro__ if not _adds_nothing(cls))


def mentions(module: nn.Module, name: str) -> bool:
    """True where the stock forward of a module's class reads this global or attribute."""
    return name in names_in(stock_class(module).forward)


@known_once
def names_in(function: Any) -> tuple[str, ...]:
    """The globals and attributes that a function reads, whatever wraps it."""
    found: tuple[str, ...] = inspect.unwrap(function).__code__.co_names
    return found


def _adds_nothing(cls: type) -> bool:
    if cls.__module__.startswith("torch.distributed."):
        return True
    if cls.__module__.split(".")[0] in ("transformers", "builtins"):
        return False
    inherits = any(issubclass(base, nn.Module) and base is not nn.Module for base in cls.__bases__)
    return inherits and not changes_of(cls)


def changes_of(cls: Any) -> list[str]:
    """What a class has of its own in place of what it inherits."""
    names = [name for name in vars(cls) if name in _SAYING or not name.startswith("__")]
    return [name for name in names if any(hasattr(base, name) and _differ(cls, base, name) for base in cls.__bases__)]


def _differ(cls: Any, base: Any, name: str) -> bool:
    """Unless one wraps the other, as transformers wraps the forward of every subclass of its layers."""
    mine, its = inspect.getattr_static(cls, name), inspect.getattr_static(base, name)
    return inspect.unwrap(mine) is not inspect.unwrap(its)
