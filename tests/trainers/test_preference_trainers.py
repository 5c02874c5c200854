"""TRL's unmodified ``DPOTrainer``: patched equals stock padded, step by step, and no padding reaches the backbone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from backbone_calls import Calls
from dpo_cases import LOSSES, SMOOTHING, check_equal, dpo
from preferences import STEPS, logged

import fastpack


@pytest.mark.sample(3)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_dpo(loss_type: str, tmp_path: Path, calls: Calls) -> None:
    further = {
        "loss_type": [loss_type],
        **({"label_smoothing": SMOOTHING[loss_type]} if loss_type in SMOOTHING else {}),
    }
    stock = logged(dpo(tmp_path, patch=None, **further))
    assert not calls.all
    check_equal(logged(dpo(tmp_path, patch="trainer", **further)), stock)
    assert len(calls.all) == 2 * 2 * STEPS, "both layers of policy and reference, at each step"


OTHERS: dict[str, dict[str, Any]] = {
    "patched before": {"patch": "model"},
    "lora": {"lora": True},
    "lora, patched before": {"lora": True, "patch": "model"},
    "lora, checkpointing": {"lora": True, "gradient_checkpointing": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "precomputed": {"precompute_ref_log_probs": True},
    "lora, precomputed": {"lora": True, "precompute_ref_log_probs": True, "patch": "model"},
    "weighted": {"use_weighting": True},
    "length-desensitised": {"ld_alpha": 0.5},
    "several losses": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "accumulated": {"gradient_accumulation_steps": 2, "max_steps": STEPS},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OTHERS)
def test_dpo_otherwise(name: str, tmp_path: Path) -> None:
    further = {"patch": "trainer", **OTHERS[name]}
    stock = logged(dpo(tmp_path, **{**further, "patch": None}))
    check_equal(logged(dpo(tmp_path, **further)), stock)


@pytest.mark.parametrize("patch", [None, "trainer"])
def test_the_first_loss_is_ln_2(patch: str | None, tmp_path: Path) -> None:
    """Policy and reference are the same model at the first step."""
    first = logged(dpo(tmp_path, patch=patch, reference_seed=0))[0]["loss"]
    assert abs(first - math.log(2)) <= 1e-6


def test_only_real_tokens_reach_the_backbone(tmp_path: Path, calls: Calls) -> None:
    trainer = dpo(tmp_path, patch="trainer")
    seen: list[int] = []
    real: list[int] = []
    layer = trainer.model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0].shape[1]), with_kwargs=True)
    collate = trainer.data_collator

    def counted(examples: Any) -> Any:
        batch = collate(examples)
        assert bool((batch["attention_mask"] == 0).any()), "there is padding to leave out"
        real.append(int(batch["attention_mask"].sum()))
        return batch

    trainer.data_collator = counted
    trainer.train()
    assert seen == real[:STEPS]


def test_negative_control(tmp_path: Path) -> None:
    """With another order of the data, the comparison fails."""
    stock = logged(dpo(tmp_path, patch=None))
    with pytest.raises(AssertionError):
        check_equal(logged(dpo(tmp_path, patch="trainer", seed=7)), stock)


def test_patched_twice_and_undone(tmp_path: Path) -> None:
    """Policy and reference are patched and restored, also after ``train``, which wraps the model."""
    trainer = dpo(tmp_path, patch="trainer")
    forwards = [m.model.__dict__["forward"] for m in (trainer.model, trainer.ref_model)]
    fastpack.patch(trainer)
    assert [m.model.__dict__["forward"] for m in (trainer.model, trainer.ref_model)] == forwards
    trainer.train()
    assert fastpack.report(trainer).tier == "fast"
    assert fastpack.is_patched(trainer)
    assert fastpack.is_patched(trainer.ref_model)
    fastpack.unpatch(trainer)
    assert not fastpack.is_patched(trainer)
    assert not fastpack.is_patched(trainer.model)
    assert not fastpack.is_patched(trainer.ref_model)
    assert "forward" not in trainer.model.model.__dict__
