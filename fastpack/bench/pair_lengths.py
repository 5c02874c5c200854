"""How many tokens the prompt, the chosen and the rejected completion of each pair have.

``python -m fastpack.bench.pair_lengths PAIRS.jsonl TOKENIZER LENGTHS.json`` counts those of a data set, so that it can
be measured where neither the data nor its tokenizer is.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastpack.bench.lengths import file_of_lengths, is_count
from fastpack.commands import UsageError, require_file

Pair = tuple[int, int, int]
"""Tokens of the prompt, of the chosen and of the rejected completion."""

PROMPT, PROMPT_SPREAD, PROMPT_RANGE = 193, 1.3, (16, 2000)
COMPLETION, COMPLETION_SPREAD, COMPLETION_RANGE = 338, 1.15, (8, 1100)
SHARED = 0.5
"""Correlation of the logarithms of a pair's two lengths."""


def make_pair_lengths(count: int, *, kind: str = "chat", seed: int = 0, max_length: int | None = None) -> list[Pair]:
    """``count`` pairs.

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
        found = _drawn(count, seed)
    elif kind.isdigit():
        length = int(kind)
        if length < 2:
            raise ValueError(f"rows of {kind} tokens have no room for a prompt and a completion; pass 2 or more.")
        found = [(length // 2, length - length // 2, length - length // 2)]
    else:
        found = _read(file_of_lengths(kind, "chat"))
    if max_length is not None:
        kept = [pair for pair in found if pair[0] < max_length]
        found = [(p, min(c, max_length - p), min(r, max_length - p)) for p, c, r in kept]
    if not found:
        raise ValueError(f"no prompt of {kind} is shorter than {max_length} tokens.")
    return [found[i % len(found)] for i in range(count)]


def sequences(pairs: list[Pair]) -> list[int]:
    """Tokens of the rows of their batch: a prompt with its chosen completion, of each; then with its rejected one."""
    return [p + c for p, c, _ in pairs] + [p + r for p, _, r in pairs]


def count_tokens(rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> list[Pair]:
    """Of preferences in TRL's format, as its ``DPOTrainer`` tokenizes them; it gives the template of conversations
    also what the columns ``tools`` and ``chat_template_kwargs`` hold."""

    def ids(value: Any, **options: Any) -> list[int]:
        found = tokenizer(text=value) if isinstance(value, str) else tokenizer.apply_chat_template(value, **options)
        tokens: list[int] = found["input_ids"]
        return tokens

    found: list[Pair] = []
    for row in rows:
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        options = {"tools": tools, **(row.get("chat_template_kwargs") or {}), "return_dict": True}
        prompt = ids(row["prompt"], **{"add_generation_prompt": True, **options})
        completions = [row["chosen"], row["rejected"]]
        if isinstance(row["prompt"], str):  # TRL adds the end of text to one that has none
            if (end := tokenizer.eos_token) is None:
                raise ValueError("the tokenizer has no end of text, which TRL adds; pass one that has an eos_token")
            completions = [text if text.endswith(end) else text + end for text in completions]
        both = [ids(row["prompt"] + completion, **options) for completion in completions]
        # a completion begins where the tokens of the prompt, and of the prompt with it, part
        start = min(_common(prompt, tokens) for tokens in both)
        found.append((start, len(both[0]) - start, len(both[1]) - start))
    return found


PARTS = ("prompt", "chosen", "rejected")
ALLOWED = "prompt, chosen and rejected, all three strings or all three lists of messages"


def read_preferences(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of a JSON-lines file with the numbers of their lines; blank lines are skipped.

    Raises:
        ValueError: a line that is no record of :data:`ALLOWED`; it names the line.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is no JSON: {error}; a line holds {ALLOWED}") from error
                if wrong := _wrong(row):
                    raise ValueError(f"line {number}: {wrong}; a line holds {ALLOWED}")
                yield number, row


def _wrong(row: Any) -> str | None:
    """Why this is no preference that can be counted; None where it is one."""
    if not isinstance(row, dict):
        return f"it is {_kind(row)}, no object"
    if missing := [name for name in PARTS if name not in row]:
        implicit = " (a prompt inside chosen and rejected has to be taken out)" if missing == ["prompt"] else ""
        return f"it has no {' and no '.join(missing)}{implicit}"
    kinds = {name: "string" if isinstance(row[name], str) else _kind(row[name]) for name in PARTS}
    if len(set(kinds.values())) > 1 or kinds["prompt"] not in ("string", "messages"):
        return ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
    tools, options = row.get("tools"), row.get("chat_template_kwargs")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return "tools is a string that is no JSON"
    if tools is not None and not isinstance(tools, list):
        return f"tools is a {type(tools).__name__}, and should be a list, or one as JSON"
    if options is not None and not isinstance(options, dict):
        return f"chat_template_kwargs is a {type(options).__name__}, and should be an object"
    return None


def _kind(value: Any) -> str:
    if not isinstance(value, list):
        return "null" if value is None else type(value).__name__
    messages = value and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in value)
    return "messages" if messages else "a list that is not of messages with a role"


def _common(first: list[int], second: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _drawn(count: int, seed: int) -> list[Pair]:
    draw = random.Random(seed)

    def length(median: int, deviations: float, limits: tuple[int, int]) -> int:
        return min(max(round(median * 2.718281828**deviations), limits[0]), limits[1])

    found: list[Pair] = []
    for _ in range(count):
        prompt = length(PROMPT, PROMPT_SPREAD * draw.gauss(0, 1), PROMPT_RANGE)
        shared = SHARED**0.5 * draw.gauss(0, 1)
        chosen, rejected = (
            length(COMPLETION, COMPLETION_SPREAD * (shared + (1 - SHARED) ** 0.5 * draw.gauss(0, 1)), COMPLETION_RANGE)
            for _ in range(2)
        )
        found.append((prompt, chosen, rejected))
    return found


def _read(path: Path) -> list[Pair]:
    wanted = (
        f"{path} must hold lists of three positive whole numbers, tokens of prompt, chosen and rejected: "
        "`python -m fastpack.bench.pair_lengths PAIRS.jsonl TOKENIZER LENGTHS.json` makes them"
    )
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{wanted}; it is no JSON: {error}.") from error
    if not isinstance(found, list) or not found or any(not _is_pair(row) for row in found):
        raise ValueError(f"{wanted}.")
    return [(row[0], row[1], row[2]) for row in found]


def _is_pair(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 3 and all(map(is_count, row))


def main(arguments: Sequence[str] | None = None) -> None:
    """Count the tokens of a JSON-lines file of preferences, and write them."""
    parser = argparse.ArgumentParser(prog="python -m fastpack.bench.pair_lengths", description=main.__doc__)
    parser.add_argument("pairs", type=Path, help="JSON lines with prompt, chosen and rejected, in one of TRL's formats")
    parser.add_argument("tokenizer", help="a folder or a name on the hub")
    parser.add_argument("lengths", type=Path, help="the file to write: [prompt, chosen, rejected] of each pair")
    given = parser.parse_args(arguments)
    if not given.pairs.is_file():
        parser.error(f"no such file: {given.pairs}")
    try:
        require_file("LENGTHS", given.lengths)
    except UsageError as error:
        parser.error(str(error))
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    except (OSError, ValueError) as error:
        parser.error(f"no tokenizer in {given.tokenizer}: {error}")
    pairs: list[Pair] = []
    try:
        for number, row in read_preferences(given.pairs):
            try:
                pairs += count_tokens([row], tokenizer)
            except (ValueError, TypeError, LookupError, TemplateError) as error:
                raise ValueError(f"line {number} can't be tokenized: {error!r}; a line holds {ALLOWED}") from error
    except ValueError as error:
        parser.error(f"{given.pairs}, {error}")
    if not pairs:
        parser.error(f"{given.pairs} is empty: it should hold JSON lines of {ALLOWED}")
    given.lengths.write_text(json.dumps(pairs), encoding="utf-8")


if __name__ == "__main__":
    main()
