"""Draw or read the lengths of rows in tokens: of texts, of DPO's pairs, and of the completions of prompts."""

from __future__ import annotations

import json
import math
import random
import re
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

MEDIAN, SPREAD, RANGE = 149, 0.7, (16, 663)

Pair = tuple[int, int, int]
"""Tokens of the prompt, of the chosen and of the rejected completion."""

PROMPT, PROMPT_SPREAD, PROMPT_RANGE = 193, 1.3, (16, 2000)
COMPLETION, COMPLETION_SPREAD, COMPLETION_RANGE = 338, 1.15, (8, 1100)
SHARED = 0.5
"""Correlation of the logarithms of a pair's two lengths."""


def make_lengths(count: int, *, kind: str = "alpaca", seed: int = 0, max_length: int | None = None) -> list[int]:
    """Return ``count`` lengths in tokens.

    Args:
        count: the number of rows.
        kind: ``alpaca`` draws lengths of instruction data (log-normal, median 149, 5 % below about 40, 5 % above about
            450, at most 663: the Alpaca data set under a 16k vocabulary); a number is the length of every row;
            ``500-2000`` draws uniformly from 500 to 2,000; anything else is the path of a JSON file with a list of
            lengths, which are used in order and repeated.
        seed: the seed of the draws.
        max_length: the length to which longer rows are cut, or None.

    Raises:
        ValueError: there is no such file, the file has no list of whole numbers, or a length is below 2.
    """
    if kind == "alpaca":
        draw = random.Random(seed)
        lengths = [_log_normal(MEDIAN, draw.gauss(0, SPREAD), RANGE) for _ in range(count)]
    else:
        lengths = _named(count, kind, "alpaca", seed)
    if not all(_is_count(length, 2) for length in lengths):
        raise ValueError("pass lengths of rows as whole numbers of at least 2: one token alone has nothing to predict.")
    return [min(length, max_length or length) for length in islice(cycle(lengths), count)]


def make_pair_lengths(count: int, *, kind: str = "chat", seed: int = 0, max_length: int | None = None) -> list[Pair]:
    """Return the lengths of ``count`` pairs.

    Args:
        count: the number of pairs.
        kind: ``chat`` draws lengths of chat preferences (log-normal, medians 193 and 338, the two completions of a pair
            correlated by a half: a preference data set of LLaMA-Factory's under a 16k vocabulary); a number is the
            length of every row, of which half is the prompt; anything else is the path of a JSON file with a list of
            ``[prompt, chosen, rejected]`` lists, which are used in order and repeated.
        seed: the seed of the draws.
        max_length: the length to which rows are cut at the end of completions, as TRL does, or None. Pairs whose prompt
            is not shorter are left out.

    Raises:
        ValueError: there is no such file, the file has no such list, the number is below 2, or no prompt is shorter
            than ``max_length``.
    """
    if kind == "chat":
        draw = random.Random(seed)
        triples = [list(_draw_pair(draw)) for _ in range(count)]
    elif kind.isdigit():
        half = int(kind) // 2
        triples = [[half, int(kind) - half, int(kind) - half]]
    else:
        triples = _read(kind, "chat")
    if not all(isinstance(p, list) and len(p) == 3 and all(_is_count(length, 1) for length in p) for p in triples):
        raise ValueError(
            "pass lists of three positive whole numbers (of prompt, chosen and rejected tokens), or a number above 1."
        )
    longest = max_length or max(map(sum, triples))
    pairs = [(p, min(c, longest - p), min(r, longest - p)) for p, c, r in triples if p < longest]
    if not pairs:
        raise ValueError(f"no prompt of {kind} is shorter than {max_length} tokens.")
    return list(islice(cycle(pairs), count))


def make_completion_lengths(count: int, *, kind: str = "chat", seed: int = 0) -> list[int]:
    """Return the lengths of ``count`` completions.

    Args:
        count: the number of completions.
        kind: ``chat`` draws them as :func:`make_pair_lengths` does, but independent of each other; a number, a range or
            a file are what they are in :func:`make_lengths`.
        seed: the seed of the draws.

    Raises:
        ValueError: there is no such file, the file has no list of whole numbers, or a completion is empty.
    """
    if kind == "chat":
        draw = random.Random(seed)
        return [_log_normal(COMPLETION, COMPLETION_SPREAD * draw.gauss(0, 1), COMPLETION_RANGE) for _ in range(count)]
    lengths = _named(count, kind, "chat", seed)
    if not all(_is_count(length, 1) for length in lengths):
        raise ValueError("pass lengths of completions as whole numbers of at least 1.")
    return list(islice(cycle(lengths), count))


def sequences(pairs: list[Pair]) -> list[int]:
    """Return the lengths of the pairs' sequences: prompt plus chosen completion, then prompt plus rejected one."""
    return [prompt + completion for prompt, *completions in pairs for completion in completions]


def make_rows(lengths: list[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Return rows of random token ids, of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def _log_normal(median: int, deviations: float, limits: tuple[int, int]) -> int:
    return min(max(round(median * math.exp(deviations)), limits[0]), limits[1])


def _draw_pair(draw: random.Random) -> Pair:
    prompt = _log_normal(PROMPT, PROMPT_SPREAD * draw.gauss(0, 1), PROMPT_RANGE)
    shared = SHARED**0.5 * draw.gauss(0, 1)
    own = [(1 - SHARED) ** 0.5 * draw.gauss(0, 1) for _ in range(2)]
    chosen, rejected = (_log_normal(COMPLETION, COMPLETION_SPREAD * (shared + z), COMPLETION_RANGE) for z in own)
    return prompt, chosen, rejected


def _named(count: int, kind: str, keyword: str, seed: int) -> list[Any]:
    """Return the length that a number names, ``count`` lengths drawn from a range, or the list in a JSON file."""
    if kind.isdigit():
        return [int(kind)]
    if (limits := re.fullmatch(r"(\d+)-(\d+)", kind)) is None:
        return _read(kind, keyword, "a number of tokens, a range such as 500-2000")
    least, most = map(int, limits.groups())
    if least > most:
        raise ValueError(f"the range ends before it begins; pass {most}-{least}.")
    draw = random.Random(seed)
    return [draw.randint(least, most) for _ in range(count)]


def _read(name: str, keyword: str, others: str = "a number of tokens (at least 2)") -> list[Any]:
    """Return the list in a JSON file; the message of an error offers ``keyword`` and ``others`` instead of a file."""
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"no such file; pass {keyword!r}, {others}, or a JSON file of lengths.")
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}.") from error
    if not isinstance(items, list) or not items:
        raise ValueError("it must hold a JSON list of lengths.")
    return items


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least  # JSON's true is not a number
