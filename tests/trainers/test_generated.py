"""GRPO and RLOO: a batch over the budget is split inside the step, and the step stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model
from trainer_cases import Gradients, furthest, grpo, rloo

import fastpack
from fastpack.errors import PatchError
from fastpack.patching.options import TokenBudget

BUDGET = 45
BOUND = 1e-5


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{loss: (grpo, {"loss_type": loss}) for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")},
    "old log-probs": (grpo, {"num_iterations": 2}),
    "sequence level": (grpo, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "rloo": (rloo, {}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_split_inside_the_step(name: str, tmp_path: Path) -> None:
    make, further = CASES[name]
    stock = fastpack.patch(make(tmp_path, **further))
    theirs = Gradients(stock)
    stock.train()
    trainer = fastpack.patch(make(tmp_path, **further), max_tokens=BUDGET)
    ours = Gradients(trainer)
    sizes: list[int] = []
    trainer.model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(args[0].shape[1]) if torch.is_grad_enabled() else None,
        with_kwargs=True,
    )
    trainer.train()
    assert len(ours.steps) == len(theirs.steps) == 2
    for mine, its in zip(ours.steps, theirs.steps, strict=True):
        assert furthest(mine, its) <= BOUND
    weights = trainer.compute_loss.spec
    assert weights.pieces > weights.batches == 4
    assert max(sizes) <= BUDGET
    assert len(sizes) == weights.pieces
    for mine, its in zip(trainer.state.log_history, stock.state.log_history, strict=True):
        assert abs(mine.get("loss", 0.0) - its.get("loss", 0.0)) <= 1e-6


def test_negative_control(tmp_path: Path) -> None:
    """Without weights on the pieces' means, the gradient differs."""
    trainers = [fastpack.patch(grpo(tmp_path, loss_type="grpo"), max_tokens=BUDGET) for _ in range(2)]
    weights = trainers[1].compute_loss.spec
    weights.loss_unit = weights.loss_unit.__class__("nothing", lambda _: 1)
    result = [Gradients(trainer) for trainer in trainers]
    for trainer in trainers:
        trainer.train()
    assert furthest(result[0].steps[0], result[1].steps[0]) > 100 * BOUND


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="threshold from the whole batch"):
        fastpack.patch(grpo(tmp_path, top_entropy_quantile=0.5), max_tokens=BUDGET)
    with pytest.raises(PatchError, match="it always keeps its own steps"):
        fastpack.patch(rloo(tmp_path), max_tokens=TokenBudget(BUDGET, same_steps=True))


@pytest.mark.parametrize("make", [grpo, rloo])
def test_experts_are_balanced_once_a_micro_batch(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = tiny_model("mixtral", attn_implementation="sdpa", router_aux_loss_coef=0.1)
    monkeypatch.setattr("trainer_cases.policy", lambda: experts)
    with pytest.raises(PatchError, match=r"each piece: set router_aux_loss_coef=0\.0, or leave max_tokens out"):
        fastpack.patch(make(tmp_path), max_tokens=BUDGET)
    assert fastpack.report(experts).tier == "stock", "nothing was changed"
    unbalanced = make(tmp_path, router_aux_loss_coef=0.0)
    assert fastpack.patch(unbalanced, max_tokens=BUDGET) is unbalanced
