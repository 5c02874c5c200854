"""Metrics of trainers that average over padding, where a patched model's logits are zeros."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

LOGGED = "logits/chosen"


def note_on_padding(trainer: Any) -> str | None:
    """Return a line on the metrics of a trainer that depend on the logits of padding; None where none do.

    TRL's CPO and ORPO (SimPO is CPO's), and trainers made after them, log the mean of logits over every slot of a
    padded batch; others (DPO, KTO) select the completions by a mask. They are told apart by their code.
    """
    cls = type(trainer)
    if not any(_averages_padding(function) for _, function in inspect.getmembers(cls, inspect.isfunction)):
        return None
    return (
        f"{LOGGED} and logits/rejected of {cls.__name__} are means over every slot of a padded batch: those of padding "
        "are zeros here, so that these two differ from stock's; losses and all other metrics are the same"
    )


def _averages_padding(function: Any) -> bool:
    """Return whether a method logs a mean of whole logits, with no mask in sight."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return False
    names = {*code.co_names, *code.co_varnames}
    said = set(_strings(code.co_consts))
    holds_logits = any(name.endswith("logits") for name in code.co_varnames)
    logs = holds_logits and "mean" in names and any(text.endswith(LOGGED) for text in said)
    return logs and not any("mask" in text for text in names | said)


def _strings(constants: tuple[Any, ...]) -> Iterator[str]:
    """Yield the strings among a function's constants; keys of a dict are a tuple there."""
    for each in constants:
        if isinstance(each, str):
            yield each
        elif isinstance(each, tuple):
            yield from _strings(each)
