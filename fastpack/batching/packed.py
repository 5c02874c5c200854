"""Collators for loops of one's own: examples end to end in one row ``[1, T]``, with their lengths beside them.

What they return goes into a patched model as it is::

    batch = PackedSFTCollator()(examples)
    loss = model(**batch).loss

For pairs see :mod:`fastpack.trainers.preference_losses`. Nothing is cut: an example that does not fit raises.

Shape suffixes: T tokens, N sequences, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fastpack.errors import PackingError
from fastpack.packing.prefixes import find_prefixes
from fastpack.packing.seqlens import IGNORE_INDEX, Bucket, PackedSeqLens

Example = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class _Sequence:
    """One sequence without padding: int64 ``[length]`` ids and labels."""

    ids: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class _PackedCollator:
    """How large the row is. Frozen, and without closures, so that workers of a data loader can be handed one."""

    pad_to: int | None = None
    pad_to_multiple_of: int | None = None
    max_sequences: int | None = None

    def __post_init__(self) -> None:
        for name in ("pad_to", "pad_to_multiple_of", "max_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; pass 1 or more, or None.")
        if self.pad_to is not None and self.pad_to_multiple_of is not None:
            raise ValueError(
                f"pad_to={self.pad_to} and pad_to_multiple_of={self.pad_to_multiple_of}: the length is fixed or "
                "rounded up. Pass one of them."
            )
        if self.max_sequences is not None and self.pad_to is None:
            raise ValueError(
                f"max_sequences={self.max_sequences} fixes the number of offsets, which serves only where pad_to "
                "fixes the length. Pass both, or neither."
            )

    def _collate(self, groups: Sequence[tuple[_Sequence, ...]]) -> dict[str, Any]:
        """The batch of these examples, each with its sequences: all first ones, then all second ones."""
        if not groups:
            raise PackingError("there is no example to collate. Pass at least one.")
        self._check_fit(groups)
        sequences = list(chain.from_iterable(zip(*groups, strict=True)))
        packed = PackedSeqLens.from_lengths([len(s.ids) for s in sequences])
        ids_1T = torch.cat([s.ids for s in sequences])[None]
        prefixes = find_prefixes(packed.lengths, ids_1T[0])
        labels_1T = packed.mask_first_labels(torch.cat([s.labels for s in sequences])[None])
        total = packed.total_tokens
        if self.pad_to is not None:
            # room for the tail in any case: whether there is one must not decide about shapes
            count = (self.max_sequences or len(sequences)) + 1
            packed = packed.bucketed(Bucket(self.pad_to, count, self.pad_to))
        elif self.pad_to_multiple_of is not None and total % self.pad_to_multiple_of:
            rest = self.pad_to_multiple_of - total % self.pad_to_multiple_of
            packed = replace(PackedSeqLens.from_lengths([*packed.lengths, rest]), filler=rest)
        packed = replace(packed.flattened(), prefixes=prefixes)
        tail = packed.total_tokens - total
        return {
            "input_ids": torch.cat([ids_1T, ids_1T[:, :1].expand(1, tail)], 1),
            "labels": torch.cat([labels_1T, labels_1T.new_full((1, tail), IGNORE_INDEX)], 1),
            "position_ids": packed.position_ids,
            "packed_seq_lens": packed,
        }

    def _check_fit(self, groups: Sequence[tuple[_Sequence, ...]]) -> None:
        if self.pad_to is None:
            return
        tokens = count = 0
        for number, group in enumerate(groups):
            here = sum(len(s.ids) for s in group)
            tokens, count = tokens + here, count + len(group)
            if tokens > self.pad_to:
                raise PackingError(
                    f"example {number} of the batch does not fit: it has {here} tokens, with which there are {tokens}, "
                    f"and pad_to is {self.pad_to}. Pass fewer or shorter examples, or a larger pad_to."
                )
            if self.max_sequences is not None and count > self.max_sequences:
                raise PackingError(
                    f"example {number} of the batch does not fit: with it there are {count} sequences, and "
                    f"max_sequences is {self.max_sequences}. Pass fewer examples, or a larger max_sequences."
                )


@dataclass(frozen=True, kw_only=True)
class PackedSFTCollator(_PackedCollator):
    """Examples end to end in one row, for supervised fine-tuning.

    An example is a mapping with lists, arrays or 1-D tensors of equal lengths:

    - ``input_ids``;
    - ``labels``, the ids with -100 where nothing is trained; by default ``input_ids``;
    - ``completion_mask``, if it has one: labels are ignored where it is 0;
    - ``attention_mask``, if it was padded: tokens left and right of its ones are dropped.

    The batch holds, on the host:

    - ``input_ids``, ``labels``, ``position_ids``: int64 ``[1, T]``. The first label of each sequence is ignored,
      since the token before it belongs to another one; positions restart.
    - ``packed_seq_lens``: a :class:`fastpack.PackedSeqLens`, so that a patched model reads nothing from the device: no
      lengths, nor the prefixes that sequences share (``fastpack.patch(..., share_prefixes="auto")``).

    Attributes:
        pad_to: T of every batch, as compiled steps and CUDA graphs want it. What is missing is one sequence at the
            end, of copies of the first token, whose labels are ignored (see :meth:`PackedSeqLens.bucketed`). It is no
            longer than ``pad_to``; a model with a table of positions needs one for each of its tokens.
        pad_to_multiple_of: T is rounded up to a multiple of this, in the same manner; not together with ``pad_to``.
        max_sequences: with ``pad_to``: the most sequences that a batch has. The number of offsets follows from it; by
            default from the number of examples, so that batches of as many examples have the same shapes.

    Raises:
        ValueError: sizes below 1, or that exclude each other.
        PackingError: when called: no example; one without a token, whose columns differ in length or are not whole
            numbers in one dimension, whose ``completion_mask`` keeps nothing, whose ``attention_mask`` has a hole; one
            that does not fit. The message has its number in the batch.
    """

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        return self._collate([(_supervised(example, f"example {i}"),) for i, example in enumerate(examples)])


@dataclass(frozen=True, kw_only=True)
class PackedPreferenceCollator(_PackedCollator):
    """Pairs flattened into one row: all chosen sequences, then all rejected ones, each behind its prompt.

    An example is a mapping with TRL's columns, lists, arrays or 1-D tensors:

    - ``prompt_ids``, ``chosen_ids``, ``rejected_ids``, or under their older names ``prompt_input_ids`` and so on;
      the completions without the prompt;
    - ``prompt_attention_mask`` and so on, if one was padded: padding is dropped wherever it stands, before the parts
      are joined, so that it belongs to no sequence;
    - ``ref_chosen_logps`` and ``ref_rejected_logps``, if the reference was asked before.

    The batch is that of :class:`PackedSFTCollator` with 2 P sequences, labels of the completions alone, and
    ``ref_chosen_logps`` and ``ref_rejected_logps`` as float64 ``[P]`` where they came (see
    :mod:`fastpack.trainers.preference_losses`).

    Attributes:
        pad_to: as there.
        pad_to_multiple_of: as there.
        max_sequences: as there; each pair has two.

    Raises:
        ValueError: as there.
        PackingError: as there, and for a completion of which nothing is predicted: without a token, or with a single
            one and no prompt.
    """

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        pairs = []
        for number, example in enumerate(examples):
            name = f"example {number}"
            prompt = _part(example, "prompt", name)
            pairs.append((_completed(prompt, example, "chosen", name), _completed(prompt, example, "rejected", name)))
        batch = self._collate(pairs)
        for column in ("ref_chosen_logps", "ref_rejected_logps"):
            given = [column in example for example in examples]
            if not any(given):
                continue
            if not all(given):
                raise PackingError(
                    f"example {given.index(False)} of the batch has no {column}, which others have. Pass it with all "
                    "examples, or with none."
                )
            batch[column] = torch.tensor([float(example[column]) for example in examples], dtype=torch.float64)
        return batch


def _supervised(example: Example, name: str) -> _Sequence:
    """One example of :class:`PackedSFTCollator`."""
    ids = _column(example, "input_ids", name)
    labels = _column(example, "labels", name) if example.get("labels") is not None else ids
    _check_length(labels, ids, "labels", name)
    if example.get("completion_mask") is not None:
        mask = _column(example, "completion_mask", name)
        _check_length(mask, ids, "completion_mask", name)
        if not mask.any():
            raise PackingError(f"{name} of the batch has an empty completion: completion_mask is 0 everywhere.")
        labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
    real = _real(example, "attention_mask", ids, name)
    if not len(ids[real]):
        raise PackingError(f"{name} of the batch has no token. Leave it out.")
    return _Sequence(ids[real], labels[real])


def _completed(prompt: Tensor, example: Example, kind: str, name: str) -> _Sequence:
    """The prompt and one of its completions."""
    completion = _part(example, kind, name)
    ids = torch.cat([prompt, completion])
    if len(completion) == 0 or len(ids) < 2:
        what = "no prompt, and a single token" if len(completion) else "an empty completion"
        raise PackingError(f"{name} of the batch has {what} as {kind}: it has no log-probability. Leave it out.")
    return _Sequence(ids, torch.cat([torch.full_like(prompt, IGNORE_INDEX), completion]))


def _part(example: Example, kind: str, name: str) -> Tensor:
    """The prompt or a completion of a pair, without padding."""
    column = f"{kind}_ids" if f"{kind}_ids" in example else f"{kind}_input_ids"
    if column not in example:
        raise PackingError(
            f"{name} of the batch has no {kind}_ids (nor {column}), only {', '.join(example)}. Pass TRL's columns: "
            "prompt_ids, chosen_ids and rejected_ids."
        )
    ids = _column(example, column, name)
    return ids[_real(example, f"{kind}_attention_mask", ids, name)]


def _real(example: Example, column: str, ids: Tensor, name: str) -> slice:
    """Where the ones of a mask stand."""
    if example.get(column) is None:
        return slice(None)
    mask = _column(example, column, name)
    _check_length(mask, ids, column, name)
    ones = mask.nonzero()[:, 0].tolist()
    if not ones:
        return slice(0)
    if len(ones) != ones[-1] + 1 - ones[0]:
        raise PackingError(
            f"{column} of {name} of the batch has a hole: padding may stand left and right of the tokens, not between."
        )
    return slice(ones[0], ones[-1] + 1)


def _check_length(column: Tensor, ids: Tensor, what: str, name: str) -> None:
    if len(column) != len(ids):
        raise PackingError(
            f"{name} of the batch has {len(column)} entries in {what} and {len(ids)} ids. Pass one for each token."
        )


def _column(example: Example, column: str, name: str) -> Tensor:
    """Whole numbers, int64 ``[length]``."""
    if column not in example:
        raise PackingError(f"{name} of the batch has no {column}, only {', '.join(example)}.")
    try:
        values = torch.as_tensor(example[column])
    except (TypeError, ValueError, RuntimeError) as error:
        raise PackingError(f"{column} of {name} of the batch are no numbers: {error}.") from error
    if values.ndim != 1 or (values.is_floating_point() and len(values)):  # torch takes [] for floats
        raise PackingError(
            f"{column} of {name} of the batch have shape {tuple(values.shape)} and {values.dtype}; pass whole numbers "
            "in one dimension."
        )
    return values.long()
