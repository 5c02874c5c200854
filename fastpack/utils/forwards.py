"""What every swapped forward needs: the stock forward behind it, and a guard against a lost packing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

from torch import nn

Forward = Callable[..., Any]
T = TypeVar("T")
FORWARDS = ("forward", "_old_forward")
"""Where a module's forward may be: accelerate's hooks keep the one that they wrap under the second."""
HELD = "_fastpack_forward"
"""Where a norm or MLP keeps ours too, for when a drop-in is put over it (:mod:`fastpack.layers.drop_ins`)."""


@dataclass(frozen=True, eq=False)
class Held:
    """A forward of ours, which nobody calls under this name: it is no partial, which could be put to sleep."""

    forward: functools.partial[Any]

    @property
    def spec(self) -> Any:
        """What it computes."""
        return self.forward.args[1]


def call_stock(module: nn.Module, stock: Forward | None, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward that was there before: an instance's own (accelerate's, TRL's), else the class's."""
    if stock is not None:
        return stock(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


def without_itself(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a forward that knows its module already: accelerate's ``unwrap_model`` makes a method of it."""
    return args[1:] if args and args[0] is module else args


def binds(forward: Any, function: Callable[..., Any]) -> TypeGuard[functools.partial[Any]]:
    """True for a forward of ours that calls this function."""
    return isinstance(forward, functools.partial) and forward.func is function


def bound_with(module: nn.Module, kind: type[T]) -> T | None:
    """What of this kind a swapped forward was bound with; None where there is none."""
    for name in FORWARDS:
        bound = module.__dict__.get(name)
        if isinstance(bound, functools.partial):
            return next((found for found in bound.args if isinstance(found, kind)), None)
    return None
