"""The sequences whose log-probabilities an example needs, as a collator sends them, and what they are known by.

Reading what the collator makes, rather than the columns, honours whatever it does: truncation above all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fastpack.batching.packed import PackedPreferenceCollator, PackedSFTCollator
from fastpack.errors import PackingError
from fastpack.packing.seqlens import IGNORE_INDEX

Collator = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
Kind = Literal["pairs", "judged"]

PAIR_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
JUDGED_COLUMNS = ("ref_logps", "ref_KL_logps")
_ROWS = 1000


@dataclass(frozen=True, eq=False)
class Scored:
    """A sequence, and which of its tokens are summed over.

    Attributes:
        ids: int64 ``[L]``.
        scored: bool ``[L]``, the tokens whose log-probability counts; never the first, which nothing predicts.
        whole: of those, how many count wholly where ``ld_alpha`` weighs the rest; None where all do.
    """

    ids: Tensor
    scored: Tensor
    whole: int | None = None

    @cached_property
    def tokens(self) -> int:
        """How many tokens are summed over."""
        return int(self.scored.sum())

    @cached_property
    def id(self) -> bytes:
        """16 bytes that are the same wherever the sequence is met: a digest of the ids and of what is summed over."""
        made = hashlib.blake2b(digest_size=16)
        made.update(f"{len(self.ids)} {self.whole} ".encode())
        made.update(self.ids.numpy().astype("<i8").tobytes())
        made.update(self.scored.numpy().tobytes())
        return made.digest()


@dataclass(frozen=True, eq=False)
class Examples:
    """A data set of tokenised pairs, or of judged completions, and the sequences that each example needs scored.

    Attributes:
        dataset: a ``datasets.Dataset``.
        collator: what makes batches of its examples; None for one that sends them as they are.
        paired: whether ``ld_alpha`` makes a completion's value depend on how long the other one of its pair is.
        name: what it is called in messages.
    """

    dataset: Any
    collator: Collator | None = None
    paired: bool = False
    name: str = "the data set"

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "add_column") or not hasattr(self.dataset, "__len__"):
            raise PackingError(
                f"{self.name} is a {type(self.dataset).__name__}. Pass one split, a datasets.Dataset, that was loaded "
                "without streaming=True."
            )
        there = [name for name in (*PAIR_COLUMNS, *JUDGED_COLUMNS) if name in self.dataset.column_names]
        if there:
            raise PackingError(
                f"{self.name} has {' and '.join(there)} already. Take them out to have them made anew: "
                f"dataset.remove_columns({there}). (A trainer built with precompute_ref_log_probs=True has made them "
                "itself, on padded batches: build it without.)"
            )
        _ = self.kind

    @cached_property
    def kind(self) -> Kind:
        """Whether examples are pairs (DPO's) or judged completions (KTO's)."""
        names = self.dataset.column_names
        if "chosen_ids" in names or "chosen_input_ids" in names:
            return "pairs"
        if "completion_ids" in names:
            return "judged"
        raise PackingError(
            f"{self.name} has the columns {', '.join(names) or 'none'}. Pass tokenised examples, as TRL's trainers "
            "make them (trainer.train_dataset): prompt_ids, chosen_ids and rejected_ids, or prompt_ids and "
            "completion_ids."
        )

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns that are to be filled, under TRL's names; one for each sequence of an example."""
        if self.kind == "pairs":
            return PAIR_COLUMNS
        return JUDGED_COLUMNS if "KL_completion_ids" in self.dataset.column_names else JUDGED_COLUMNS[:1]

    @cached_property
    def _lists(self) -> Any:
        """The data set, whose examples hold Python lists, as collators want them."""
        return self.dataset.with_format(None)

    @cached_property
    def _arrays(self) -> Any:
        """Where nothing else is wanted: arrays, which are read faster, many examples at a time."""
        if self.collator is not None:
            return self._lists
        ids = [name for name in self.dataset.column_names if name.endswith(("_ids", "_attention_mask"))]
        return self.dataset.select_columns(ids).with_format("numpy")

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[tuple[Scored, ...]]:
        row = 0
        for batch in self._arrays.iter(_ROWS):
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                # arrays are Arrow's own memory, which torch warns of
                own = (value.copy() if isinstance(value, np.ndarray) else value for value in values)
                yield self._read(row, dict(zip(names, own, strict=True)))
                row += 1

    def __getitem__(self, row: int) -> tuple[Scored, ...]:
        return self._read(row, self._lists[row])

    def _read(self, row: int, example: dict[str, Any]) -> tuple[Scored, ...]:
        """The sequences of one example, one for each of the columns."""
        try:
            if self.collator is not None:
                sequences = _collated(self.collator([example]), len(self.columns) if self.kind == "pairs" else 1)
            elif self.kind == "pairs":
                sequences = _packed(PackedPreferenceCollator()([example]))
            else:
                sequences = _packed(PackedSFTCollator()(_as_supervised(example, self.columns)))
            if len(sequences) != len(self.columns):
                raise PackingError(f"the collator made {len(sequences)} sequences of it, for {', '.join(self.columns)}")
        except PackingError as error:
            raise PackingError(f"example {row} of {self.name}: {error}") from error
        if self.paired and self.kind == "pairs":
            shared = min(sequence.tokens for sequence in sequences)
            sequences = [s if s.tokens <= shared else replace(s, whole=shared) for s in sequences]
        return tuple(sequences)


