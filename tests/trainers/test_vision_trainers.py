"""TRL's trainers on images: a patched model trains as the stock one, step by step, and only on real tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import concatenate_datasets
from other_trainer_cases import check_step
from peft import LoraConfig
from preferences import logged
from prefix_cases import sharing
from vision_trainers import ROWS, STEPS, counted_tokens, examples, policy, trainer_of

import fastpack

Trained = tuple[list[dict[str, float]], list[tuple[int, int]]]
BOUND = 1e-5
MODELS = (
    "qwen3_vl",
    "qwen2_5_vl",
    "gemma3",
    "gemma4",
    "llava",
    "internvl",
    "smolvlm",
    "mistral3",
    "lfm2_vl",
    "qwen3_5",
)
ONE_EACH = (1,)
"""The images of each row for GRPO and RLOO, which slice images in a layout of their own for each kind of model."""


def trained(kind: str, model_type: str, folder: Path, *, patch: bool, **further: Any) -> Trained:
    """Return the logs of each step, and the counts of :func:`counted_tokens`."""
    model = policy(model_type)
    if patch:
        fastpack.patch(model)
    trainer = trainer_of(kind, model, folder, **further)
    with counted_tokens(model) as counts:
        return logged(trainer), counts


def check_equal(kind: str, model_type: str, folder: Path, **further: Any) -> None:
    ours, tokens = trained(kind, model_type, folder, patch=True, **further)
    stock, slots = trained(kind, model_type, folder, patch=False, **further)
    assert len(ours) == len(stock) >= 2
    for mine, its in zip(ours, stock, strict=True):
        assert abs(mine["loss"] - its["loss"]) <= BOUND * max(abs(its["loss"]), 1e-2)
        assert check_step(mine, its) >= 2
    assert tokens
    assert all(seen == real for seen, real in tokens), "padding reached the text model"
    assert len(tokens) == len(slots)
    assert any(seen > real for seen, real in slots), "stock runs on padding"


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", MODELS)
def test_sft(model_type: str, tmp_path: Path) -> None:
    check_equal("sft", model_type, tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "model_type", [name for name in MODELS if name != "lfm2_vl"]
)  # TRL asks its processor for tiles
def test_grpo(model_type: str, tmp_path: Path) -> None:
    check_equal("grpo", model_type, tmp_path, data=examples("grpo", images=ONE_EACH))


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", ["qwen3_vl", "llava", "gemma4", "lfm2_vl"])
def test_grpo_with_several_images_in_a_row_and_several_forwards(model_type: str, tmp_path: Path) -> None:
    data = examples("grpo", images=(2, 1, 0, 1))
    check_equal("grpo", model_type, tmp_path, data=data, num_iterations=2, max_steps=4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", ["internvl", "qwen2_5_vl"])
def test_rloo(model_type: str, tmp_path: Path) -> None:
    check_equal("rloo", model_type, tmp_path, data=examples("rloo", images=ONE_EACH))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "smolvlm"])
def test_preferences(kind: str, model_type: str, tmp_path: Path) -> None:
    check_equal(kind, model_type, tmp_path)


def test_a_patched_trainer_with_its_reference(tmp_path: Path) -> None:
    stock = logged(trainer_of("dpo", policy("qwen3_vl"), tmp_path))
    ours = logged(fastpack.patch(trainer_of("dpo", policy("qwen3_vl"), tmp_path)))
    assert all(check_step(mine, its) >= 2 for mine, its in zip(ours, stock, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_lora_and_checkpointing_as_trl_sets_them_up(kind: str, model_type: str, tmp_path: Path) -> None:
    """LoRA on the text model and the tower; DPO's reference is the model without it."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "qkv", "down_proj"])
    data = examples(kind, images=ONE_EACH)
    check_equal(kind, model_type, tmp_path, data=data, peft_config=lora, gradient_checkpointing=True)


def test_a_batch_without_images_among_others(tmp_path: Path) -> None:
    model = policy("qwen3_vl")
    seen: list[str] = []
    model.model.visual.register_forward_pre_hook(lambda *_: seen.append("images"))
    data = concatenate_datasets([examples("sft", images=(0,)).select(range(ROWS)), examples("sft")])
    sequential = {"data": data, "train_sampling_strategy": "sequential"}
    fastpack.patch(model)
    trainer = trainer_of("sft", model, tmp_path, **sequential)
    ours = logged(trainer)
    stock, _ = trained("sft", "qwen3_vl", tmp_path, patch=False, **sequential)
    assert all(check_step(mine, its) >= 2 for mine, its in zip(ours, stock, strict=True))
    assert len(seen) == STEPS - 1


def test_other_pixels_give_other_losses(tmp_path: Path) -> None:
    """The control: the losses depend on the images."""
    ours, _ = trained("sft", "qwen3_vl", tmp_path, patch=True)
    other, _ = trained("sft", "qwen3_vl", tmp_path, patch=True, data=examples("sft", pixels=1))
    assert abs(ours[0]["loss"] - other[0]["loss"]) > 100 * BOUND * ours[0]["loss"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["grpo", "dpo", "rloo"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "llava", "gemma3"])
def test_images_and_prompts_in_common_run_once(kind: str, model_type: str, tmp_path: Path) -> None:
    data = examples(kind, images=ONE_EACH)
    model = fastpack.patch(policy(model_type), share_prefixes="auto")
    trainer = trainer_of(kind, model, tmp_path, data=data)
    with counted_tokens(model) as counts:
        ours = logged(trainer)
    stock, slots = trained(kind, model_type, tmp_path, patch=False, data=data)
    assert all(check_step(mine, its) >= 2 for mine, its in zip(ours, stock, strict=True))
    assert len(counts) == len(slots)
    assert sum(seen for seen, _ in counts) < 0.9 * sum(real for _, real in counts), "prompts run once"
    stats = sharing(model).stats
    assert stats.images_saved * 4 >= stats.images > 0
