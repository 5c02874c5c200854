"""TRL's trainers on two ranks with DDP and accelerate's FSDP2: each step's loss and gradients equal one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_trainers import FSDP2, STEPS, train, train_on_ranks, trainer_of
from ranks import Ranks

from fastpack.cli import trl_trains_on_cpu

WRAPS: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({}, "DistributedDataParallel"),
    "fsdp2": (FSDP2, "FSDP"),
}
pytestmark = pytest.mark.skipif(
    not (trl_trains_on_cpu() or torch.cuda.is_available()), reason="this TRL's loss needs a GPU"
)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, bool], list[tuple[float, float]]]:
    """The logs of the stock trainer in one process."""
    return {(kind, lora): train(trainer_of(kind, lora, 1, False)) for kind in ("sft", "dpo") for lora in (False, True)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_as_in_one_process(kind: str, lora: bool, wrap: str, alone: Any, ranks: Ranks) -> None:
    further, wrapper = WRAPS[wrap]
    checkpointing = {"gradient_checkpointing": True} if lora else {}
    for result in ranks.run(train_on_ranks, kind, lora, **checkpointing, **further):
        assert result["world"] == 2
        assert result["wrapped"].startswith(wrapper)
        assert (result["tier"], result["as_modules"], result["tier after"]) == ("fast", {}, "stock")
        assert len(result["logged"]) == STEPS
        for ours, stock in zip(result["logged"], alone[kind, lora], strict=True):
            assert ours == pytest.approx(stock, rel=3e-5 if ranks.backend == "gloo" else 1e-3)
    assert len(set(alone[kind, lora])) == STEPS, "it trains"
    assert alone[kind, lora][1] != pytest.approx(alone[kind, not lora][1], rel=1e-3), "the check sees another model"


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_fused_loss(lora: bool, wrap: str, alone: Any, ranks: Ranks) -> None:
    """Its metrics cover all ranks. If accelerate makes the head an FSDP unit of its own, TRL's loss runs."""
    further, _ = WRAPS[wrap]
    stock = ranks.run(train_on_ranks, "sft", lora, **further)
    for result, trls in zip(ranks.run(train_on_ranks, "sft", lora, loss="fused", **further), stock, strict=True):
        if wrap == "ddp":
            assert result["of loss"] == [f"loss: fused in {STEPS} micro-batches so far, with TRL's metrics"]
        else:
            assert "it carries hooks" in result["of loss"][-1]
        assert len(result["logged"]) == STEPS
        for ours, theirs in zip(result["logged"], alone["sft", lora], strict=True):
            assert ours == pytest.approx(theirs, rel=3e-5 if ranks.backend == "gloo" else 1e-3)
        for ours, theirs in zip(result["metrics"], trls["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=3e-5 if ranks.backend == "gloo" else 1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_auxiliary_loss_of_experts(steps: int, ranks: Ranks) -> None:
    """It is a mean over micro-batches and ranks, in the fused loss as in TRL's; the last run is the control."""
    experts = {"model_type": "mixtral", "router_aux_loss_coef": 0.5, "gradient_accumulation_steps": steps}
    experts["per_device_train_batch_size"] = 4 // steps
    stock, ours = (ranks.run(train_on_ranks, "sft", False, loss=loss, **experts) for loss in (None, "fused"))
    other = ranks.run(train_on_ranks, "sft", False, loss="fused", **{**experts, "router_aux_loss_coef": 0.45})
    bound = 3e-5 if ranks.backend == "gloo" else 1e-3
    for result, trls, control in zip(ours, stock, other, strict=True):
        assert result["of loss"] == [f"loss: fused in {steps * STEPS} micro-batches so far, with TRL's metrics"]
        assert all(entry[-1] > 0 for entry in trls["metrics"])
        for name in ("logged", "metrics"):
            for mine, theirs in zip(result[name], trls[name], strict=True):
                assert mine == pytest.approx(theirs, rel=bound)
        assert control["logged"][0] != pytest.approx(trls["logged"][0], rel=bound)
