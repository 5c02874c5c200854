"""GRPO, RLOO and distillation: a batch over the budget is split inside the step, and the step stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experimental_trainers import distillation
from tiny import tiny_model
from trainer_cases import Gradients, furthest, grpo, rloo

import fastpack
from fastpack.errors import PatchError
from fastpack.patching.options import TokenBudget
from fastpack.trainers.prompt_groups import split_units

BUDGET = 45
BOUND = 1e-5
SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{loss: (grpo, {"loss_type": loss}) for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")},
    "old log-probs": (grpo, {"num_iterations": 2}),
    "sequence level": (grpo, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "rloo": (rloo, {}),
    "distillation": (distillation, SPLIT),
    "distillation, forward KL": (distillation, {**SPLIT, "beta": 0.0}),
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
    layers = Layers(trainer)
    trainer.train()
    assert len(ours.steps) == len(theirs.steps) == 2
    for mine, its in zip(ours.steps, theirs.steps, strict=True):
        assert furthest(mine, its) <= BOUND
    weights = trainer.compute_loss.spec
    assert weights.pieces > weights.batches == 4
    assert max(layers.sizes) <= BUDGET
    assert len(layers.sizes) == weights.pieces
    for mine, its in zip(trainer.state.log_history, stock.state.log_history, strict=True):
        assert abs(mine.get("loss", 0.0) - its.get("loss", 0.0)) <= 1e-6


class Layers:
    """The number of tokens in each training forward of the first layer."""

    def __init__(self, trainer: Any) -> None:
        self.sizes: list[int] = []
        trainer.model.model.layers[0].register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.sizes.append(args[0].shape[1])


@pytest.mark.parametrize("budget", [70, 45])
@pytest.mark.parametrize("make", [grpo, rloo])
def test_completions_of_one_prompt_stay_together(make: Any, budget: int, tmp_path: Path) -> None:
    """A prompt counts once in a piece; with the smaller budget, some prompts are in two pieces."""
    further = {"num_generations": 8, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    stock = fastpack.patch(make(tmp_path, **further))
    theirs = Gradients(stock)
    stock.train()
    layers: list[Layers] = []
    for sharing in (None, "auto"):
        trainer = fastpack.patch(make(tmp_path, **further), max_tokens=budget, share_prefixes=sharing)
        ours = Gradients(trainer)
        layers.append(Layers(trainer))
        trainer.train()
        for mine, its in zip(ours.steps, theirs.steps, strict=True):
            assert furthest(mine, its) <= BOUND
        assert max(layers[-1].sizes) <= budget
    apart, together = layers
    assert sum(together.sizes) < sum(apart.sizes)
    assert len(together.sizes) < len(apart.sizes)


def test_prompts_run_once_if_their_completions_fit() -> None:
    model = fastpack.patch(tiny_model("llama"), share_prefixes="auto")
    prompts = [[0, 7, 8, 9], [5, 6, 7, 8], [0, 7, 8, 9], [5, 6, 7, 8], [0, 0, 0, 9]]
    ids = torch.tensor(prompts)
    batch = {"prompt_ids": ids, "prompt_mask": (ids > 0).long()}
    assert split_units(model, batch, [5, 6, 7, 8, 9], 12) == [[0, 2], [1, 3], [4]]
    assert split_units(model, batch, [5, 6, 7, 8, 9], 100) == [[0, 1, 2, 3, 4]]
    assert sorted(split_units(model, batch, [5, 6, 7, 8, 9], 8)) == [[0], [1], [2], [3], [4]], "4 + 2 + 4 is over 8"
    assert len(split_units(model, batch, [5, 6, 7, 8, 9], 12, parts=4)) == 4, "as many as another rank has"
    plain = fastpack.patch(tiny_model("llama"))
    apart = split_units(plain, batch, [5, 6, 7, 8, 9], 12)
    assert max(len(units) for units in apart) <= 2
    assert [1, 3] not in apart, "14 tokens where nothing is shared"
    assert split_units(model, {**batch, "pixel_values": ids}, [5, 6, 7, 8, 9], 12) == apart


def test_dropout_counts_each_prompt(tmp_path: Path) -> None:
    """With dropout nothing is shared, so that each copy of a prompt counts."""
    model = fastpack.patch(tiny_model("llama", attention_dropout=0.1).train(), share_prefixes="auto")
    ids = torch.tensor([[7, 8, 9]] * 3)
    batch = {"prompt_ids": ids, "prompt_mask": torch.ones_like(ids)}
    assert len(split_units(model, batch, [4, 4, 4], 8)) == 2
    assert len(split_units(model.eval(), batch, [4, 4, 4], 8)) == 1


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
