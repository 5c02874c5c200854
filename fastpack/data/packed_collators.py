"""Collators for your own training loop: they join examples in one row ``[1, T]`` and pass on their lengths.

Pass their batches to a patched model without changes::

    batch = PackedSFTCollator()(examples)
    loss = model(**batch).loss

For pairs see :mod:`fastpack.trainers.preference_losses`, and for images :mod:`fastpack.data.vision_collator`. Nothing
is cut: an example that is not valid raises.

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
class TokenSequence:
    """One sequence without padding: int64 ``[length]`` ids and labels."""

    ids: Tensor
    labels: Tensor


def _collate(groups: Sequence[tuple[TokenSequence, ...]]) -> dict[str, Any]:
    """Return a batch of examples that have one or two sequences each: all first sequences, then all second ones."""
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
    """A collator that joins examples in one row, for supervised fine-tuning.

    An example is a mapping with lists, arrays or 1-D tensors of equal lengths:

    - ``input_ids``;
    - ``labels`` (optional): the ids, with -100 for tokens that are not trained; by default ``input_ids``;
    - ``completion_mask`` (optional): labels are ignored where it is 0;
    - ``attention_mask`` (optional): tokens left and right of its ones are dropped.

    The batch holds, on the host:

    - ``input_ids``, ``labels``, ``position_ids``: int64 ``[1, T]``. Positions restart in each sequence, whose first
      label is ignored, since the token before it belongs to another sequence.
    - ``packed_seq_lens``: a :class:`fastpack.PackedSeqLens` with lengths and shared prefixes, so that a patched model
      need not read them from the device.

    Raises:
        PackingError: when called without examples, or with an example that has no token, whose columns differ in length
            or are not whole numbers in one dimension, whose ``completion_mask`` is all zeros, or whose
            ``attention_mask`` has a hole. The message has the number of the example in the batch.

    Example:
        >>> batch = PackedSFTCollator()([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        >>> batch["labels"].tolist()
        [[-100, 2, 3, -100, 5]]
    """

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Collate a list of examples."""
        return _collate([(supervised(example, f"example {i}"),) for i, example in enumerate(examples)])


@dataclass(frozen=True)
class PackedPreferenceCollator:
    """A collator that joins preference pairs in one row: all chosen sequences, then all rejected ones.

    Each sequence begins with its prompt. An example is a mapping with TRL's columns as lists, arrays or 1-D tensors:

    - ``prompt_ids``, ``chosen_ids``, ``rejected_ids``, or their older names ``prompt_input_ids`` and so on. The
      completions don't contain the prompt;
    - ``prompt_attention_mask`` and so on (optional): padding is dropped before the parts are joined;
    - ``ref_chosen_logps`` and ``ref_rejected_logps`` (optional): the reference model's log-probabilities.

    The batch has the entries of :class:`PackedSFTCollator`, with 2 P sequences. Only completions have labels.
    ``ref_chosen_logps`` and ``ref_rejected_logps`` are float64 ``[P]`` if the examples have them (see
    :mod:`fastpack.trainers.preference_losses`).

    Raises:
        PackingError: as :class:`PackedSFTCollator`, and for a completion in which no token is predicted: an empty one,
            or a single token without a prompt.

    Example:
        >>> pair = {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]}
        >>> PackedPreferenceCollator()([pair])["labels"].tolist()
        [[-100, 2, 3, -100, 4]]
    """

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Collate a list of pairs."""
        pairs = []
        for number, example in enumerate(examples):
            name = f"example {number}"
            prompt = _part(example, "prompt", name)
            pairs.append((_completed(prompt, example, "chosen", name), _completed(prompt, example, "rejected", name)))
        batch = _collate(pairs)
        for column in ("ref_chosen_logps", "ref_rejected_logps"):
            present = [column in example for example in examples]
            if not any(present):
                continue
            if not all(present):
                raise PackingError(
                    f"example {present.index(False)} of the batch has no {column}, which others have. Pass it with all "
                    "examples, or with none."
                )
            batch[column] = torch.tensor([float(example[column]) for example in examples], dtype=torch.float64)
        return batch


def supervised(example: Example, name: str) -> TokenSequence:
    """Return the sequence of an example of :class:`PackedSFTCollator`."""
    ids = column_of(example, "input_ids", name)
    labels = column_of(example, "labels", name) if example.get("labels") is not None else ids
    _check_length(labels, ids, "labels", name)
    if example.get("completion_mask") is not None:
        mask = column_of(example, "completion_mask", name)
        _check_length(mask, ids, "completion_mask", name)
        if not mask.any():
            raise PackingError(f"{name} of the batch has an empty completion: completion_mask is 0 everywhere.")
        labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
    real = real_slice(example, "attention_mask", ids, name)
    if not len(ids[real]):
        raise PackingError(f"{name} of the batch has no token. Leave it out.")
    return TokenSequence(ids[real], labels[real])


def _completed(prompt: Tensor, example: Example, kind: str, name: str) -> TokenSequence:
    """Return the sequence of a prompt and one of its completions."""
    completion = _part(example, kind, name)
    ids = torch.cat([prompt, completion])
    if len(completion) == 0 or len(ids) < 2:
        what = "a single token without a prompt" if len(completion) else "an empty completion"
        raise PackingError(f"{name} of the batch has {what} as {kind}, which has no log-probability. Leave it out.")
    return TokenSequence(ids, torch.cat([torch.full_like(prompt, IGNORE_INDEX), completion]))


def _part(example: Example, kind: str, name: str) -> Tensor:
    """Return the prompt or a completion of a pair, without padding."""
    column = f"{kind}_ids" if f"{kind}_ids" in example else f"{kind}_input_ids"
    if column not in example:
        raise PackingError(
            f"{name} of the batch has no {kind}_ids (nor {column}), only {', '.join(example)}. Pass TRL's columns: "
            "prompt_ids, chosen_ids and rejected_ids."
        )
    ids = column_of(example, column, name)
    return ids[real_slice(example, f"{kind}_attention_mask", ids, name)]


def real_slice(example: Example, column: str, ids: Tensor, name: str) -> slice:
    """Return the range of slots in which a mask is 1."""
    if example.get(column) is None:
        return slice(None)
    mask = column_of(example, column, name)
    _check_length(mask, ids, column, name)
    ones = mask.nonzero()[:, 0].tolist()
    if not ones:
        return slice(0)
    if len(ones) != ones[-1] + 1 - ones[0]:
        raise PackingError(
            f"{column} of {name} of the batch has a hole: padding may be left or right of the tokens, not inside."
        )
    return slice(ones[0], ones[-1] + 1)


def _check_length(column: Tensor, ids: Tensor, what: str, name: str) -> None:
    if len(column) != len(ids):
        raise PackingError(
            f"{name} of the batch has {len(column)} entries in {what} and {len(ids)} ids. Pass one entry for each id."
        )


def column_of(example: Example, column: str, name: str) -> Tensor:
    """Return a column of whole numbers as int64 ``[length]``."""
    if column not in example:
        raise PackingError(f"{name} of the batch has no {column}, only {', '.join(example)}.")
    try:
        values = torch.as_tensor(example[column])
    except (TypeError, ValueError, RuntimeError) as error:
        raise PackingError(f"{column} of {name} of the batch are not numbers ({error}). Pass whole numbers.") from error
    if values.ndim != 1 or (values.is_floating_point() and len(values)):  # torch makes floats of []
        raise PackingError(
            f"{column} of {name} of the batch have shape {tuple(values.shape)} and {values.dtype}; pass whole numbers "
            "in one dimension."
        )
    return values.long()
