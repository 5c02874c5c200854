"""Token budgets over images: tokens are counted after the processor, and images follow their rows in a split batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import Gradients, furthest, watch_sizes
from vision_trainers import EXAMPLES, examples, policy, trainer_of

import fastpack
from fastpack.data.lengths import lengths_of
from fastpack.errors import PackingError, PatchError
from fastpack.patching.options import TokenBudget
from fastpack.trainers.loss_units import LOSS_UNITS, piece

BUDGETS = {"sft": 60, "dpo": 110, "kto": 60}
OF_GENERATED = 60
BOUND = 1e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", BUDGETS)
@pytest.mark.parametrize("model_type", ["qwen3_vl", "smolvlm"])
def test_full_batches_with_the_tokens_of_images(kind: str, model_type: str, tmp_path: Path) -> None:
    trainer = trainer_of(kind, policy(model_type), tmp_path, max_steps=-1, num_train_epochs=1)
    collate, seen = trainer.data_collator, []

    def watched(rows: list[dict[str, Any]]) -> Any:
        seen.extend(row["prompt"][0]["content"] for row in rows)
        return collate(rows)

    lengths = lengths_of(trainer.train_dataset, collator=collate)
    fastpack.patch(trainer, max_tokens=BUDGETS[kind])
    trainer.data_collator = watched
    sizes = watch_sizes(trainer)
    trainer.train()
    assert max(sizes) <= BUDGETS[kind]
    assert sum(sizes) == sum(lengths)
    assert sum(lengths) / len(sizes) > 0.7 * BUDGETS[kind], "batches are full"
    assert len(seen) == len(set(seen)) == EXAMPLES


def test_uneven_micro_batches_give_the_gradient_of_one_batch(tmp_path: Path) -> None:
    steps = []
    for budget in (BUDGETS["sft"], 10_000):
        trainer = trainer_of("sft", policy("qwen3_vl"), tmp_path, max_steps=1, gradient_accumulation_steps=100)
        fastpack.patch(trainer, max_tokens=budget)
        result = Gradients(trainer)
        trainer.train()
        steps.append(result.steps)
    assert furthest(steps[0][0], steps[1][0]) <= BOUND


def test_a_length_column_spares_the_processor(tmp_path: Path) -> None:
    data = examples("sft").add_column("length", [30] * EXAMPLES)
    trainer = trainer_of("sft", policy("llava"), tmp_path, data=data)
    trainer.data_collator = None
    assert lengths_of(data, collator=trainer.data_collator) == [30] * EXAMPLES
    with pytest.raises(PackingError, match="none of which counts"):
        lengths_of(examples("sft"))
    with pytest.raises(PackingError, match="without an attention_mask"):
        lengths_of(examples("sft"), collator=lambda _: {"input_ids": torch.ones(1, 3)})


SPLIT = {"qwen3_vl": (2, 1, 0, 1), "llava": (2, 1, 0, 1), "smolvlm": (1,)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", SPLIT)
def test_images_follow_their_rows_when_a_generated_batch_splits(model_type: str, tmp_path: Path) -> None:
    results = []
    for budget in (None, OF_GENERATED):
        data = examples("grpo", images=SPLIT[model_type])
        # with a learning rate, Adam makes a step of the rounding in gradients that are 0, such as key biases have
        trainer = trainer_of("grpo", policy(model_type), tmp_path, data=data, learning_rate=0.0)
        fastpack.patch(trainer, max_tokens=budget)
        results.append(Gradients(trainer))
        trainer.train()
    weights = trainer.compute_loss.spec
    assert weights.pieces > weights.batches
    for ours, whole in zip(results[1].steps, results[0].steps, strict=True):
        assert furthest(ours, whole) <= BOUND


def test_a_piece_has_the_images_of_its_rows() -> None:
    """Rows by number would take the images of other rows: there are as many images as rows."""
    pixels = torch.arange(4)[:, None]
    batch = {"input_ids": torch.zeros(4, 3), "num_images": [2, 0, 1, 1], "pixel_values": pixels, "extra": None}
    part = piece(batch, [0, 2], LOSS_UNITS["GRPOTrainer"])
    assert part["pixel_values"].tolist() == [[0], [1], [2]]
    assert part["num_images"] == [2, 1]
    assert pixels.index_select(0, torch.tensor([0, 2])).tolist() != part["pixel_values"].tolist()
    with pytest.raises(PackingError, match="which row they belong to"):
        piece({"input_ids": torch.zeros(4, 3), "pixel_values": pixels}, [0, 2], LOSS_UNITS["SFTTrainer"])


@pytest.mark.parametrize(
    ("kind", "budget", "further", "match"),
    [
        ("sft", TokenBudget(60, same_steps=True), {}, "which row its images belong to"),
        ("dpo", TokenBudget(60, too_long="truncate"), {}, "would cut the tokens of images"),
        ("kto", TokenBudget(60), {"loss_type": "kto"}, "completions of other rows"),
    ],
)
def test_refused(kind: str, budget: TokenBudget, further: dict[str, Any], match: str, tmp_path: Path) -> None:
    trainer = trainer_of(kind, policy("llava"), tmp_path, **further)
    with pytest.raises(PatchError, match=match):
        fastpack.patch(trainer, max_tokens=budget)
    assert fastpack.report(trainer.model).tier == "stock", "nothing was changed"


def test_an_example_over_the_budget_is_named_with_its_image_tokens(tmp_path: Path) -> None:
    with pytest.raises(PackingError, match=r"example \d+ has \d+ tokens, more than max_tokens=20"):
        fastpack.patch(trainer_of("sft", policy("llava"), tmp_path), max_tokens=20)
