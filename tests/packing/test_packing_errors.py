"""Batches that contradict themselves raise, and the message names both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import read
from torch import Tensor

from fastpack import FastpackError, PackedSeqLens, PackingError

T = torch.tensor
LOWEST = torch.finfo(torch.float32).min

FIVE = (1, 5)
RESTART_AT_3 = T([[0, 1, 2, 0, 1]])

# shape, arguments, what the message must say
CONTRADICTIONS: dict[str, tuple[tuple[int, int], dict[str, Any], tuple[str, ...]]] = {
    # offsets
    "offsets end short": (FIVE, {"cu_seq_lens_q": T([0, 2, 4])}, ("cu_seq_lens_q ends at 4", "5 tokens")),
    "offsets end far": (FIVE, {"cu_seq_lens_k": T([0, 2, 6])}, ("cu_seq_lens_k ends at 6", "5 tokens")),
    "offsets in a list end short": (FIVE, {"cu_seq_lens_q": [0, 4]}, ("cu_seq_lens_q ends at 4", "5 tokens")),
    "offsets with fractions": (FIVE, {"cu_seq_lens_q": T([0.0, 2.9, 5.0])}, ("cu_seq_lens_q is of dtype", "float32")),
    "offsets in words": (FIVE, {"cu_seq_lens_q": "0,5"}, ("cu_seq_lens_q=0,5 (str)", "pass integers")),
    "offsets in lists": (FIVE, {"cu_seq_lens_k": [0, [2], 5]}, ("cu_seq_lens_k=[0, [2], 5]", "pass integers")),
    "sequence numbers with fractions": (
        FIVE,
        {"seq_idx": T([[0, 0, 0.5, 0.5, 0.5]])},
        ("seq_idx is of dtype", "float32"),
    ),
    "a longest length in words": (FIVE, {"max_length_q": "x"}, ("max_length_q=x (str)", "pass integers")),
    "a mask for lengths": (FIVE, {"packed_seq_lens": T([True] * 5)}, ("packed_seq_lens", "bool", "attention_mask")),
    "a mask for lengths, in a list": (FIVE, {"packed_seq_lens": [True] * 5}, ("packed_seq_lens", "attention_mask")),
    "offsets start late": (FIVE, {"cu_seq_lens_q": T([1, 5])}, ("cu_seq_lens_q must rise from 0", "[1, 5]")),
    "offsets fall": (FIVE, {"cu_seq_lens_q": T([0, 3, 2, 5])}, ("cu_seq_lens_q must rise", "[0, 3, 2, 5]")),
    "no offsets": (FIVE, {"cu_seq_lens_q": T([], dtype=torch.int32)}, ("cu_seq_lens_q must rise", "[]")),
    "offsets count padding": (
        (2, 3),
        {"mask": T([[1, 1, 0], [1, 1, 1]]), "cu_seq_lens_q": T([0, 3, 6])},
        ("cu_seq_lens_q ends at 6", "5 tokens"),
    ),
    # lengths
    "lengths sum short": (FIVE, {"packed_seq_lens": [2, 2]}, ("packed_seq_lens sum to 4", "5 real tokens")),
    "lengths sum far": (FIVE, {"packed_seq_lens": T([2, 4])}, ("packed_seq_lens sum to 6", "5 real tokens")),
    "lengths in words": (FIVE, {"packed_seq_lens": "abc"}, ("packed_seq_lens=abc (str)", "such as [3, 2]")),
    "one length": (FIVE, {"packed_seq_lens": 5}, ("packed_seq_lens=5 (int)", "such as [3, 2]")),
    "lengths that are not whole": (FIVE, {"packed_seq_lens": [2.5, 2.5]}, ("[2.5, 2.5]", "whole numbers")),
    "ready-made lengths of another batch": (
        FIVE,
        {"packed_seq_lens": PackedSeqLens.from_lengths([2, 2])},
        ("packed_seq_lens sum to 4", "5 real tokens"),
    ),
    "a zero length": (FIVE, {"packed_seq_lens": [5, 0]}, ("at least 1", "[5, 0]")),
    "a zero length in a tensor": (FIVE, {"packed_seq_lens": T([0, 5])}, ("at least 1", "[0, 5]")),
    "a negative length": (FIVE, {"packed_seq_lens": [6, -1]}, ("at least 1", "[6, -1]")),
    "no length": (FIVE, {"packed_seq_lens": []}, ("at least 1", "[]")),
    "lengths in two dimensions": (FIVE, {"packed_seq_lens": T([[2, 3]])}, ("packed_seq_lens", "(1, 2)", "1-D")),
    "fractional lengths": (FIVE, {"packed_seq_lens": T([2.5, 3.5])}, ("packed_seq_lens", "float32", "whole")),
    # two that disagree
    "offsets of q against k": (
        FIVE,
        {"cu_seq_lens_q": T([0, 2, 5]), "cu_seq_lens_k": T([0, 3, 5])},
        ("cu_seq_lens_q and cu_seq_lens_k disagree", "[2]", "[3]"),
    ),
    "lengths against offsets": (
        FIVE,
        {"packed_seq_lens": [2, 3], "cu_seq_lens_q": T([0, 3, 5])},
        ("packed_seq_lens and cu_seq_lens_q disagree", "[2]", "[3]"),
    ),
    "seq_idx against offsets": (
        FIVE,
        {"cu_seq_lens_q": T([0, 2, 5]), "seq_idx": T([[0, 0, 0, 1, 1]])},
        ("cu_seq_lens_q and seq_idx disagree", "[2]", "[3]"),
    ),
    "one more in seq_idx": (
        FIVE,
        {"cu_seq_lens_q": T([0, 2, 5]), "seq_idx": T([[0, 0, 1, 1, 2]])},
        ("cu_seq_lens_q and seq_idx disagree", "[2]", "[2, 4]"),
    ),
    "seq_idx too short": (FIVE, {"seq_idx": T([[0, 0, 1]])}, ("seq_idx holds 3", "5 tokens")),
    "offsets against restarting positions": (
        FIVE,
        {"cu_seq_lens_q": T([0, 2, 5]), "positions": RESTART_AT_3},
        ("cu_seq_lens_q and position_ids disagree", "token 2 should begin a sequence"),
    ),
    "one sequence against restarting positions": (
        FIVE,
        {"cu_seq_lens_q": T([0, 5]), "positions": RESTART_AT_3},
        ("cu_seq_lens_q and position_ids disagree", "token 3 should continue one"),
    ),
    "lengths against plain positions": (
        FIVE,
        {"packed_seq_lens": [2, 3], "positions": torch.arange(5)},
        ("packed_seq_lens and position_ids disagree", "token 2 should begin a sequence"),
    ),
    "lengths against positions that restart inside one, after a skip": (
        FIVE,
        {"packed_seq_lens": [5], "positions": T([[0, 4, 5, 0, 1]])},
        ("packed_seq_lens and position_ids disagree", "token 3 should continue one"),
    ),
    "seq_idx against a skipped position": (
        FIVE,
        {"seq_idx": T([[0, 0, 0, 1, 1]]), "positions": T([[0, 1, 3, 0, 1]])},
        ("seq_idx and position_ids disagree", "token 2 should continue one", "+2"),
    ),
    "segments against plain positions": (
        FIVE,
        {"mask": T([[1, 1, 2, 2, 2]]), "positions": torch.arange(5)},
        ("attention_mask", "position_ids disagree", "token 2 should begin a sequence"),
    ),
    "segments against a restart inside one": (
        FIVE,
        {"mask": T([[1, 1, 2, 2, 2]]), "positions": T([[0, 1, 0, 0, 1]])},
        ("attention_mask", "position_ids disagree", "token 3 should continue one"),
    ),
    "segments against longer offsets": (
        FIVE,
        {"mask": T([[1, 1, 2, 2, 2]]), "cu_seq_lens_q": T([0, 5])},
        ("cu_seq_lens_q lets a sequence run over token 2", "attention_mask"),
    ),
    "segments against shorter lengths": (
        FIVE,
        {"mask": T([[1, 1, 2, 2, 2]]), "packed_seq_lens": [2, 1, 2]},
        ("packed_seq_lens begins a sequence at token 3", "segment of attention_mask"),
    ),
    # over the end of a row
    "offsets over a row's end": (
        (2, 3),
        {"cu_seq_lens_q": T([0, 4, 6])},
        ("cu_seq_lens_q lets a sequence run over token 3", "row"),
    ),
    "lengths over a row's end": (
        (2, 3),
        {"packed_seq_lens": [6]},
        ("packed_seq_lens lets a sequence run over token 3", "row"),
    ),
    "seq_idx over a row's end": (
        (2, 3),
        {"seq_idx": T([[0, 0, 1, 1, 1, 1]])},
        ("seq_idx lets a sequence run over token 3", "row"),
    ),
    # positions
    "a jump": (FIVE, {"positions": T([[0, 1, 2, 7, 8]])}, ("position_ids jump by 5 at token 3", "packed_seq_lens")),
    "a jump under a mask of ones": (
        FIVE,
        {"positions": T([[0, 2, 3, 0, 1]]), "mask": torch.ones(1, 5, dtype=torch.long)},
        ("position_ids jump by 2 at token 1", "packed_seq_lens"),
    ),
    "a position twice": (
        FIVE,
        {"positions": T([[0, 1, 2, 2, 2]])},
        ("repeat a position at token 3", "packed_seq_lens"),
    ),
    "each position twice": (FIVE, {"positions": T([[0, 0, 1, 1, 2]])}, ("repeat a position at token 3",)),
    "a position twice under a mask": (
        FIVE,
        {"positions": T([[0, 1, 1, 2, 9]]), "mask": T([[1, 1, 1, 1, 0]])},
        ("repeat a position at token 2",),
    ),
    "fractional positions": (FIVE, {"positions": T([[0, 0.5, 1, 1.5, 2]])}, ("position_ids", "fractional")),
    "negative positions": (FIVE, {"positions": T([[-1, 0, 1, 2, 3]])}, ("position_ids", "negative")),
    "negative positions, and lengths": (
        FIVE,
        {"positions": T([[-1, 0, 1, 0, 1]]), "packed_seq_lens": [3, 2]},
        ("position_ids", "negative"),
    ),
    "positions of two axes": (FIVE, {"positions": torch.zeros(2, 1, 5).long()}, ("(2, 1, 5)", "[3, B, S]")),
    "positions of three axes that fall": (
        FIVE,
        {"positions": T([[0, 1, 2, 0, 1]]).expand(3, 1, 5)},
        ("3 axes fall at token 3", "[4, B, S]", "packed_seq_lens"),
    ),
    "positions too short": (FIVE, {"positions": torch.arange(4)}, ("(4,)", "(1, 5)")),
    "positions of other rows": ((2, 3), {"positions": torch.zeros(3, 3).long()}, ("(3, 3)", "(2, 3)")),
    # masks
    "a hole": (
        (2, 5),
        {"mask": T([[1, 1, 1, 1, 1], [0, 1, 0, 0, 1]])},
        ("attention_mask has a hole", "row 1", "columns 1 and 4", "padding between"),
    ),
    "a hole, with positions that restart": (
        FIVE,
        {"mask": T([[1, 1, 0, 1, 1]]), "positions": T([[0, 1, 0, 0, 1]])},
        ("attention_mask has a hole", "columns 1 and 3"),
    ),
    "an additive mask": (FIVE, {"mask": T([[0, 0, 0, LOWEST, LOWEST]])}, ("attention_mask", "additive", "0 and 1")),
    "an additive mask of infinities": (FIVE, {"mask": T([[0, 0, float("-inf"), 0, 0]])}, ("additive", "0 and 1")),
    "an additive mask in half precision": (
        FIVE,
        {"mask": T([[0, 0, -65504.0, 0, 0]], dtype=torch.float16)},
        ("additive", "0 and 1"),
    ),
    "an additive mask that hides nothing": (FIVE, {"mask": torch.zeros(1, 5)}, ("attention_mask", "floating-point")),
    "an integer mask with a negative": (FIVE, {"mask": T([[1, 1, -1, 1, 1]])}, ("attention_mask", "negative")),
    "a fractional mask": (FIVE, {"mask": T([[1, 1, 0.5, 1, 1]])}, ("attention_mask", "fractional")),
    "a mask with NaN": (FIVE, {"mask": T([[1, 1, float("nan"), 1, 1]])}, ("attention_mask", "fractional")),
    "a 4-D mask of integers": (FIVE, {"mask": torch.ones(1, 1, 5, 5).long()}, ("(1, 1, 5, 5)", "int64", "(1, 5)")),
    "a 3-D mask": (FIVE, {"mask": torch.ones(1, 5, 5)}, ("(1, 5, 5)", "(1, 5)", "[B, S]")),
    "a 1-D mask": (FIVE, {"mask": torch.ones(5)}, ("(5,)", "(1, 5)")),
    "a mask of another width": ((2, 3), {"mask": torch.ones(2, 4)}, ("(2, 4)", "(2, 3)")),
    "a dict of masks": (FIVE, {"mask": {"full_attention": torch.ones(1, 5)}}, ("is a dict", "None or a [B, S] tensor")),
    "a list": (FIVE, {"mask": [[1, 1, 1, 1, 1]]}, ("is a list", "None or a [B, S] tensor")),
    # longest lengths
    "max_length_q too small": (
        FIVE,
        {"cu_seq_lens_q": T([0, 2, 5]), "max_length_q": 2},
        ("max_length_q is 2", "longest sequence has 3 tokens"),
    ),
    "max_length_k too small, in a tensor": (
        FIVE,
        {"positions": RESTART_AT_3, "max_length_q": 3, "max_length_k": T(2)},
        ("max_length_k is 2", "longest sequence has 3 tokens"),
    ),
    "max_length alone": (FIVE, {"max_length_q": 3}, ("max_length_q is 3", "longest sequence has 5 tokens")),
    # nothing there
    "no row": ((0, 4), {}, ("(0, 4)", "at least one token")),
    "no column": ((2, 0), {"mask": torch.ones(2, 0)}, ("(2, 0)", "at least one token")),
    "lengths, but no token": (
        FIVE,
        {"mask": torch.zeros(1, 5).long(), "packed_seq_lens": [5]},
        ("packed_seq_lens sum to 5", "0 real tokens"),
    ),
    "offsets, but no token": (
        FIVE,
        {"mask": torch.zeros(1, 5).long(), "cu_seq_lens_q": T([0, 5])},
        ("cu_seq_lens_q ends at 5", "0 tokens"),
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradiction_raises_and_names_both_sides(name: str) -> None:
    shape, arguments, message = CONTRADICTIONS[name]
    with pytest.raises(PackingError) as caught:
        read(shape, **arguments)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, FastpackError)
    for fragment in message:
        assert fragment in str(caught.value)


def test_a_block_mask_raises() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 5, 5, device="cpu")
    with pytest.raises(PackingError, match="is a BlockMask"):
        read(FIVE, mask)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "at least 1"),
        ([3, 0], "at least 1"),
        ([-2], "at least 1"),
        (T([[1, 2]]), "1-D"),
        (T(3), "1-D"),
        (T([1.0, 2.0]), "whole"),
    ],
)
def test_from_lengths_raises(lengths: Any, message: str) -> None:
    with pytest.raises(PackingError, match=message):
        PackedSeqLens.from_lengths(lengths)


@pytest.mark.parametrize(
    ("packed", "labels"),
    [
        (PackedSeqLens.from_lengths([2, 3]), torch.zeros(1, 4)),
        (read((2, 3), T([[1, 1, 0], [1, 1, 1]])), torch.zeros(2, 2)),  # would index past, or mask another token
        (read((2, 3), T([[1, 1, 0], [1, 1, 1]])), torch.zeros(2, 4)),
        (read((2, 3), torch.zeros(2, 3).long()), torch.zeros(2, 4)),
    ],
)
def test_labels_of_another_shape_raise(packed: PackedSeqLens, labels: Tensor) -> None:
    with pytest.raises(PackingError, match=rf"labels hold {labels.numel()} .* slots"):
        packed.mask_first_labels(labels)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.data())
def test_moving_one_boundary_never_goes_unnoticed(lengths: list[int], data: st.DataObject) -> None:
    """Two spellings of one batch, one of them with a token moved over to the neighbouring sequence."""
    at = data.draw(st.integers(0, len(lengths) - 2))
    moved = list(lengths)
    moved[at] += 1
    moved[at + 1] -= 1
    if moved[at + 1] == 0:
        del moved[at + 1]

    def spellings(sizes: list[int]) -> dict[str, Any]:
        sizes_T = T(sizes)
        numbers = torch.arange(len(sizes)).repeat_interleave(sizes_T)
        return {
            "packed_seq_lens": sizes,
            "cu_seq_lens_q": torch.cat([T([0]), sizes_T.cumsum(0)]),
            "cu_seq_lens_k": torch.cat([T([0]), sizes_T.cumsum(0)]),
            "seq_idx": numbers[None],
            "positions": torch.cat([torch.arange(n) for n in sizes])[None],
            "mask": numbers[None] + 1,
        }

    truth, other = spellings(lengths), spellings(moved)
    total = sum(lengths)
    names = data.draw(st.lists(st.sampled_from(sorted(truth)), min_size=2, max_size=2, unique=True))
    assert read((1, total), **{name: truth[name] for name in names}).lengths == tuple(lengths)
    if len(moved) == 1 and names[1] == "mask":
        return  # a mask of ones does not number anything
    with pytest.raises(PackingError):
        read((1, total), **{names[0]: truth[names[0]], names[1]: other[names[1]]})
