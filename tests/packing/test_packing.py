"""Where sequences begin and end, read from every form of a batch.

What is put back where is in ``test_packed_seq_lens.py``, contradictory batches in ``test_packing_errors.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import LENGTHS, check, positions_of, read, trl
from torch import Tensor

from fastpack.packing.inputs import PACKING_KEYWORDS, take_packing
from fastpack.packing.seqlens import PackedSeqLens


def lay_out(lengths: Sequence[int], starts: Sequence[int], width: int) -> Tensor:
    """A ``[B, width]`` mask with one sequence a row, beginning at column ``starts[row]``."""
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        mask[row, start : start + length] = 1
    return mask


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)])
def test_from_lengths(make: Any) -> None:
    packed = PackedSeqLens.from_lengths(make(LENGTHS))
    check(packed, LENGTHS)
    assert packed.padding.indices is None
    assert packed.padding.batch_shape is None
    assert packed.runs == ((1, 3), (2, 1), (2, 4), (1, 2))


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16])
def test_padding_on_any_side(side: str, dtype: torch.dtype) -> None:
    width = 7
    starts = [{"right": 0, "left": width - n, "both": (width - n) // 2}[side] for n in LENGTHS]
    mask = lay_out(LENGTHS, starts, width)
    packed = read((len(LENGTHS), width), mask.to(dtype))
    check(packed, LENGTHS)
    assert packed.padding.batch_shape == (len(LENGTHS), width)
    assert packed.padding.indices is not None
    assert packed.padding.indices.tolist() == mask.reshape(-1).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("mask", [None, torch.ones(3, 4, dtype=torch.long)])
def test_each_row_is_a_sequence_where_nothing_says_otherwise(mask: Tensor | None) -> None:
    packed = read((3, 4), mask)
    check(packed, (4, 4, 4))
    assert packed.padding.indices is None, "no slot is padding, so nothing is to be gathered"


def test_rows_without_a_token_are_left_out() -> None:
    mask = torch.tensor([[0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]])
    check(read((5, 3), mask), (2, 1))


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        ([[1, 1, 2, 2, 0]], (2, 2)),
        ([[1, 1, 0, 2, 2]], (2, 2)),
        ([[0, 7, 7, 3, 1]], (2, 1, 1)),
        ([[1, 1, 2, 1, 1]], (2, 1, 2)),  # a number that comes back is another sequence
        ([[1, 2, 3, 4, 5]], (1, 1, 1, 1, 1)),
        ([[1, 1, 2, 2, 2], [1, 1, 1, 1, 1]], (2, 3, 5)),  # each row begins anew
        ([[1, 1, 2, 2, 2], [2, 2, 2, 3, 0]], (2, 3, 3, 1)),
    ],
)
def test_segment_numbers(mask: list[list[int]], lengths: tuple[int, ...]) -> None:
    shape = (len(mask), len(mask[0]))
    check(read(shape, torch.tensor(mask)), lengths)
    # positions that agree change nothing, whatever stands under padding
    where = torch.full(shape, -3)
    where[torch.tensor(mask) != 0] = positions_of(lengths)[0]
    check(read(shape, torch.tensor(mask), where), lengths)


@pytest.mark.parametrize("mask", [None, torch.ones(1, sum(LENGTHS), dtype=torch.long)])
def test_restarting_positions(mask: Tensor | None) -> None:
    total = sum(LENGTHS)
    where = positions_of(LENGTHS)
    for positions in (where, where[0]):
        packed = read((1, total), mask, positions)
        check(packed, LENGTHS)
        assert packed.padding.batch_shape == (1, total)
        assert packed.padding.indices is None


def test_several_packed_rows() -> None:
    where = torch.tensor([[0, 1, 2, 0, 1, 9], [0, 0, 1, 2, 3, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    packed = read((2, 6), mask, where)
    check(packed, (3, 2, 1, 4, 1))
    # a row that goes on counting where the row above stopped is a sequence of its own
    kept = read((2, 3), None, torch.tensor([[0, 1, 2], [3, 4, 5]]))
    assert kept.lengths == (3, 3)
    assert kept.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    # one row of positions serves every row of the batch
    check(read((2, 3), None, torch.tensor([0, 1, 0])), (2, 1, 2, 1))


def test_positions_under_padding_are_ignored_and_the_others_kept() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    garbage = torch.tensor([[7, -5, 0, 1, 2], [0, 1, 10**6, 1, 1]])
    check(read((2, 5), mask, garbage), (3, 2))
    # absolute positions of a left-padded batch, and a skip that the user chose, reach the model as they came
    chosen = torch.tensor([[0, 1, 2, 3, 4], [0, 5, 1, 1, 1]])
    packed = read((2, 5), mask, chosen)
    assert packed.lengths == (3, 2)
    assert packed.position_ids.tolist() == [[2, 3, 4, 0, 5]]


KEYWORDS = tuple(trl(LENGTHS))
SUBSETS = [
    names
    for size in range(1, len(KEYWORDS) + 1)
    for names in itertools.combinations(KEYWORDS, size)
    if not all(name.startswith("max") for name in names)
]


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_every_combination_of_keywords_that_agrees(names: tuple[str, ...]) -> None:
    batch = trl(LENGTHS)
    total = sum(LENGTHS)
    given_ = {name: batch[name] for name in names}
    check(read((1, total), None, **given_), LENGTHS)
    check(read((1, total), torch.ones(1, total, dtype=torch.long), **given_), LENGTHS)


def test_keywords_with_a_padded_batch() -> None:
    """Offsets and lengths count real tokens; ``seq_idx`` may count real tokens or slots."""
    lengths = (3, 2, 4)
    mask = lay_out(lengths, (1, 2, 0), 4)
    rows = torch.arange(3)[:, None].expand(3, 4)
    batch = trl(lengths)
    for name in ("cu_seq_lens_q", "packed_seq_lens", "seq_idx"):
        check(read((3, 4), mask, **{name: batch[name]}), lengths)
    check(read((3, 4), mask, seq_idx=rows), lengths)


def test_seq_idx_in_any_numbering() -> None:
    check(read((1, 5), seq_idx=torch.tensor([[5, 5, 2, 9, 9]])), (2, 1, 2))
    # as mamba takes it: each row counts from 0, and may hold a single sequence
    check(read((2, 3), seq_idx=torch.tensor([[0, 0, 1], [0, 0, 0]])), (2, 1, 3))
    check(read((2, 3), seq_idx=torch.tensor([[0, 0, 0], [0, 0, 1]])), (3, 2, 1))
    check(read((1, 3), seq_idx=[0, 0, 1]), (2, 1))


@pytest.mark.parametrize("key", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_offsets_in_any_form(key: str) -> None:
    for offsets in ([0, 2, 5], (0, 2, 5), torch.tensor([0, 2, 5]), torch.tensor([[0, 2, 5]], dtype=torch.int32)):
        check(read((1, 5), **{key: offsets}), (2, 3))
    # transformers fills up with repeated offsets: sequences without tokens
    check(read((1, 5), **{key: torch.tensor([0, 0, 2, 2, 5, 5])}), (2, 3))


def test_packed_seq_lens_in_any_form() -> None:
    for lengths in ([2, 3], (2, 3), torch.tensor([2, 3]), PackedSeqLens.from_lengths([2, 3])):
        packed = read((1, 5), packed_seq_lens=lengths)
        check(packed, (2, 3))
        assert packed.padding.batch_shape == (1, 5)


def test_what_was_read_from_this_batch_is_not_read_again() -> None:
    first = read((2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert read((2, 3), packed_seq_lens=first) is first


def test_inputs_are_left_as_they_were() -> None:
    mask, where = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[0, 1, 0, 5]])
    copies = mask.clone(), where.clone()
    read((1, 4), mask, where)
    assert torch.equal(mask, copies[0])
    assert torch.equal(where, copies[1])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3), st.data())
def test_lengths_come_back_from_every_representation(lengths: list[int], spare: int, data: st.DataObject) -> None:
    width = max(lengths) + spare
    starts = [data.draw(st.integers(0, width - n)) for n in lengths]
    mask = lay_out(lengths, starts, width)
    padded = read((len(lengths), width), mask)
    check(padded, lengths)

    total = sum(lengths)
    batch = trl(lengths)
    for name in ("positions", "cu_seq_lens_q", "seq_idx", "packed_seq_lens"):
        check(read((1, total), None, **{name: batch[name]}), lengths)
    segments = batch["seq_idx"].long() + 1
    check(read((1, total + spare), torch.nn.functional.pad(segments, (0, spare))), lengths)

    x = torch.randn(len(lengths), width, 2)
    tokens = [x[row, start : start + n] for row, (start, n) in enumerate(zip(starts, lengths, strict=True))]
    assert torch.equal(padded.unpad(x), torch.cat(tokens)[None])
    assert torch.equal(padded.repad(padded.unpad(x)), x * mask[..., None])


def test_take_packing_removes_every_keyword_and_returns_those_that_were_set() -> None:
    kwargs: dict[str, Any] = {**dict.fromkeys(PACKING_KEYWORDS), "seq_idx": 1, "labels": 2}
    assert take_packing(kwargs) == {"seq_idx": 1}
    assert kwargs == {"labels": 2}
