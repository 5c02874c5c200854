"""How many tokens each example of a data set has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import index
from typing import Any

from fastpack.errors import PackingError

Sides = tuple[tuple[str, ...], ...]
TOLD: Sides = (("length",),)
SIDES: tuple[Sides, ...] = (
    (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids")),
    (("prompt_input_ids", "chosen_input_ids"), ("prompt_input_ids", "rejected_input_ids")),
    (("prompt_ids", "completion_ids"), ("prompt_ids", "KL_completion_ids")),
    (("prompt_ids", "completion_ids"),),
    (("chosen_ids",), ("rejected_ids",)),
    (("chosen_input_ids",), ("rejected_input_ids",)),
    (("input_ids",),),
    TOLD,
)
"""The sequences of an example, and the columns that each is made of; the first set whose columns are there is read.

Ids are counted wherever there are some: a ``length`` beside them may be of words, characters or another tokenizer.
"""
_ROWS = 1000


def lengths_of(dataset: object, *, max_length: int | None = None) -> list[int]:
    """Tokens of each example, which :func:`plan_batches` and :class:`TokenBudgetSampler` plan from.

    The ids are counted, as they are: padding among them counts. Of a pair both sides do: ``2 * prompt + chosen +
    rejected``, or ``chosen + rejected`` where the sides hold their prompt; and of KTO's examples also the mismatched
    completions that its KL is estimated from. Only where there are no ids a ``length`` column is taken at its word, as
    transformers takes it: all tokens of an example, both sides of a pair, as many as the collator makes of it.

    Args:
        dataset: a ``datasets.Dataset`` (nothing is decoded), a dict of columns, or anything with ``len()`` whose
            examples are dicts (each is made once, which may take a while).
        max_length: tokens of a sequence at which the collator cuts ids, if it does; a ``length`` stays what it says.

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
    sides = next((sides for sides in SIDES if set(chain.from_iterable(sides)) <= set(names)), None)
    if sides is None:
        known = "; ".join(" + ".join(columns_of(sides)) for sides in SIDES)
        raise PackingError(
            f"this {type(dataset).__name__} has {', '.join(map(str, names)) or 'no columns'}: nothing there tells how "
            f"many tokens an example has. One of these has to be there: {known}. Tokenize first, or add a length."
        )
    columns = columns_of(sides)
    if read is not None:
        counted = {name: list(_counted(name, read(name))) for name in columns}
    else:
        counted = _counted_by_row(dataset, columns)
    if len({len(column) for column in counted.values()}) != 1:
        sizes = ", ".join(f"{name} has {len(column)}" for name, column in counted.items())
        raise PackingError(f"columns are of different sizes: {sizes} examples.")
    cut = None if sides is TOLD else max_length
    totals = [0] * len(counted[columns[0]])
    for side in sides:
        whole = map(sum, zip(*(counted[name] for name in side), strict=True))
        for at, tokens in enumerate(whole):
            totals[at] += tokens if cut is None else min(tokens, cut)
    return totals


def columns_of(sides: Sides) -> list[str]:
    """Each column once."""
    return list(dict.fromkeys(chain.from_iterable(sides)))


def _arrow_column(dataset: Any, name: str) -> Iterator[Any]:
    """The entries of one column as Arrow has them: the length of a list is known without reading what it holds."""
    for table in dataset.select_columns([name]).with_format("arrow").iter(_ROWS):
        column = table[name]
        yield from column.to_pylist() if name == "length" else column


def _counted_by_row(dataset: Any, names: list[str]) -> dict[str, list[int]]:
    """Tokens of each example, column by column, from examples that are made one at a time, each once."""
    found: dict[str, list[int]] = {name: [] for name in names}
    for at in range(len(dataset)):
        example = dataset[at]
        for name, column in found.items():
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
