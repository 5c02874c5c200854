"""Checks for the tests of patching: what a patch may touch, and that a patched model is exact."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from accelerate.hooks import ModelHook
from oracle import FLOAT32_BOUND, compare, make_sequences, run_batch
from tiny import VOCAB
from torch import nn


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return all attributes of each module but parameters and sub-modules: everything that a patch may touch."""
    untouched = ("_parameters", "_modules", "_buffers")
    return {
        f"{name}.{key}": (dict(value) if isinstance(value, dict) else value)
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
        if key not in untouched
    }


def check_exact(model: nn.Module, alone: Any, bound: float = FLOAT32_BOUND) -> None:
    for kind in ("padded left", "TRL's keywords"):
        error = compare(run_batch(model, make_sequences(VOCAB), kind), alone)
        assert error.worst <= bound, error


def written_in(module: str, function: Any) -> FunctionType:
    """Return the same function, as if it were written in that module's file, by another release for example."""
    named = {**function.__globals__, "__name__": module}
    return FunctionType(function.__code__, named, function.__name__, function.__defaults__, function.__closure__)


class CountingHook(ModelHook):
    """A hook that counts how often accelerate calls it."""

    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs
