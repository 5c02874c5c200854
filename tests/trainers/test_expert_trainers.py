"""TRL's SFT trainer, unmodified, on models with experts: the losses of the stock model, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import FAMILIES, expert_model, lora_config, plain
from op_checks import count_calls
from oracle import FLOAT32_BOUND, relative
from peft import PeftModel
from safetensors.torch import load_file
from sft_cases import config, losses, rows, tokenizer
from trl import SFTTrainer

import fastpack
from fastpack.layers import experts

STEPS = 5
WEIGHTS = 1e-3
"""The bound for weights after these steps: AdamW divides by small gradients."""


def trainer_of(model: Any, folder: Path, *, lora: bool, patch: str, **settings: Any) -> Any:
    """Return a trainer; ``patch`` is ``model``, ``trainer`` or empty for the stock model."""
    if patch == "model":
        fastpack.patch(model)
    trainer = SFTTrainer(
        model,
        args=config(folder, **{"max_steps": STEPS, "learning_rate": 3e-3, **settings}),
        train_dataset=rows(),
        processing_class=tokenizer(),
        peft_config=lora_config() if lora else None,
    )
    if patch == "trainer":
        fastpack.patch(trainer)
    return trainer


def check_losses(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == len(theirs) == len(set(theirs)) == STEPS
    assert ours == pytest.approx(theirs, rel=FLOAT32_BOUND)


@pytest.mark.parametrize("patch", ["model", "trainer"])
@pytest.mark.parametrize("feed", ["padded", "packing"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_lora_on_experts(
    model_type: str, feed: str, patch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapters that are saved have the stock format, and go into a stock model."""
    packing = {"packing": True, "max_length": 40} if feed == "packing" else {}
    stock = trainer_of(expert_model(model_type), tmp_path / "stock", lora=True, patch="")
    ours = trainer_of(expert_model(model_type), tmp_path / "ours", lora=True, patch=patch, **packing)
    calls = count_calls(monkeypatch, experts, "experts")
    mine = losses(ours)
    assert len(calls) == 2 * STEPS * (2 if ours.args.gradient_checkpointing else 1)
    assert all(call[index].lora is not None for call in calls for index in (3, 4))
    calls.clear()
    if feed == "padded":
        check_losses(mine, losses(stock))
    else:
        assert len(set(mine)) == STEPS
    assert not calls
    ours.save_model(tmp_path / "ours")
    stock.save_model(tmp_path / "stock")
    saved, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "stock"))
    assert {name: x.shape for name, x in saved.items()} == {name: x.shape for name, x in expected.items()}
    assert sum("experts" in name for name in saved) == 8
    if feed == "padded":
        assert max(relative(x, expected[name]) for name, x in saved.items()) <= WEIGHTS
    ids = torch.arange(3, 12)[None]
    again = PeftModel.from_pretrained(expert_model(model_type), tmp_path / "ours").eval()
    with torch.no_grad():
        expected_logits = ours.model.eval()(input_ids=ids).logits
        assert relative(again(input_ids=ids).logits, expected_logits) <= FLOAT32_BOUND
        assert relative(expert_model(model_type).eval()(input_ids=ids).logits, expected_logits) > 1e-3, "it trained"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_whole_models(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' weights train, and the balancing loss is part of the loss."""
    build = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    stock = trainer_of(expert_model(model_type, **build), tmp_path / "stock", lora=False, patch="")
    ours = trainer_of(expert_model(model_type, **build), tmp_path / "ours", lora=False, patch="trainer")
    calls = count_calls(monkeypatch, experts, "experts")
    mine = losses(ours)
    assert len(calls) == 2 * STEPS * (2 if ours.args.gradient_checkpointing else 1)
    check_losses(mine, losses(stock))
    theirs = dict(stock.model.named_parameters())
    start = dict(expert_model(model_type).named_parameters())
    for name, weight in plain(ours.model).named_parameters():
        assert relative(weight.detach(), theirs[name].detach()) <= WEIGHTS, name
        if name.endswith(("gate_up_proj", "down_proj")):
            assert relative(weight.detach(), start[name].detach()) > WEIGHTS, "it trained"


def test_the_comparison_sees_experts_that_do_not_train(tmp_path: Path) -> None:
    """The control: with the adapters of the experts frozen, losses differ."""
    results = []
    for frozen in (False, True):
        trainer = trainer_of(expert_model("gpt_oss"), tmp_path, lora=True, patch="trainer")
        if frozen:
            for name, parameter in trainer.model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and "experts" not in name)
        results.append(losses(trainer))
    assert results[0][0] == results[1][0]
    assert abs(results[0][-1] / results[1][-1] - 1) > 10 * FLOAT32_BOUND
