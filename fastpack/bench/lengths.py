"""How many tokens each row of a batch has; of DPO, the prompt and both completions of each pair."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEDIAN, SPREAD, RANGE = 149, 0.7, (16, 663)

Pair = tuple[int, int, int]
"""Tokens of the prompt, of the chosen and of the rejected completion."""

PROMPT, PROMPT_SPREAD, PROMPT_RANGE = 193, 1.3, (16, 2000)
COMPLETION, COMPLETION_SPREAD, COMPLETION_RANGE = 338, 1.15, (8, 1100)
SHARED = 0.5
"""Correlation of the logarithms of a pair's two lengths."""
LONGEST = 2**31 - 1
"""The longest row where none is cut."""


def make_lengths(count: int, *, kind: str = "alpaca", seed: int = 0, max_length: int | None = None) -> list[int]:
    """Return ``count`` lengths in tokens.

    Args:
        kind: ``alpaca`` draws them like instruction data (log-normal, median 149, 5 % below about 40, 5 % above
            about 450, at most 663: the Alpaca data set under a 16k vocabulary); a number makes all rows that long;
            else the path of a JSON file with a list of lengths, taken in order and repeated.
        max_length: rows are cut where they are longer.

    Raises:
        ValueError: there is no such file, it holds no list of positive numbers, or the number is below 2.
    """
    if kind == "alpaca":
        draw = random.Random(seed)
        found = [_log_normal(MEDIAN, draw.gauss(0, SPREAD), RANGE) for _ in range(count)]
    elif kind.isdigit():
        if int(kind) < 2:
            raise ValueError(f"rows of {kind} tokens have nothing to predict; pass 2 or more.")
        found = [int(kind)]
    else:
        found = _read(kind, "alpaca", "a JSON list of positive whole numbers: the lengths of the rows", _is_length)
    return [min(found[i % len(found)], max_length or LONGEST) for i in range(count)]


def make_pair_lengths(count: int, *, kind: str = "chat", seed: int = 0, max_length: int | None = None) -> list[Pair]:
    """Return the lengths of ``count`` pairs.

    Args:
        kind: ``chat`` draws them like the answers of chat models to what people ask (log-normal, medians 193 and 338,
            a pair's two completions correlated by a half: a preference data set of LLaMA-Factory's under a 16k
            vocabulary); a number makes all rows that long, half of it the prompt; else the path of a JSON file with a
            list of ``[prompt, chosen, rejected]``, or of JSON lines with one each, taken in order and repeated.
        max_length: completions are cut where their row would be longer, as TRL cuts them; pairs whose prompt alone is
            as long are left out.

    Raises:
        ValueError: there is no such file, it holds no such list, the number is below 2, or no prompt is shorter than
            ``max_length``.
    """
    if kind == "chat":
        found = _drawn_pairs(count, seed)
    elif kind.isdigit():
        length = int(kind)
        if length < 2:
            raise ValueError(f"rows of {kind} tokens have no room for a prompt and a completion; pass 2 or more.")
        found = [(length // 2, length - length // 2, length - length // 2)]
    else:
        wanted = "lists of three positive whole numbers, tokens of prompt, chosen and rejected"
        found = _read(kind, "chat", wanted, _is_pair)
    longest = max_length or LONGEST
    found = [(p, min(c, longest - p), min(r, longest - p)) for p, c, r in found if p < longest]
    if not found:
        raise ValueError(f"no prompt of {kind} is shorter than {max_length} tokens.")
    return [found[i % len(found)] for i in range(count)]


def sequences(pairs: list[Pair]) -> list[int]:
    """Tokens of the rows of their batch: a prompt with its chosen completion, of each; then with its rejected one."""
    return [p + c for p, c, _ in pairs] + [p + r for p, _, r in pairs]


def _log_normal(median: int, deviations: float, limits: tuple[int, int]) -> int:
    return min(max(round(median * 2.718281828**deviations), limits[0]), limits[1])


def _drawn_pairs(count: int, seed: int) -> list[Pair]:
    draw = random.Random(seed)
    found: list[Pair] = []
    for _ in range(count):
        prompt = _log_normal(PROMPT, PROMPT_SPREAD * draw.gauss(0, 1), PROMPT_RANGE)
        shared = SHARED**0.5 * draw.gauss(0, 1)
        own = [(1 - SHARED) ** 0.5 * draw.gauss(0, 1) for _ in range(2)]
        chosen, rejected = (_log_normal(COMPLETION, COMPLETION_SPREAD * (shared + z), COMPLETION_RANGE) for z in own)
        found.append((prompt, chosen, rejected))
    return found


def _read(name: str, drawn: str, wanted: str, valid: Callable[[Any], bool]) -> list[Any]:
    """The entries of a file of lengths, JSON or JSON lines; ``drawn`` is what asks for lengths without a file."""
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"no such file; pass {drawn!r}, a number of tokens from 2 on, or a JSON file of lengths.")
    text, lines = path.read_text(encoding="utf-8"), path.suffix == ".jsonl"
    try:
        found = [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} must hold {wanted}; it is no JSON: {error}.") from error
    if not isinstance(found, list) or not found or not all(map(valid, found)):
        raise ValueError(f"{name} must hold {wanted}.")
    return found


def _is_length(value: Any) -> bool:
    return type(value) is int and value > 0  # JSON's true is no number


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_length, value))
