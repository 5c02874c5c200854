"""Counts of batches against counts by hand, and without waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_model

import fastpack
from fastpack.packing.buckets import Bucket
from fastpack.packing.inputs import read_packing
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.trainers.metrics.counting import count_batch
from fastpack.trainers.metrics.peaks import PEAKS, peak_of


def hand(lengths: list[int]) -> list[int]:
    """Count the pairs of a token and a token that it sees, in each window."""
    return [sum(min(at + 1, window or at + 1) for n in lengths for at in range(n)) for window in WINDOWS]


FILLED_UP = PackedSeqLens.from_lengths([3, 2]).bucketed(Bucket(8, 5, 2 + 1)).flattened()
WINDOWS = (None, 2)
BATCHES: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "right": ({"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])}, [3, 2], 8),
    "left": ({"attention_mask": torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]])}, [3, 1], 8),
    "positions under padding": (
        {"attention_mask": torch.tensor([[0, 1, 1, 1]]), "position_ids": torch.tensor([[1, 0, 1, 2]])},
        [3],
        4,
    ),
    "nothing": ({"attention_mask": torch.zeros(2, 3)}, [], 6),
    "numbered mask": ({"attention_mask": torch.tensor([[1, 1, 2, 2], [1, 2, 2, 0]])}, [2, 2, 1, 2], 8),
    "several packed rows": ({"position_ids": torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])}, [3, 1, 3], 8),
    "filled up": ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])}, [3, 2], 8),
    "offsets": ({"cu_seq_lens_q": torch.tensor([0, 3, 3, 8, 8])}, [3, 5], 8),
    "numbers": ({"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])}, [3, 2, 3], 8),
    "lengths": ({"packed_seq_lens": [3, 2, 3]}, [3, 2, 3], 8),
    "read": ({"packed_seq_lens": PackedSeqLens.from_lengths([3, 2, 3])}, [3, 2, 3], 8),
    "read, in a bucket": ({"packed_seq_lens": PackedSeqLens.from_lengths([3, 5]).bucketed()}, [3, 5], 8),
    "read, with bucket padding": ({"packed_seq_lens": FILLED_UP, "position_ids": FILLED_UP.position_ids}, [3, 2], 8),
    "filled up, read": (
        {
            "packed_seq_lens": PackedSeqLens.from_lengths([3, 2, 1, 1, 1]),
            "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]]),
        },
        [3, 2],
        8,
    ),
    "plain": ({"input_ids": torch.ones(2, 4, dtype=torch.long)}, [4, 4], 8),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_by_hand(kind: str) -> None:
    batch, lengths, slots = BATCHES[kind]
    shape = next((v.shape for k, v in batch.items() if k in ("attention_mask", "position_ids", "input_ids")), (1, 8))
    ids = torch.ones(shape, dtype=torch.long)
    counts = count_batch({"input_ids": ids, **batch}, WINDOWS)
    assert (int(counts.real), counts.slots) == (sum(lengths), slots)
    assert [int(n) for n in counts.pairs] == hand(lengths)
    assert counts.trained is None
    labels = ids.masked_fill(batch["attention_mask"] == 0, -100) if "attention_mask" in batch else ids
    if not kind.startswith("filled up"):
        labels = labels if kind != "read, with bucket padding" else ids.index_fill(1, torch.arange(5, 8), -100)
        trained = count_batch({"input_ids": ids, "labels": labels, **batch}).trained
        assert trained is not None
        assert int(trained) == sum(lengths) - len(lengths)
    embeds = {"inputs_embeds": torch.ones(*shape, 5), **{k: v for k, v in batch.items() if k != "input_ids"}}
    assert int(count_batch(embeds, WINDOWS).real) == sum(lengths)


@pytest.mark.parametrize("kind", ["padded", "flattened", "numbered", "offsets", "packed_seq_lens"])
def test_counting_waits_for_nothing(kind: str) -> None:
    """On tensors without data nothing can be read; the one place that reads fails there."""
    packed = PackedSeqLens.from_lengths([9, 7])
    with torch.device("meta"):
        ids = torch.ones(2, 8, dtype=torch.long)
        flat = torch.ones(1, 16, dtype=torch.long)
        batch: dict[str, Any] = {
            "padded": {"input_ids": ids, "attention_mask": ids, "labels": ids},
            "flattened": {"input_ids": flat, "position_ids": flat, "labels": flat},
            "numbered": {"input_ids": flat, "seq_idx": flat, "shift_labels": flat},
            "offsets": {"input_ids": flat, "cu_seq_lens_q": flat[0, :4], "labels": flat},
            "packed_seq_lens": {
                "input_ids": flat,
                "packed_seq_lens": packed,
            },
        }[kind]
    counts = count_batch(batch, WINDOWS)
    assert counts.slots == 16
    for count in (counts.real, *counts.pairs):
        if isinstance(count, torch.Tensor):
            with pytest.raises(RuntimeError, match="meta"):
                int(count)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]],
        [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
        [[0, 1, 1, 1, 0], [1, 0, 0, 0, 0]],
        [[1, 1, 2, 2, 0], [0, 1, 2, 2, 2]],
        [[0, 0, 0, 0, 0], [1, 1, 1, 1, 0]],
    ],
    ids=["right", "left", "both", "segments", "a row of padding"],
)
def test_labels_at_padding(mask: list[list[int]], read: bool) -> None:
    """The count is the number of labels that a patched model's loss is a mean over."""
    model = fastpack.patch(tiny_model("llama"))
    ids = torch.arange(3, 13).view(2, 5)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.tensor(mask), "labels": ids}
    if read:
        batch["packed_seq_lens"] = read_packing((2, 5), ids.device, attention_mask=batch["attention_mask"])
    taken: list[int] = []
    stock = model.loss_function

    def watched(logits: Any, labels: Any, vocab_size: int, *, shift_labels: Any, **kwargs: Any) -> Any:
        taken.append(int(shift_labels.ne(-100).sum()))
        return stock(logits, labels, vocab_size, shift_labels=shift_labels, **kwargs)

    watched.__name__, watched.__module__ = stock.__name__, stock.__module__
    model.loss_function = watched
    model(**batch)
    trained = count_batch(batch).trained
    assert trained is not None
    assert [int(trained)] == taken


def test_peaks() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3") == peak_of("NVIDIA H200") == 989.4e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA L4") == 121e12
    assert peak_of("NVIDIA L40S") == 362e12
    assert peak_of("NVIDIA GeForce RTX 4090") == 165.2e12
    for other in ("4090 Laptop GPU", "4090 D", "3090 Ti", "4080 SUPER"):
        assert peak_of(f"NVIDIA GeForce RTX {other}") is None, other
    for part in ("NVIDIA A10-4Q", "GRID A100-40C", "NVIDIA A100-4-20C", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert peak_of(part) is None, part
    for name in ("NVIDIA A1000", "Tesla T4", "Tesla V100-SXM2-16GB", "AMD Instinct MI250X / MI250", "cpu"):
        assert peak_of(name) is None, name
    assert len({name for name, _ in PEAKS}) == len(PEAKS)
