"""How many tokens each example of a data set has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import index
from typing import Any

from fastpack.errors import PackingError

COLUMNS: tuple[dict[str, int], ...] = (
    {"length": 1},
    {"prompt_ids": 2, "chosen_ids": 1, "rejected_ids": 1},
    {"prompt_input_ids": 2, "chosen_input_ids": 1, "rejected_input_ids": 1},
    {"chosen_ids": 1, "rejected_ids": 1},
    {"chosen_input_ids": 1, "rejected_input_ids": 1},
    {"input_ids": 1},
)
"""Columns that tell an example's tokens, and how often each counts; the first set that is there is read. A pair is two
sequences, and its prompt begins both of them."""
_ROWS = 1000


def lengths_of(dataset: Any) -> list[int]:
    """Tokens of each example, which :func:`plan_batches` and :class:`TokenBudgetSampler` plan from.

    A ``length`` column is taken at its word. Else the ids are counted, as they are: padding among them counts. Of a
    pair both sides do: ``2 * prompt + chosen + rejected``, or ``chosen + rejected`` where the sides hold their prompt.

    Args:
        dataset: a ``datasets.Dataset`` (nothing is decoded), a dict of columns, or anything with ``len()`` whose
            examples are dicts (each is made once, which may take a while).

    Returns:
        n ints.

    Raises:
        PackingError: the data set is a stream, it has no such columns, or an example's are empty; says what is missing.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise PackingError(
            f"a {type(dataset).__name__} has no len() or can't be indexed, so its lengths can't be known beforehand, "
            "and token budgets are planned from them. Pass a data set with both, such as one that was loaded without "
            "streaming=True."
        )
    if len(dataset) == 0:
        raise PackingError(f"this {type(dataset).__name__} is empty: it has no lengths.")
    if isinstance(dataset, Mapping):
        names, read = list(dataset), dataset.__getitem__
    elif hasattr(dataset, "column_names") and hasattr(dataset, "with_format"):
        names, read = list(dataset.column_names), lambda name: _arrow_column(dataset, name)
    else:
        first = dataset[0]
        if not isinstance(first, Mapping):
            raise PackingError(
                f"examples of this {type(dataset).__name__} are {type(first).__name__}, and not dicts: pass their "
                "lengths yourself, one int an example."
            )
        names, read = list(first), None
    weights = next((columns for columns in COLUMNS if columns.keys() <= set(names)), None)
    if weights is None:
        known = "; ".join(" + ".join(columns) for columns in COLUMNS)
        raise PackingError(
            f"this {type(dataset).__name__} has {', '.join(map(str, names)) or 'no columns'}: nothing there tells how "
            f"many tokens an example has. One of these has to be there: {known}. Tokenize first, or add a length."
        )
    if read is not None:
        counted = [list(_counted(name, read(name))) for name in weights]
    else:
        counted = _counted_by_row(dataset, list(weights))
    if len({len(column) for column in counted}) != 1:
        sizes = ", ".join(f"{name} has {len(column)}" for name, column in zip(weights, counted, strict=True))
        raise PackingError(f"columns are of different sizes: {sizes} examples.")
    return [
        sum(times * tokens for times, tokens in zip(weights.values(), example, strict=True))
        for example in zip(*counted, strict=True)
    ]


def _arrow_column(dataset: Any, name: str) -> Iterator[Any]:
    """The entries of one column as Arrow has them: the length of a list is known without reading what it holds."""
    for table in dataset.select_columns([name]).with_format("arrow").iter(_ROWS):
        column = table[name]
        yield from column.to_pylist() if name == "length" else column


def _counted_by_row(dataset: Any, names: list[str]) -> list[list[int]]:
    """Tokens of each example, column by column, from examples that are made one at a time, each once."""
    found: list[list[int]] = [[] for _ in names]
    for at in range(len(dataset)):
        example = dataset[at]
        for column, name in zip(found, names, strict=True):
            column += _counted(name, [example.get(name)], at)
    return found


def _counted(name: str, column: Iterable[Any], start: int = 0) -> Iterator[int]:
    for at, value in enumerate(column, start):
        try:
            yield index(value) if name == "length" else len(value)
        except TypeError as error:
            raise PackingError(
                f"example {at} has no {name} that can be counted: {value!r:.60}. Each needs "
                f"{'a whole number' if name == 'length' else 'a list of token ids'}."
            ) from error
