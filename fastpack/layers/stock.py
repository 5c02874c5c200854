"""What every swapped forward needs: the stock forward behind it, and a guard against a lost packing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.packing import PackedSeqLens

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


def mask_stand_in(packed: PackedSeqLens) -> Tensor:
    """What a backbone hands down in place of a mask while it runs packed: ``[1, 1, 1, 0]``.

    Being 4-D, it passes through transformers' mask functions untouched, so that no T x T mask is built. Being empty,
    it raises wherever it is used as a mask after all: a loud error, not a leak.
    """
    device = packed.cu_seqlens.device
    mask: Tensor = packed.memo(("mask", device), lambda: torch.empty(1, 1, 1, 0, device=device))
    return mask


def is_stand_in(mask: Any) -> bool:
    """True for what :func:`mask_stand_in` makes."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.numel() == 0


def require_packing(module: nn.Module, packed: PackedSeqLens | None, attention_mask: Any) -> None:
    """Check that a packed forward's lengths, and nothing else, say what an attention module may see.

    Raises:
        PatchError: the stand-in mask came, but ``packed_seq_lens`` got lost on the way; or lengths came with a mask
            of the family's own, which would be dropped.
    """
    stand_in = is_stand_in(attention_mask)
    if packed is None and stand_in:
        raise PatchError(
            f"{type(module).__name__} was reached by a packed batch without packed_seq_lens: a module between it and "
            "the backbone drops keywords. fastpack.unpatch(model) restores the stock model; please report the family."
        )
    if packed is not None and attention_mask is not None and not stand_in:
        shape = tuple(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
        raise PatchError(
            f"{type(module).__name__} got a mask of the family's own ({shape}) with a packed batch; dropping it would "
            "change the result. fastpack.unpatch(model) restores the stock model; please report the family."
        )
