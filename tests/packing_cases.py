"""Shared by the tests of packing: how a batch is read, and everything that follows from its lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.loss import IGNORE_INDEX
from fastpack.packing.buckets import Bucket
from fastpack.packing.inputs import read_packing
from fastpack.packing.seqlens import PackedSeqLens

CPU = torch.device("cpu")
LENGTHS = (3, 1, 1, 4, 4, 2)


def read(shape: tuple[int, int], mask: Any = None, positions: Tensor | None = None, **packing: Any) -> PackedSeqLens:
    return read_packing(shape, CPU, attention_mask=mask, position_ids=positions, packing=packing)


def check(packed: PackedSeqLens, lengths: Sequence[int]) -> None:
    """Check everything that follows from the lengths, against loops over Python ints."""
    offsets = [0, *itertools.accumulate(lengths)]
    assert packed.lengths == tuple(lengths)
    assert all(type(n) is int for n in packed.lengths)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == offsets
    assert packed.position_ids.dtype == torch.int64
    assert packed.position_ids.tolist() == [[i for n in lengths for i in range(n)]]
    assert packed.seq_idx.dtype == torch.int32
    assert packed.seq_idx.tolist() == [[which for which, n in enumerate(lengths) for _ in range(n)]]
    assert (packed.num_sequences, packed.total_tokens, packed.max_seqlen) == (len(lengths), sum(lengths), max(lengths))
    assert type(packed.max_seqlen) is int


def positions_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([[i for n in lengths for i in range(n)]])


def trl(lengths: Sequence[int]) -> dict[str, Any]:
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    numbers = torch.tensor([[which for which, n in enumerate(lengths) for _ in range(n)]], dtype=torch.int32)
    longest = max(lengths)
    return {
        "positions": positions_of(lengths),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets.clone(),
        "seq_idx": numbers,
        "packed_seq_lens": list(lengths),
        "max_length_q": longest,
        "max_length_k": torch.tensor(longest),
    }


def filled_up(batch: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the packed batch in a row of ``tokens`` tokens, with bucket padding at the end, as a collator makes it."""
    known: PackedSeqLens = batch["packed_seq_lens"]
    rest, bucket = tokens - known.total_tokens, Bucket(tokens, known.num_sequences + 1, tokens)
    packed = PackedSeqLens.from_lengths(known.lengths).bucketed(bucket)
    packed = replace(packed.flattened(), prefixes=known.prefixes)
    ids, labels = batch["input_ids"], batch["labels"]
    return {
        "input_ids": torch.cat([ids, ids[:, :1].expand(1, rest)], 1),
        "labels": torch.cat([labels, labels.new_full((1, rest), IGNORE_INDEX)], 1),
        "position_ids": packed.position_ids,
        "packed_seq_lens": packed,
    }
