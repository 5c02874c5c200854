"""Batches of the same sequences, one for each way to tell fastpack where a sequence ends.

Batches are on the CPU unless a function says otherwise. ``input_ids``, ``labels`` and masks are int64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fastpack.exactness.tiny import plain_tokens
from fastpack.utils.signatures import accepted

LENGTHS = (7, 1, 12, 12, 20, 3)
"""Lengths in tokens: a single token, two equal lengths, and one longer than a tiny config's windows and chunks."""


def make_sequences(lengths: Sequence[int] = LENGTHS, draw: int = 0) -> list[Tensor]:
    """Return sequences of random ids, int64, with these lengths and without a tiny config's special tokens."""
    return [plain_tokens(1, length, seed=len(lengths) * draw + i)[0] for i, length in enumerate(lengths)]


def padded(sequences: Sequence[Tensor], side: str) -> dict[str, Tensor]:
    """Return ``input_ids``, ``attention_mask`` and ``labels``: one row per sequence, and one row of padding only.

    ``side`` is ``right``, ``left`` or ``both``.
    """
    width = max(map(len, sequences)) + 2
    ids = torch.zeros(len(sequences) + 1, width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        free = width - len(sequence)
        start = {"right": 0, "left": free, "both": free // 2}[side]
        ids[row, start : start + len(sequence)] = sequence
        mask[row, start : start + len(sequence)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def single(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Return the arguments of a stock model for one sequence ``[L]`` alone."""
    return {"input_ids": ids[None], **accepted(type(model).forward, {"use_cache": False})}


def flat(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return ``input_ids`` ``[1, T]`` and equal labels, as in a user's own training loop."""
    ids = torch.cat(list(sequences))[None]
    return {"input_ids": ids, "labels": ids.clone()}


def packed(sequences: Sequence[Tensor]) -> dict[str, Any]:
    """Return ``input_ids`` ``[1, T]`` and the lengths, on the sequences' device."""
    return {"input_ids": torch.cat(list(sequences))[None], "packed_seq_lens": [len(s) for s in sequences]}


def rows_of(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return ``input_ids`` and ``attention_mask``, one row per sequence, padded right, on the sequences' device."""
    ids = pad_sequence(list(sequences), batch_first=True)
    mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


def behind_padding(ids: Tensor, slots: int) -> dict[str, Tensor]:
    """Return ``input_ids`` and ``attention_mask`` of one sequence ``[L]`` behind slots of padding; no mask for none."""
    if not slots:
        return {"input_ids": ids[None]}
    padding = ids.new_zeros(slots)
    mask = torch.cat([padding, torch.ones_like(ids)])
    return {"input_ids": torch.cat([padding, ids])[None], "attention_mask": mask[None]}


def taken_for_one(sequences: Sequence[Tensor]) -> dict[str, Any]:
    """Return the control: the same tokens as one sequence, in which each token sees all earlier tokens."""
    return packed([torch.cat(list(sequences))])


def predicted(logits: Tensor) -> Tensor:
    """Return logits, with 0 for tokens that a model never predicts: it sets them to the lowest number (Chameleon)."""
    return logits.masked_fill(logits == torch.finfo(logits.dtype).min, 0)


def unpadded(values: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return the values ``[B S, ...]`` of a batch's real tokens, in order."""
    mask = batch.get("attention_mask")
    return values if mask is None else values[mask.flatten() != 0]


def positions(sequences: Sequence[Tensor]) -> Tensor:
    """Return restarting positions ``[1, T]``."""
    return torch.cat([torch.arange(len(s)) for s in sequences])[None]


def trl_keywords(sequences: Sequence[Tensor]) -> dict[str, Any]:
    """Return the keywords of TRL's padding-free collator."""
    lengths = torch.tensor([len(s) for s in sequences])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32)
    return {
        "position_ids": positions(sequences),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
        "seq_idx": torch.arange(len(sequences), dtype=torch.int32).repeat_interleave(lengths)[None],
    }


def packed_rows(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return several packed rows ``[2, S]``: the first sequences and the rest, the shorter row padded."""
    middle = len(sequences) // 2 + 1
    rows = [sequences[:middle], sequences[middle:]]
    batch = rows_of([torch.cat(list(row)) for row in rows])
    where = pad_sequence([positions(row)[0] for row in rows], batch_first=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "position_ids": where, "labels": labels}


INPUT_KINDS: Mapping[str, Callable[[Sequence[Tensor]], dict[str, Any]]] = {
    "padded right": lambda s: padded(s, "right"),
    "padded left": lambda s: padded(s, "left"),
    "padded both sides": lambda s: padded(s, "both"),
    "restarting positions": lambda s: {**flat(s), "position_ids": positions(s)},
    "TRL's keywords": lambda s: {**flat(s), **trl_keywords(s)},
    "packed_seq_lens": lambda s: {**flat(s), **packed(s)},
    "several packed rows": packed_rows,
}
