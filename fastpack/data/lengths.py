"""Count the tokens of each example of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import index
from typing import Any

from fastpack.errors import PackingError

Sides = tuple[tuple[str, ...], ...]
LENGTH: Sides = (("length",),)
SIDES: tuple[Sides, ...] = (
    (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids")),
    (("prompt_input_ids", "chosen_input_ids"), ("prompt_input_ids", "rejected_input_ids")),
    (("prompt_ids", "completion_ids"), ("prompt_ids", "KL_completion_ids")),
    (("prompt_ids", "completion_ids"),),
    (("chosen_ids",), ("rejected_ids",)),
    (("chosen_input_ids",), ("rejected_input_ids",)),
    (("input_ids",),),
    LENGTH,
)
"""The sequences of an example, each with its columns. The first entry whose columns are all in the data set is read.

Ids come before ``length``, which may count words, characters or another tokenizer's tokens.
"""
IMAGES = ("images", "image")
"""The columns of images in a data set that the collator's processor turns into tokens."""
_MASKS = ("attention_mask", "KL_attention_mask")
_ROWS = 1000


def lengths_of(
    dataset: object, *, max_length: int | None = None, collator: Callable[[Any], Any] | None = None
) -> list[int]:
    """Return the number of tokens of each example, for :func:`plan_batches` and :class:`TokenBudgetSampler`.

    All ids are counted, padding included. A pair counts both sides: ``2 * prompt + chosen + rejected``, or ``chosen +
    rejected`` if the sides contain their prompt. A KTO example also counts the mismatched completion of its KL. If
    there are no ids, a ``length`` column is used, as in transformers. It has to count all tokens that the collator
    makes of an example, both sides of a pair included.

    Examples with images have no ids before the collator's processor has made them. Without a ``length`` column, the
    collator is called with each example alone, which takes as long as the images of an epoch take. The tokens of images
    are counted too.

    Args:
        dataset: a ``datasets.Dataset`` (which is not decoded), a dict of columns, or any object with ``len()`` that can
            be indexed and whose examples are dicts (each is read once, which may take a while).
        max_length: the number of tokens to which the collator cuts a sequence, if it does. It does not apply to a
            ``length`` column, nor to images.
        collator: the collator of a data set with images. It makes a batch with an ``attention_mask``.

    Returns:
        One int for each example.

    Raises:
        PackingError: the data set is a stream or empty, has none of the columns, or an example has no value in one.

    Example:
        >>> lengths_of({"input_ids": [[1, 2, 3], [4, 5]]})
        [3, 2]
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise PackingError(
            f"a {type(dataset).__name__} has no len() or can't be indexed, but token budgets are planned from all "
            "lengths beforehand. Pass a data set with both, such as one loaded without streaming=True."
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
                f"the examples of this {type(dataset).__name__} are {type(first).__name__}, not dicts. Pass their "
                "lengths yourself, one int for each example."
            )
        names, read = list(first), None
    sides = next((sides for sides in SIDES if set(chain.from_iterable(sides)) <= set(names)), None)
    if sides is None and collator is not None and not {*IMAGES}.isdisjoint(names):
        return [_collated_tokens(collator, example) for example in _examples(dataset)]
    if sides is None:
        allowed = "; ".join(" + ".join(columns_of(sides)) for sides in SIDES)
        raise PackingError(
            f"this {type(dataset).__name__} has {', '.join(map(str, names)) or 'no columns'}, none of which counts the "
            f"tokens of an example. It needs one of these: {allowed}. Tokenize it first, or add a length column."
        )
    columns = columns_of(sides)
    if read is not None:
        counts = {name: list(_count(name, read(name))) for name in columns}
    else:
        counts = _count_by_row(dataset, columns)
    if len({len(column) for column in counts.values()}) != 1:
        sizes = ", ".join(f"{name} has {len(column)}" for name, column in counts.items())
        raise PackingError(f"columns differ in size: {sizes} examples. Pass columns of the same size.")
    cut = None if sides is LENGTH else max_length
    totals = [0] * len(counts[columns[0]])
    for side in sides:
        whole = map(sum, zip(*(counts[name] for name in side), strict=True))
        for at, tokens in enumerate(whole):
            totals[at] += tokens if cut is None else min(tokens, cut)
    return totals


def _examples(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield a copy of each example, which a collator may change."""
    if isinstance(dataset, Mapping):
        columns = list(dataset)
        yield from (dict(zip(columns, values, strict=True)) for values in zip(*dataset.values(), strict=True))
    else:
        yield from (dict(dataset[at]) for at in range(len(dataset)))


def _collated_tokens(collator: Callable[[Any], Any], example: dict[str, Any]) -> int:
    """Return the number of tokens that a collator makes of an example, without padding."""
    batch = collator([example])
    masks = [batch[name] for name in _MASKS if batch.get(name) is not None]
    if not masks:
        raise PackingError(
            f"the collator made a batch of {', '.join(batch)}, without an attention_mask that counts the tokens of an "
            "example with images. Pass a collator that pads, or add a length column."
        )
    return sum(int(mask.sum()) for mask in masks)


def columns_of(sides: Sides) -> list[str]:
    """Return each column of the sequences, without repeats."""
    return list(dict.fromkeys(chain.from_iterable(sides)))


def _arrow_column(dataset: Any, name: str) -> Iterator[Any]:
    """Yield the entries of one column as Arrow values: a list's length is known without reading its items."""
    for table in dataset.select_columns([name]).with_format("arrow").iter(_ROWS):
        column = table[name]
        yield from column.to_pylist() if name == "length" else column


def _count_by_row(dataset: Any, names: list[str]) -> dict[str, list[int]]:
    """Return the tokens in each column, reading each example once."""
    counts: dict[str, list[int]] = {name: [] for name in names}
    for at in range(len(dataset)):
        example = dataset[at]
        for name, column in counts.items():
            column += _count(name, [example.get(name)], at)
    return counts


def _tokens(value: Any) -> int:
    """Return the number of ids of an example ``[L]``, or ``[1, L]`` as a processor makes them.

    Raises:
        TypeError: these are the ids of several rows, or no ids.
    """
    count = len(value)
    row: Any = value[0] if count else None
    if not hasattr(row, "__len__") or getattr(row, "ndim", 1) == 0:
        return count
    if count > 1 or getattr(row, "ndim", 1) > 1:
        raise TypeError("ids of several rows")
    return len(row)


def _count(name: str, column: Iterable[Any], start: int = 0) -> Iterator[int]:
    for at, value in enumerate(column, start):
        try:
            yield index(value) if name == "length" else _tokens(value)
        except TypeError as error:
            raise PackingError(
                f"example {at} has no {name} that can be counted: {value!r:.60}. Each example needs "
                f"{'a whole number' if name == 'length' else 'a list of token ids'}."
            ) from error
