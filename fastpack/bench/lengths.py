"""How many tokens each row of a batch has."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

MEDIAN, SPREAD, SHORTEST, LONGEST = 149, 0.7, 16, 663


def make_lengths(count: int, *, kind: str = "alpaca", seed: int = 0) -> list[int]:
    """``count`` lengths in tokens.

    Args:
        kind: ``alpaca`` draws them like instruction data (log-normal, median 149, 5 % below about 40, 5 % above
            about 450, at most 663: the Alpaca data set under a 16k vocabulary); a number makes all rows that long;
            else the path of a JSON file with a list of lengths, taken in order and repeated.

    Raises:
        ValueError: there is no such file, it holds no list of positive numbers, or the number is below 2.
    """
    if kind == "alpaca":
        draw = random.Random(seed)
        drawn = (round(MEDIAN * 2.718281828 ** draw.gauss(0, SPREAD)) for _ in range(count))
        return [min(max(length, SHORTEST), LONGEST) for length in drawn]
    if kind.isdigit():
        if int(kind) < 2:
            raise ValueError(f"rows of {kind} tokens have nothing to predict; pass 2 or more.")
        return [int(kind)] * count
    path = file_of_lengths(kind, "alpaca")
    wanted = "a JSON list of positive whole numbers: the lengths of the rows"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{kind} must hold {wanted}; it is no JSON: {error}.") from error
    if not isinstance(found, list) or not found or not all(map(is_count, found)):
        raise ValueError(f"{kind} must hold {wanted}.")
    return [found[i % len(found)] for i in range(count)]


def is_count(value: Any) -> bool:
    """Whether it is a positive whole number; JSON's true is none."""
    return type(value) is int and value > 0


def file_of_lengths(kind: str, drawn: str) -> Path:
    """The file that is meant where lengths are neither a number nor drawn, which ``drawn`` asks for.

    Raises:
        ValueError: there is none.
    """
    path = Path(kind)
    if not path.is_file():
        raise ValueError(f"no such file; pass {drawn!r}, a number of tokens from 2 on, or a JSON file of lengths.")
    return path