def _as_supervised(example: Mapping[str, Any], columns: Sequence[str]) -> list[dict[str, Any]]:
    """A prompt with its completion, and with that of the KL term, as :class:`PackedSFTCollator` takes them."""
    found = []
    for name in ("completion_ids", "KL_completion_ids")[: len(columns)]:
        prompt, completion = (torch.as_tensor(example[column]).long() for column in ("prompt_ids", name))
        mask = torch.cat([torch.zeros_like(prompt), torch.ones_like(completion)])
        found.append({"input_ids": torch.cat([prompt, completion]), "completion_mask": mask})
    return found


def _packed(batch: Mapping[str, Any]) -> list[Scored]:
    """The sequences of a batch of :mod:`fastpack.batching.packed`."""
    lengths = batch["packed_seq_lens"].lengths
    ids, labels = batch["input_ids"][0].split(lengths), batch["labels"][0].split(lengths)
    return [Scored(some, theirs != IGNORE_INDEX) for some, theirs in zip(ids, labels, strict=True)]


def _collated(batch: Mapping[str, Any], rows: int) -> list[Scored]:
    """Those of a padded batch with TRL's names, ``rows`` for the completions and as many for the KL term, if any."""
    found: list[Scored] = []
    for prefix in ("", "KL_"):
        names = [f"{prefix}{name}" for name in ("input_ids", "attention_mask", "completion_mask")]
        if prefix and names[0] not in batch:
            continue
        ids, real, scored = (batch.get(name) for name in names)
        if not (_is_table(ids) and _is_table(real) and _is_table(scored)):
            raise PackingError(
                f"the collator made a batch of {', '.join(batch)}, in which {', '.join(names)} are not all tensors "
                "[B, S]. Pass TRL's collator for preferences (trainer.data_collator), or none."
            )
        if len(ids) != rows:
            raise PackingError(f"the collator made {len(ids)} rows of {names[0]} where {rows} were expected")
        for row in range(rows):
            kept = real[row].bool()
            mask = scored[row][kept].bool()
            mask[:1] = False
            found.append(Scored(ids[row][kept].long(), mask))
            if not len(found[-1].ids):
                raise PackingError("the collator left no token of it")
    return found


def sequence_of(wanted: Sequence[Examples], place: tuple[int, int, int]) -> Scored:
    """That of data set, row and column ``place``."""
    dataset, row, column = place
    return wanted[dataset][row][column]


def _is_table(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim == 2
