"""From examples to their log-probabilities: looked up by id, and computed where that is wanted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from fastpack.batching.budget import plan_batches
from fastpack.errors import MissingReferenceError, ReferenceCacheError
from fastpack.reference.cache import ReferenceCache, Stored
from fastpack.reference.compute import Score
from fastpack.reference.examples import Examples, Scored
from fastpack.reference.ranks import Ranks

Compute = Literal["new", "missing", "never"]
Place = tuple[int, int, int]
_NAMED = 5


@dataclass(frozen=True)
class Work:
    """How what is not there yet is computed.

    Attributes:
        compute: ``new`` fills a cache that is new, or was left unfinished; ``missing`` also adds to one that is
            complete; ``never`` looks up alone.
        max_tokens: tokens of a batch at most; a sequence that is longer is a batch of its own.
        save_every: batches of each rank between two shards.
        progress: whether a bar is shown on a terminal.
    """

    compute: Compute = "new"
    max_tokens: int = 16384
    save_every: int = 16
    progress: bool = True

    def __post_init__(self) -> None:
        if self.compute not in get_args(Compute):
            raise ValueError(f"compute={self.compute!r}; choose one of {', '.join(map(repr, get_args(Compute)))}.")
        for name in ("max_tokens", "save_every"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}; pass an int from 1 on.")


@dataclass(frozen=True, eq=False)
class _Index:
    """Every sequence that some examples need.

    Attributes:
        ids: of each data set, each example and each column.
        places: where each sequence is met first.
        lengths: in tokens.
    """

    ids: list[list[tuple[bytes, ...]]]
    places: dict[bytes, Place]
    lengths: dict[bytes, int]

    @classmethod
    def of(cls, wanted: Sequence[Examples]) -> _Index:
        index = cls([], {}, {})
        for number, examples in enumerate(wanted):
            rows: list[tuple[bytes, ...]] = []
            for row, sequences in enumerate(examples):
                rows.append(tuple(sequence.id for sequence in sequences))
                for column, sequence in enumerate(sequences):
                    index.places.setdefault(sequence.id, (number, row, column))
                    index.lengths.setdefault(sequence.id, len(sequence.ids))
            index.ids.append(rows)
        return index

    def digest(self) -> str:
        """Of the ids in their order."""
        made = hashlib.sha256()
        for rows in self.ids:
            for ids in rows:
                made.update(b"".join(ids))
        return made.hexdigest()


def look_up(
    wanted: Sequence[Examples],
    cache: ReferenceCache,
    work: Work,
    scoring: Callable[[], AbstractContextManager[Score]] | None,
) -> list[dict[str, list[float]]]:
    """The columns of each data set, from the cache, and what is missing there computed first.

    Args:
        scoring: a context in which the reference scores sequences, entered only where there is something to compute;
            None where there is no reference any more.

    Raises:
        MissingReferenceError: something is missing, and is not to be computed.
        ReferenceCacheError: the cache is another's, or damaged; ranks disagree.
    """
    ranks = Ranks.here()
    index = _Index.of(wanted)
    ranks.check_same({"the reference": cache.identity.key, "the data": index.digest(), "what was asked for": work})
    stored = ranks.on_first(lambda: _stored(cache, index))
    missing = [one for one in index.places if stored is None or one not in stored.values]
    values = {} if stored is None else dict(stored.values)
    began = stored is not None and not stored.complete
    allowed = work.compute == "missing" or (work.compute == "new" and (stored is None or began))
    if missing and (not allowed or scoring is None):
        raise MissingReferenceError(_told(wanted, index, missing, cache, stored, scoring is None))
    if missing and scoring is not None:
        with scoring() as score:
            for found in _computed(wanted, index, missing, work, ranks, score):
                ranks.on_first(lambda found=found: cache.add(found))  # type: ignore[misc]
                values.update(found)
    if work.compute != "never" and (stored is None or began):
        ranks.on_first(cache.finish)
    return [
        {name: [values[ids[i]] for ids in rows] for i, name in enumerate(examples.columns)}
        for examples, rows in zip(wanted, index.ids, strict=True)
    ]


def _stored(cache: ReferenceCache, index: _Index) -> Stored | None:
    """What the cache has of what is asked for."""
    found = cache.load()
    if found is None:
        return None
    return Stored({one: found.values[one] for one in index.places if one in found.values}, found.complete)


def _computed(
    wanted: Sequence[Examples], index: _Index, missing: list[bytes], work: Work, ranks: Ranks, score: Score
) -> Iterator[Mapping[bytes, float]]:
    """The values of what is missing, on every rank, ``save_every`` batches of each at a time."""
    batches = _batches(index, missing, work.max_tokens)
    tokens = [sum(index.lengths[one] for one in batch) for batch in batches]
    each = ranks.count * work.save_every
    with _bar(sum(tokens), work.progress and ranks.rank == 0) as advance:
        for start in range(0, len(batches), each):
            mine: list[tuple[list[bytes], Tensor]] = []
            for at in range(start, min(start + each, len(batches)), ranks.count):
                if at + ranks.rank < len(batches):
                    batch = batches[at + ranks.rank]
                    mine.append((batch, score(_sequences(wanted, index, batch))))
                advance(sum(tokens[at : at + ranks.count]))
            # read once a shard, so that batches are made while the device computes
            found = {one: v for batch, values in mine for one, v in zip(batch, values.tolist(), strict=True)}
            together = {one: value for theirs in ranks.gather(found) for one, value in theirs.items()}
            bad = [f"{_place(wanted, index, one)}: {value}" for one, value in together.items() if not isfinite(value)]
            if bad:
                raise ReferenceCacheError(
                    f"the reference gives {len(bad)} log-probabilities that are not finite: {', '.join(bad[:_NAMED])}. "
                    "They were not kept, nor was what was computed with them. Is its dtype wide enough?"
                )
            yield together


def _batches(index: _Index, missing: list[bytes], max_tokens: int) -> list[list[bytes]]:
    """Of at most so many tokens, a longer sequence alone.

    The dearest first: what does not fit the device shows at once, and neighbours, which ranks share, cost the same.
    """
    fitting = [one for one in missing if index.lengths[one] <= max_tokens]
    longer = sorted((one for one in missing if index.lengths[one] > max_tokens), key=lambda one: -index.lengths[one])
    batches = [[one] for one in longer]
    if fitting:
        plan = plan_batches([index.lengths[one] for one in fitting], max_tokens, seed=0, epoch=0)
        order = sorted(range(plan.micro_batches), key=lambda i: -plan.costs[0][i])
        batches += [[fitting[i] for i in plan.batches[0][at]] for at in order]
    return batches


def _sequences(wanted: Sequence[Examples], index: _Index, batch: Sequence[bytes]) -> list[Scored]:
    found = []
    for one in batch:
        number, row, column = index.places[one]
        found.append(wanted[number][row][column])
    return found


def _place(wanted: Sequence[Examples], index: _Index, one: bytes) -> str:
    """Where a sequence is met first, in words."""
    number, row, column = index.places[one]
    return f"example {row} of {wanted[number].name} ({wanted[number].columns[column]}, id {one.hex()})"


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns: Any = (TextColumn("reference log-probabilities"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=total)
        yield lambda tokens: bar.advance(task, tokens)


def _told(
    wanted: Sequence[Examples],
    index: _Index,
    missing: list[bytes],
    cache: ReferenceCache,
    stored: Stored | None,
    gone: bool,
) -> str:
    """Which examples are missing, and what to do about it."""
    folder = cache.folder
    named = [_place(wanted, index, one) for one in missing[:_NAMED]]
    more = ", ..." if len(missing) > _NAMED else ""
    where = "there is no cache in" if stored is None else "missing from the cache in"
    text = f"{where} {folder}: {len(missing)} of {len(index.places)} sequences are not there, {', '.join(named)}{more}."
    if stored is not None and len(missing) == len(index.places):
        text += (
            " It has none of these: it was made of other data, or before the template, the tokenizer or the truncation "
            "was changed."
        )
    if gone:
        return f"{text} The reference was given back: compute them before, together with the others."
    return f'{text} Pass compute="missing" to compute and add them, or another folder to compute all anew.'
