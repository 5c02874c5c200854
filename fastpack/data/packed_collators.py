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
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.packing.prefixes import find_prefixes
from fastpack.packing.seqlens import PackedSeqLens

Example = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class _Sequence:
    """One sequence without padding: int64 ``[length]`` ids and labels."""

    ids: Tensor
    labels: Tensor


def _collate(groups: Sequence[tuple[_Sequence, ...]]) -> dict[str, Any]:
    """The batch of these examples, each with its sequences: all first ones, then all second ones."""
    if not groups:
        raise PackingError("there is no example to collate. Pass at least one.")
    sequences = list(chain.from_iterable(zip(*groups, strict=True)))
    packed = PackedSeqLens.from_lengths([len(s.ids) for s in sequences])
    ids_1T = torch.cat([s.ids for s in sequences])[None]
    return {
        "input_ids": ids_1T,
        "labels": packed.mask_first_labels(torch.cat([s.labels for s in sequences])[None]),
        "position_ids": packed.position_ids,
        "packed_seq_lens": replace(packed.flattened(), prefixes=find_prefixes(packed.lengths, ids_1T[0])),
    }


@dataclass(frozen=True)
class PackedSFTCollator:
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

    Raises:
        PackingError: when called: no example; one without a token, whose columns differ in length or are not whole
            numbers in one dimension, whose ``completion_mask`` keeps nothing, whose ``attention_mask`` has a hole. The
            message has its number in the batch.
    """

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        return _collate([(_supervised(example, f"example {i}"),) for i, example in enumerate(examples)])


@dataclass(frozen=True)
class PackedPreferenceCollator:
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

    Raises:
        PackingError: as there, and for a completion of which nothing is predicted: without a token, or with a single
            one and no prompt.
    """

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        pairs = []
        for number, example in enumerate(examples):
            name = f"example {number}"
            prompt = _part(example, "prompt", name)
            pairs.append((_completed(prompt, example, "chosen", name), _completed(prompt, example, "rejected", name)))
        batch = _collate(pairs)
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
