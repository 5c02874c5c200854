"""Un-padding and re-padding, labels, copies, devices, and values that are kept with the lengths."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from typing import Any

import pytest
import torch
from packing_cases import LENGTHS, check, read, trl
from torch import Tensor

from fastpack.ops.loss import IGNORE_INDEX
from fastpack.packing.inputs import read_packing
from fastpack.packing.seqlens import PackedSeqLens

MASKS = {
    "right": [[1, 1, 1, 0], [1, 0, 0, 0]],
    "left": [[0, 1, 1, 1], [0, 0, 0, 1]],
    "segments": [[1, 1, 2, 0], [0, 1, 2, 2]],
    "a row of padding": [[0, 0, 0, 0], [1, 1, 1, 1]],
    "no padding": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "no token": [[0, 0, 0, 0], [0, 0, 0, 0]],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_round_trip_and_its_gradient(mask: list[list[int]]) -> None:
    """Values at padding, NaN included, reach neither the result nor a gradient."""
    real = (torch.tensor(mask) != 0)[..., None]
    packed = read((2, 4), torch.tensor(mask))
    x = torch.randn(2, 4, 3, 2).where(real[..., None], torch.tensor(float("nan"))).requires_grad_()
    tokens = packed.unpad(x)
    assert tokens.shape == (1, packed.total_tokens, 3, 2)
    out = packed.repad(tokens.square())
    assert out.shape == x.shape
    assert torch.equal(out, x.detach().square().where(real[..., None], torch.zeros(())))
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    if not packed.padding.is_empty:
        assert torch.equal(x.grad, (2 * x.detach() * weight).where(real[..., None], torch.zeros(())))
    assert torch.equal(packed.padding.repad_flat(tokens[0].detach()), packed.repad(tokens.detach()).flatten(0, 1))


def test_a_batch_without_a_token_gives_zeros_and_zero_gradients() -> None:
    """One throw-away token runs, so that every rank has a graph; not even its NaN comes back."""
    packed = read((2, 3), torch.zeros(2, 3, dtype=torch.long))
    check(packed, (1,))
    assert packed.padding.is_empty
    weight = torch.ones(5, requires_grad=True)
    out = packed.repad(packed.unpad(torch.ones(2, 3, 5)) * weight * float("inf") - float("inf"))
    assert torch.equal(out, torch.zeros(2, 3, 5))
    out.sum().backward()
    assert weight.grad is not None
    finite = torch.ones(5, requires_grad=True)
    packed.repad(packed.unpad(torch.ones(2, 3, 5)) * finite).sum().backward()
    assert torch.equal(finite.grad, torch.zeros(5))


def test_repad_without_a_batch_leaves_tokens_packed() -> None:
    packed = PackedSeqLens.from_lengths([2, 3])
    x = torch.randn(1, 5, 4)
    assert packed.repad(x) is x
    assert packed.padding.repad_flat(x[0]).shape == (5, 4)
    assert torch.equal(packed.unpad(x), x)


@pytest.mark.parametrize(
    ("mask", "positions", "ignored"),
    [
        (None, [[0, 1, 0, 0, 1, 2]], [0, 2, 3]),
        ([[1, 1, 2, 2, 2, 0]], None, [0, 2]),
        ([[0, 0, 1, 1], [1, 1, 1, 0]], None, [2, 4]),
        ([[0, 0], [1, 1]], None, [2]),
        ([[0, 0], [0, 0]], None, []),
    ],
)
def test_first_labels_are_ignored_on_a_copy(
    mask: list[list[int]] | None, positions: list[list[int]] | None, ignored: list[int]
) -> None:
    shape = (len(mask), len(mask[0])) if mask is not None else (1, 6)
    packed = read(
        shape,
        None if mask is None else torch.tensor(mask),
        None if positions is None else torch.tensor(positions),
    )
    labels = torch.arange(1, 1 + shape[0] * shape[1]).reshape(shape)
    before = labels.clone()
    masked = packed.mask_first_labels(labels)
    expected = before.reshape(-1).clone()
    expected[ignored] = IGNORE_INDEX
    assert torch.equal(masked.reshape(-1), expected)
    assert masked.shape == labels.shape
    assert torch.equal(labels, before), "the batch's own labels changed"


def test_to_another_device() -> None:
    packed = read((2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert packed.to("cpu") is packed
    assert packed.to(None) is packed, "as a tensor is"
    moved = packed.to("meta", non_blocking=True)
    assert {t.device.type for t in (moved.cu_seqlens, moved.position_ids, moved.padding.indices, moved.seq_idx)} == {
        "meta"
    }
    assert (moved.lengths, moved.padding.batch_shape) == (packed.lengths, packed.padding.batch_shape)
    assert PackedSeqLens.from_lengths([2]).to("meta").padding.indices is None
    assert read((1, 2), torch.zeros(1, 2, dtype=torch.long)).to("meta").padding.is_empty


def test_accelerate_moves_it_with_the_batch() -> None:
    operations = pytest.importorskip("accelerate.utils.operations")
    batch = {"input_ids": torch.zeros(1, 5), "packed_seq_lens": PackedSeqLens.from_lengths([2, 3])}
    moved = operations.send_to_device(batch, torch.device("meta"), non_blocking=True)
    assert moved["packed_seq_lens"].cu_seqlens.device.type == "meta"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_and_pickles(duplicate: Any) -> None:
    """Also once a block mask, which holds closures, and other derived values are kept with it."""
    packed = read((2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]]))
    packed.memo("mask", lambda: lambda: packed)
    assert packed.runs
    assert packed.seq_idx.shape == (1, 5)
    twin = duplicate(packed)
    check(twin, (2, 3))
    assert torch.equal(twin.padding.indices, packed.padding.indices)
    assert twin.padding.batch_shape == (2, 3)
    assert twin.memo("mask", lambda: "rebuilt") == "rebuilt"
    assert packed.memo("mask", lambda: "rebuilt") != "rebuilt", "the original lost what it kept"


def test_it_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PackedSeqLens.from_lengths([1]).lengths = (2,)  # type: ignore[misc]


def test_memo_builds_once_a_key() -> None:
    packed = PackedSeqLens.from_lengths([2])
    built: list[str] = []
    for key in ("a", "b", "a", "a"):
        assert packed.memo(key, lambda key=key: built.append(key) or key) == key
    assert built == ["a", "b"]


def test_chunks() -> None:
    packed = PackedSeqLens.from_lengths([5, 1, 8])
    chunks = packed.chunks(4)
    assert (chunks.begin.tolist(), chunks.end.tolist()) == ([0, 4, 5, 6, 10], [4, 5, 6, 10, 14])
    assert packed.chunks(4) is chunks
    assert packed.chunks(2) is not chunks


@pytest.mark.gpu
def test_reading_a_batch_waits_for_the_gpu_once() -> None:
    batch = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in trl(LENGTHS).items()}
    positions = batch.pop("positions")
    mask = torch.ones_like(positions)
    ids = torch.zeros(1, sum(LENGTHS), 4, device="cuda")
    labels = torch.zeros_like(positions)
    read_packing(tuple(positions.shape), ids.device, attention_mask=mask, position_ids=positions, packing=batch)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            packed = read_packing(
                tuple(positions.shape), ids.device, attention_mask=mask, position_ids=positions, packing=batch
            )
        assert len([w for w in caught if "synchron" in str(w.message)]) == 1, [str(w.message) for w in caught]
        torch.cuda.set_sync_debug_mode("error")
        packed.repad(packed.unpad(ids))
        packed.mask_first_labels(labels)
        assert packed.seq_idx.is_cuda
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert packed.lengths == LENGTHS


def test_a_part_cuts_sequences_off() -> None:
    packed = PackedSeqLens.from_lengths([3, 1, 4])
    parts = {(0, 8): (3, 1, 4), (1, 8): (2, 1, 4), (3, 4): (1,), (2, 7): (1, 1, 3), (5, 6): (1,)}
    assert {bounds: packed.part(*bounds).lengths for bounds in parts} == parts
    assert packed.part(2, 7).cu_seqlens.tolist() == [0, 1, 2, 5]
