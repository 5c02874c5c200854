"""Record which experts each token chooses in one pass, and replay these choices in another pass.

A choice flips with rounding, and every later number changes with it. So two passes can be compared only if both choose
the same experts. Routers choose with ``torch.topk``, with ``max`` over a dimension, and by comparing scores. A replay
makes these functions return the recorded indices and bools. The values at these indices come from the new pass, and so
do the gradients.
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
"""The functions that pick from the last dimension, with the type of the pair (values, indices) that they return."""
_COMPARES = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__")
    if hasattr(owner, name)
)
"""The functions that compare numbers, and return bools."""


Choices = tuple[tuple[Tensor, ...], ...]
"""The choices of some modules for T tokens: for each module, and for each choice that its forward makes, the indices
(int64) or bools, ``[T, ..., k]``."""


def choosers_of(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules whose class, or one of its bases, has one of these names, in order."""
    return [m for m in model.modules() if any(cls.__name__ in names for cls in type(m).__mro__)]


@contextmanager
def recorded(modules: Sequence[nn.Module]) -> Iterator[Callable[[], Choices]]:
    """Record the choices of these modules inside a ``with`` block.

    The passes inside the block run over one sequence after another, or over all sequences at once.

    Yields:
        A function that returns the choices, to be called after the passes.
    """
    recorders = [_Recorder() for _ in modules]
    with _inside(modules, recorders):
        yield lambda: tuple(tuple(map(torch.cat, zip(*each.forwards, strict=True))) for each in recorders)


@contextmanager
def replayed(modules: Sequence[nn.Module], choices: Choices) -> Iterator[None]:
    """Make these modules repeat recorded choices inside a ``with`` block.

    The passes inside the block run over the same tokens in the same order. A pass may cover only some of the tokens;
    the next pass then begins at the token after them. After the last token, the choices begin again at the first token:
    in the next pass, or when checkpointing runs a forward again.

    Raises:
        ValueError: A module makes a choice that was not recorded: for other tokens, or one choice too many.
    """
    with _inside(modules, [_Player(each) for each in choices]):
        yield


@contextmanager
def _inside(modules: Sequence[nn.Module], modes: Sequence[_Recorder]) -> Iterator[None]:
    """Enter each module's mode while its forward runs, and only then."""
    with ExitStack() as hooks:
        for module, mode in zip(modules, modes, strict=True):
            hooks.enter_context(module.register_forward_pre_hook(mode.enter))
            hooks.enter_context(module.register_forward_hook(mode.leave, always_call=True))
        yield


class _Recorder(TorchFunctionMode):
    """A recorder of one module's choices among floating-point numbers, one list for each forward."""

    def __init__(self) -> None:
        """Start without any choices."""
        super().__init__()
        self.forwards: list[list[Tensor]] = []

    def enter(self, *_: Any) -> None:
        """Enter the mode: a hook before the module's forward."""
        self.forwards.append([])
        self.__enter__()

    def leave(self, *_: Any) -> None:
        """Leave the mode: a hook after the module's forward."""
        self.__exit__(None, None, None)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass functions that choose among scores to :meth:`choose`, and run all others."""
        run = functools.partial(function, *args, **(kwargs or {}))
        if not (function in _COMPARES or function in _PICKS) or not args[0].is_floating_point():
            return run()
        by_dim = "dim" in run.keywords or isinstance([*args, None][1], int)
        of_all = function in (torch.max, Tensor.max) and not by_dim
        return run() if of_all else self.choose(function, args[0], run)

    def choose(self, function: Any, scores: Tensor, run: Callable[[], Any]) -> Any:
        """Record the choice that ``function`` makes among the scores, and return its result. ``run`` calls it."""
        result = run()
        self.forwards[-1].append((result if function in _COMPARES else result[1]).detach())
        return result


class _Player(_Recorder):
    """A mode that gives each forward of one module the recorded choices for its tokens."""

    def __init__(self, calls: Sequence[Tensor]) -> None:
        """Set up the choices of each call in a forward, for all tokens."""
        super().__init__()
        self.calls, self.start, self.index = calls, 0, 0

    def choose(self, function: Any, scores: Tensor, run: Callable[[], Any]) -> Any:
        """Return the recorded choice, with values from these scores."""
        if not self.calls:
            raise ValueError(f"a choice among scores of {tuple(scores.shape)}, but no choice was recorded here")
        all_tokens = self.calls[self.index]
        end = self.start + len(scores)
        choice = all_tokens[self.start : end]
        if choice.ndim != scores.ndim or choice.shape[:-1] != scores.shape[:-1]:
            expected = f"the recorded choice of {tuple(all_tokens.shape)} from token {self.start} on"
            raise ValueError(f"a choice among scores of {tuple(scores.shape)} can't repeat {expected}: shapes differ")
        self.index += 1
        if self.index == len(self.calls):
            self.index, self.start = 0, end % len(all_tokens)
        return choice if function in _COMPARES else _PICKS[function]((scores.gather(-1, choice), choice))
