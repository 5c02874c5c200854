"""Holding one pass over some tokens to the choices of another: which experts each token takes.

A choice flips with rounding, and everything behind it is then another number: two passes can be compared where both
choose alike. Routers choose with ``torch.topk``, with ``max`` over a dimension, and by comparing scores. The indices
and bools that these return in one pass are what they return in the next, with the values that the next pass has there,
so that gradients are its own.
"""

from __future__ import annotations

import functools
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
    recorders = [_Recorder() for _ in modules]
    with _inside(modules, recorders):
        yield lambda: tuple(tuple(map(torch.cat, zip(*each.forwards, strict=True))) for each in recorders)


@contextmanager
def held(modules: Sequence[nn.Module], choices: Choices) -> Iterator[None]:
    """Let these modules choose so in the passes inside, over the same tokens in the same order.

    Passes may be over some of the tokens each: every one begins where the one before it ended, and again at the first
    token once all have come (in the next pass, or where checkpointing runs a forward again).

    Raises:
        ValueError: inside, where a module chooses for other tokens, or more often.
    """
    with _inside(modules, [_Player(each) for each in choices]):
        yield


@contextmanager
def _inside(modules: Sequence[nn.Module], modes: Sequence[_Recorder]) -> Iterator[None]:
    """Have each module's mode in force while its forward runs, and nowhere else."""
    with ExitStack() as hooks:
        for module, mode in zip(modules, modes, strict=True):
            hooks.enter_context(module.register_forward_pre_hook(mode.enter))
            hooks.enter_context(module.register_forward_hook(mode.leave, always_call=True))
        yield


class _Recorder(TorchFunctionMode):
    """Notes the choices of one module, by forward: those among floating-point numbers, while it is in force."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[list[Tensor]] = []

    def enter(self, *_: Any) -> None:
        """Be in force from here on: a hook before the module's forward."""
        self.forwards.append([])
        self.__enter__()

    def leave(self, *_: Any) -> None:
        """Be in force no more."""
        self.__exit__(None, None, None)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = functools.partial(function, *args, **(kwargs or {}))
        if not (function in _COMPARES or function in _PICKS) or not args[0].is_floating_point():
            return run()
        by_dim = "dim" in run.keywords or isinstance([*args, None][1], int)
        of_all = function in (torch.max, Tensor.max) and not by_dim
        return run() if of_all else self.choose(function, args[0], run)

    def choose(self, function: Any, scores: Tensor, run: Callable[[], Any]) -> Any:
        """Return what ``run``, a call of ``function`` for the scores, is to give."""
        found = run()
        self.forwards[-1].append((found if function in _COMPARES else found[1]).detach())
        return found


class _Player(_Recorder):
    """Gives each forward of one module the choices for its tokens."""

    def __init__(self, calls: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls, self.start, self.taken = calls, 0, 0

    def choose(self, function: Any, scores: Tensor, run: Callable[[], Any]) -> Any:
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
