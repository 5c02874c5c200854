"""Some sequences as one batch, in every way in which fastpack is told where each of them ends.

All on the CPU: ``input_ids`` and ``labels`` int64, masks int64, with whatever else a kind has.
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
"""A single token, two of a length, and one that outgrows windows, chunks and lengths of a tiny config."""


def make_sequences(lengths: Sequence[int] = LENGTHS, draw: int = 0) -> list[Tensor]:
    """Return random ids of these lengths, int64, none of them special in a tiny config."""
    return [plain_tokens(1, length, seed=len(lengths) * draw + i)[0] for i, length in enumerate(lengths)]


def padded(sequences: Sequence[Tensor], side: str) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels``, padded ``right``, ``left`` or on ``both`` sides; one row
    holds padding only."""
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
    """Return what a stock model is called with for one sequence ``[L]`` alone."""
    return {"input_ids": ids[None], **accepted(type(model).forward, {"use_cache": False})}


def flat(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """``input_ids`` ``[1, T]`` and labels equal to them: what a user's own loop would pass."""
    ids = torch.cat(list(sequences))[None]
    return {"input_ids": ids, "labels": ids.clone()}


def packed(sequences: Sequence[Tensor]) -> dict[str, Any]:
    """``input_ids`` ``[1, T]`` and the lengths, on the sequences' device."""
    return {"input_ids": torch.cat(list(sequences))[None], "packed_seq_lens": [len(s) for s in sequences]}


def rows_of(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask``, a row a sequence, padded on the right, on the sequences' device."""
    ids = pad_sequence(list(sequences), batch_first=True)
    mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


def taken_for_one(sequences: Sequence[Tensor]) -> dict[str, Any]:
    """The control: the same tokens as one sequence, in which each sees all that come before it."""
    return packed([torch.cat(list(sequences))])


def unpadded(values: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return those of a batch's values ``[B S, ...]`` that are no padding's, in order."""
    mask = batch.get("attention_mask")
    return values if mask is None else values[mask.flatten() != 0]


def positions(sequences: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.arange(len(s)) for s in sequences])[None]


def trl_keywords(sequences: Sequence[Tensor]) -> dict[str, Any]:
    """What TRL's padding-free collator sends."""
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
    """Several packed rows ``[2, S]``: the first sequences and the rest, the shorter row padded."""
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
