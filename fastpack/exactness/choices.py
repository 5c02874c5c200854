"""Holding one pass over some tokens to the choices of another: which experts each token takes.

A choice flips with rounding, and everything behind it is then another number: two passes can be compared where both
choose alike. Routers choose with ``torch.topk``, with ``max`` over a dimension, and by comparing scores. The indices
and bools that these return in one pass are what they return in the next, with the values that the next pass has there,
so that gradients are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_PICKS = {
    torch.topk: torch.return_types.topk,
    Tensor.topk: torch.return_types.topk,
    torch.max: torch.return_types.max,
    Tensor.max: torch.return_types.max,
}
"""What picks from the last dimension, and the pair of values and indices that it returns."""
_COMPARES = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__")
    if hasattr(owner, name)
)
"""What compares numbers, and returns bools."""


Choices = tuple[tuple[Tensor, ...], ...]
"""What some modules choose for T tokens: of each module and each choice that its forward makes the indices (int64) or
bools, ``[T, ..., k]``."""


def choosers_of(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules whose class, or one that it derives from, has one of these names, in order."""
    return [m for m in model.modules() if any(cls.__name__ in names for cls in type(m).__mro__)]


@contextmanager
def recorded(modules: Sequence[nn.Module]) -> Iterator[Callable[[], Choices]]:
    """Note what these modules choose in the passes inside, over one sequence after the other or over all at once.

    Yields:
        What returns the choices, to be called behind the passes.
    """
    seen: list[list[list[Tensor]]] = [[] for _ in modules]

    def record(i: int) -> TorchFunctionMode:
        seen[i].append([])
        return _Recorder(seen[i][-1])

    with _inside(modules, record):
        yield lambda: tuple(tuple(map(torch.cat, zip(*each, strict=True))) for each in seen)


@contextmanager
def held(modules: Sequence[nn.Module], choices: Choices) -> Iterator[None]:
    """Let these modules choose so in the passes inside, over the same tokens in the same order.

    Passes may be over some of the tokens each: every one begins where the one before it ended, and again at the first
    token once all have come (in the next pass, or where checkpointing runs a forward again).

    Raises:
        ValueError: inside, where a module chooses for other tokens, or more often.
    """
    players = [_Player(calls) for calls in choices]
    with _inside(modules, lambda i: players[i]):
        yield


@contextmanager
def _inside(modules: Sequence[nn.Module], mode: Callable[[int], TorchFunctionMode]) -> Iterator[None]:
    """Have a mode in force while a module's forward runs, the ``mode(i)`` of the i-th, and nowhere else."""
    with ExitStack() as hooks:
        for i, module in enumerate(modules):
            running: list[TorchFunctionMode] = []

            def enter(_: nn.Module, __: Any, i: int = i, running: list[TorchFunctionMode] = running) -> None:
                running.append(mode(i).__enter__())

            def leave(_: nn.Module, __: Any, ___: Any, running: list[TorchFunctionMode] = running) -> None:
                running.pop().__exit__(None, None, None)

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _chooses(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True where a call picks from, or compares, floating-point numbers."""
    if function in _COMPARES:
        return bool(args[0].is_floating_point())
    if function not in _PICKS or not args[0].is_floating_point():
        return False
    of_all = function in (torch.max, Tensor.max) and "dim" not in kwargs and not isinstance([*args, None][1], int)
    return not of_all


class _Recorder(TorchFunctionMode):
    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if _chooses(function, args, kwargs or {}):
            self.seen.append((found if function in _COMPARES else found[1]).detach())
        return found


class _Player(TorchFunctionMode):
    """Gives each forward of one module the choices for its tokens."""

    def __init__(self, calls: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls, self.start, self.taken = calls, 0, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _chooses(function, args, kwargs or {}):
            return function(*args, **(kwargs or {}))
        scores = args[0]
        if not self.calls:
            raise ValueError(f"a choice among scores of {tuple(scores.shape)}, where none was noted")
        all_tokens = self.calls[self.taken]
        end = self.start + len(scores)
        choice = all_tokens[self.start : end]
        if choice.ndim != scores.ndim or choice.shape[:-1] != scores.shape[:-1]:
            said = f"those from {self.start} on of {tuple(all_tokens.shape)}"
            raise ValueError(f"a choice among scores of {tuple(scores.shape)} is to be held to {said}")
        self.taken += 1
        if self.taken == len(self.calls):
            self.taken, self.start = 0, end % len(all_tokens)
        return choice if function in _COMPARES else _PICKS[function]((scores.gather(-1, choice), choice))
