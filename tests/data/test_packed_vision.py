"""The collator of packed rows with images: it makes what each row alone is, and says what is wrong with a row."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import fastpack
from fastpack import PackedVisionCollator, PackingError, TokenBudgetSampler
from fastpack.data.lengths import lengths_of
from fastpack.exactness.image_text import build_image_text, flat_of, samples

BOUND = 1e-5
TYPES = (
    "qwen3_vl",
    "qwen2_5_vl",
    "llava",
    "internvl",
    "smolvlm",
    "mistral3",
    "lfm2_vl",
    "glm4v",
    "qwen3_5",
)


def logits_of(model: Any, batch: dict[str, Any]) -> Tensor:
    logits: Tensor = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return logits[0].detach()


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_packed_batch_is_each_row_alone(model_type: str) -> None:
    model = build_image_text(model_type)
    rows = samples(model)
    alone = torch.cat([logits_of(model, row) for row in rows])
    batch = PackedVisionCollator(model)(rows)
    lengths = [row["input_ids"].shape[1] for row in rows]
    assert batch["packed_seq_lens"].lengths == (*lengths,)
    assert batch["input_ids"].shape == batch["labels"].shape == (1, sum(lengths))
    assert torch.equal(batch["position_ids"], flat_of(model, rows)["position_ids"])
    off = (logits_of(fastpack.patch(model), batch) - alone).abs().max() / alone.abs().max()
    assert off <= BOUND
    one_sequence = {**batch, "packed_seq_lens": [sum(lengths)], "position_ids": None}  # the control
    if batch["position_ids"].ndim == 3:
        one_sequence["position_ids"] = batch["position_ids"][1:].contiguous()
        one_sequence["attention_mask"] = torch.ones_like(batch["input_ids"])
    off = (logits_of(model, one_sequence) - alone).abs().max() / alone.abs().max()
    assert off > 3 * BOUND


def test_labels_and_columns() -> None:
    model = build_image_text("qwen3_vl")
    first, second = samples(model)[:2]
    length = first["input_ids"].shape[1]
    as_lists = {**first, "input_ids": first["input_ids"].tolist(), "attention_mask": [[1] * length]}
    mask = torch.zeros(second["input_ids"].shape[1], dtype=torch.long)
    mask[-2:] = 1
    padded = {name: torch.nn.functional.pad(first[name], (2, 0)) for name in ("input_ids", "mm_token_type_ids")}
    padded |= {"attention_mask": torch.nn.functional.pad(torch.ones(1, length).long(), (2, 0))}
    collate = pickle.loads(pickle.dumps(PackedVisionCollator(model)))
    batch = collate([as_lists, {**second, "completion_mask": mask}, {**first, **padded}])
    assert batch["packed_seq_lens"].lengths == (length, len(mask), length)
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert torch.equal(ids[:length], first["input_ids"][0])
    assert torch.equal(ids[-length:], ids[:length])
    assert labels[:length].tolist() == [-100, *ids[1:length].tolist()]
    assert labels[length:-length].tolist() == [-100] * (len(mask) - 2) + ids[-length - 2 : -length].tolist()
    assert torch.equal(batch["mm_token_type_ids"][0, -length:], first["mm_token_type_ids"][0])
    assert len(batch["image_grid_thw"]) == 3


def test_the_collator_keeps_no_weights() -> None:
    model = fastpack.patch(build_image_text("qwen2_5_vl"))
    collate = PackedVisionCollator(model)
    assert len(pickle.dumps(collate)) < 50_000 < sum(p.numel() for p in model.parameters())
    assert not list(collate._positions.parameters())


def test_batches_of_a_token_budget() -> None:
    model = build_image_text("qwen2_5_vl")
    rows = [row for seed in range(4) for row in samples(model, seed)]
    lengths = lengths_of(rows)
    assert lengths == [row["input_ids"].shape[1] for row in rows]
    sampler = TokenBudgetSampler(lengths, 30)
    loader: Any = DataLoader(rows, batch_sampler=sampler, collate_fn=PackedVisionCollator(model))
    fastpack.patch(model)
    batches = list(loader)
    assert len(batches) == len(sampler) < len(rows)
    assert sum(batch["packed_seq_lens"].total_tokens for batch in batches) == sum(lengths)
    for batch in batches:
        assert batch["packed_seq_lens"].total_tokens <= 30
        assert model(**batch).loss.isfinite()


def test_text_alone() -> None:
    model = build_image_text("qwen3_vl")
    text = [row for row in samples(model) if "pixel_values" not in row] * 2
    batch = PackedVisionCollator(model)(text)
    assert "pixel_values" not in batch
    assert (batch["position_ids"] == batch["position_ids"][:1]).all()
    assert logits_of(fastpack.patch(model), batch).isfinite().all()


def bad(change: dict[str, Any], drop: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    rows = samples(build_image_text("qwen3_vl"))
    changed = {name: value for name, value in {**rows[0], **change}.items() if name not in drop}
    return [rows[1], changed]


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([], "no example"),
        (bad({}, ("mm_token_type_ids",)), "example 1 of the batch has no mm_token_type_ids"),
        (bad({"image_grid_thw": torch.tensor([[1, 4, 6]])}), "from example 1 of the batch .*may not match the sizes"),
        (bad({}, ("image_grid_thw",)), "from example 1 of the batch .*may not match the sizes"),
        (bad({"input_ids": torch.ones(2, 4).long()}), "has 2 rows"),
        (bad({"mm_token_type_ids": torch.zeros(3).long()}), "3 entries in mm_token_type_ids"),
        (bad({}, ("input_ids",)), "no input_ids"),
        (bad({"labels": [1.5, 2.0]}), "labels"),
        (bad({"image_token_pooling": torch.zeros(2, 4)}), "unknown how a processor joins"),
    ],
)
def test_a_bad_row_is_named(rows: list[dict[str, Any]], match: str) -> None:
    with pytest.raises(PackingError, match=match):
        PackedVisionCollator(build_image_text("qwen3_vl"))(rows)


def test_token_types_of_some_examples() -> None:
    model = build_image_text("llava")
    first, second = samples(model)[:2]
    with pytest.raises(PackingError, match="others don't"):
        PackedVisionCollator(model)([{**first, "token_type_ids": torch.zeros_like(first["input_ids"])}, second])
