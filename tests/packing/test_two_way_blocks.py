"""Blocks of tokens that see each other in both directions: built from numbers, kept with the batch, made ranges."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpack import PackedSeqLens, PackingError
from fastpack.cuda_graphs.runner import why_not_this_call
from fastpack.exactness.tiny import build_tiny
from fastpack.model.prefix_sharing import PrefixSharing
from fastpack.packing.prefixes import Prefixes, without_cut_blocks
from fastpack.packing.two_way import TwoWay, TwoWayBlocks, seen_ranges

batches = st.lists(st.lists(st.integers(-1, 1), min_size=1, max_size=9), min_size=1, max_size=5)


def packed_with(sequences: Sequence[Sequence[int]]) -> PackedSeqLens:
    """Return a batch whose tokens have these block numbers."""
    packed = PackedSeqLens.from_lengths([len(s) for s in sequences])
    return replace(packed, two_way=TwoWayBlocks.of(packed, torch.tensor([[n for s in sequences for n in s]])))


def expected_blocks(sequences: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return each token's block, found with loops."""
    result: list[tuple[int, int]] = []
    begin = 0
    for sequence in sequences:
        for i, number in enumerate(sequence):
            first = last = i
            while number >= 0 and first > 0 and sequence[first - 1] == number:
                first -= 1
            while number >= 0 and last + 1 < len(sequence) and sequence[last + 1] == number:
                last += 1
            result.append((begin + first, begin + last + 1))
        begin += len(sequence)
    return result


@given(batches)
@settings(deadline=None, max_examples=100)
def test_blocks_of_numbers(sequences: list[list[int]]) -> None:
    blocks = packed_with(sequences).two_way
    assert blocks is not None
    assert list(zip(blocks.first.tolist(), blocks.end.tolist(), strict=True)) == expected_blocks(sequences)
    assert blocks.first.dtype == blocks.end.dtype == torch.int32


def test_a_block_ends_with_its_sequence() -> None:
    """Images that are last in one sequence and first in the next are two, even if their numbers are equal."""
    blocks = packed_with([[-1, 3, 3], [3, 3, -1]]).two_way
    assert blocks is not None
    assert (blocks.first.tolist(), blocks.end.tolist()) == ([0, 1, 1, 3, 3, 5], [1, 3, 3, 5, 5, 6])


@given(batches, st.one_of(st.none(), st.integers(1, 6)), st.sampled_from(["in_window", "whole"]))
@settings(deadline=None, max_examples=100)
def test_ranges(sequences: list[list[int]], window: int | None, two_way: TwoWay) -> None:
    """What each query sees, and which queries see each key, against a loop over pairs of tokens."""
    packed = packed_with(sequences)
    assert packed.two_way is not None
    ranges = seen_ranges(packed, packed.two_way, window, two_way)
    sequence, block = packed.seq_idx[0].tolist(), expected_blocks(sequences)
    total = len(block)

    def sees(query: int, key: int) -> bool:
        in_window, together = window is None or query - key < window, block[query] == block[key]
        if two_way == "whole":
            seen = (key <= query and in_window) or together
        else:
            seen = (key <= query or together) and in_window
        return seen and sequence[query] == sequence[key]

    for token in range(total):
        keys = [key for key in range(total) if sees(token, key)]
        queries = [query for query in range(total) if sees(query, token)]
        assert keys == list(range(ranges.first_key[token], ranges.end_key[token]))
        assert queries == list(range(ranges.first_query[token], ranges.end_query[token]))
    every = (ranges.first_key, ranges.end_key, ranges.first_query, ranges.end_query)
    assert all(x.dtype == torch.int32 and x.shape == (total,) for x in every)


@pytest.mark.parametrize(
    "number", [torch.zeros(1, 4, dtype=torch.long), torch.zeros(5, dtype=torch.long), torch.zeros(1, 5)]
)
def test_wrong_numbers_are_refused(number: torch.Tensor) -> None:
    packed = PackedSeqLens.from_lengths([3, 2])
    with pytest.raises(PackingError, match=r"the batch needs integers \(1, 5\)"):
        TwoWayBlocks.of(packed, number)
    assert TwoWayBlocks.of(packed, torch.zeros(1, 5, dtype=torch.int32)).end.tolist() == [3, 3, 3, 5, 5]


# --- with the batch ---------------------------------------------------------------------------------------------------


def test_blocks_move_with_the_batch() -> None:
    packed = packed_with([[0, 0], [-1]])
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), packed.flattened()):
        assert other.two_way is not None
        assert other.two_way.end.tolist() == [2, 2, 3]
    moved = packed.to("meta").two_way
    assert moved is not None
    assert moved.first.device.type == moved.end.device.type == "meta"


def test_bucket_padding_has_no_blocks() -> None:
    packed = packed_with([[0, 0], [1, 1, 1]]).bucketed()
    blocks = packed.two_way
    assert blocks is not None
    assert packed.total_tokens == 64
    assert blocks.first.tolist() == [0, 0, 2, 2, 2, *range(5, 64)]
    assert blocks.end.tolist() == [2, 2, 5, 5, 5, *range(6, 65)]


def test_prefixes_are_not_shared() -> None:
    """A token of a block depends on what follows it, and ids alone don't say what that is."""
    ids = torch.tensor([[5, 6, 7, 5, 6, 8]])
    model = build_tiny("llama")
    for two_way, shared in ((True, False), (False, True)):
        packed = packed_with([[-1, 0, 0], [-1, 0, 0]]) if two_way else PackedSeqLens.from_lengths([3, 3])
        sharing = PrefixSharing()
        result = sharing.serve(model.model, {"input_ids": ids}, packed.flattened())
        assert (result.shared is not None) == shared
        assert ("tokens of images see later ones" in sharing.describe()) != shared


@pytest.mark.parametrize(
    ("blocks", "shared"),
    [
        (([-1, 0, 0, -1], [-1, 0, 0, -1]), 4),
        (([-1, 0, 0, -1], [-1, 0, 0, -1, 5]), 4),
        (([-1, -1, 0, 0], [-1, -1, 0, 0, 0]), 2),
        (([0, 0, 0, 0, 0], [0, 0, 0, 0]), 0),
        (([-1, -1, -1, 0, 0], [-1, -1, -1, 0]), 3),
        (([-1, -1, -1, -1], [-1, -1, -1, 0, 0]), 3),
    ],
)
def test_a_prefix_ends_before_a_block_that_it_would_cut(blocks: tuple[list[int], list[int]], shared: int) -> None:
    packed = packed_with([*blocks])
    assert packed.two_way is not None
    prefixes = Prefixes((0, 1), (0, 4))
    cut = without_cut_blocks(prefixes, packed.lengths, packed.two_way.first.tolist(), packed.two_way.end.tolist())
    assert cut.shared == (0, shared)
    turned = without_cut_blocks(
        Prefixes((1, 0), (0, 4)), packed.lengths, packed.two_way.first.tolist(), packed.two_way.end.tolist()
    )
    assert turned.shared == (0, shared)


def test_nothing_is_recorded() -> None:
    model = build_tiny("llama").model
    for packed, reason in (
        (packed_with([[0, 0]]), "the batch has image blocks"),
        (PackedSeqLens.from_lengths([2]), None),
    ):
        assert why_not_this_call(model, {"packed_seq_lens": packed}) == reason
