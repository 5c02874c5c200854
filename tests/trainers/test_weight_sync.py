"""TRL's sync of weights with vLLM: from a patched model the same names, shapes and bits arrive as from a stock one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import lora_config, with_lora
from backbone_calls import Calls
from expert_models import expert_model, with_expert_lora
from other_trainer_cases import check_step, share_of_low_words
from preferences import STEPS, logged, pairs, settings, word_tokenizer
from tiny import tiny_model
from torch import nn
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from vllm_stand_in import StandIn, Weights, base_weights, standing_in, synced

import fastpack

pytestmark = pytest.mark.usefixtures("accelerate_afresh")
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "plain": lambda: (tiny_model("llama").bfloat16(),) * 2,
    "tied": lambda: (tiny_model("gemma3_text").bfloat16(),) * 2,
    "experts": lambda: (tiny_model("qwen3_moe").bfloat16(),) * 2,
    "lora": lambda: adapted(tiny_model("llama").bfloat16(), with_lora),
    "lora, tied": lambda: adapted(tiny_model("gemma3_text").bfloat16(), with_lora),
    "lora, saved modules": lambda: adapted(
        tiny_model("llama").bfloat16(), lambda model: with_lora(model, modules_to_save=["lm_head"])
    ),
    "dora": lambda: adapted(tiny_model("llama").bfloat16(), lambda model: with_lora(model, use_dora=True)),
    "lora on experts": lambda: adapted(expert_model("qwen3_moe").bfloat16(), with_expert_lora),
}


def adapted(model: nn.Module, add: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    """Return a stock copy of a model, and the model with adapters."""
    return copy.deepcopy(model), add(model)


def same(ours: Weights, theirs: Weights) -> bool:
    """Return whether names, their order and all bits are the same; shapes and dtypes must be."""
    assert [*ours] == [*theirs]
    assert all((ours[name].shape, ours[name].dtype) == (theirs[name].shape, theirs[name].dtype) for name in ours)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_the_same_weights_arrive(name: str, mode: str) -> None:
    """Patched, and with exact merges; a model that has run in between, too.

    For a server TRL merges twice at the first sync, and the first time only asks for names: stock has drifted by then.
    """
    plain, model = MODELS[name]()
    stock = copy.deepcopy(model)
    fastpack.patch(model, loss="fused")
    if is_peft(model):
        fastpack.exact_merges(model)
    (theirs,) = synced(stock, plain, "colocate" if is_peft(model) else mode)
    (ours,) = synced(model, plain, mode)
    assert same(ours, theirs)
    batch = {"input_ids": torch.full((2, 9), 5), "labels": torch.full((2, 9), 5)}
    model(**batch).loss.backward()
    (again,) = synced(model, plain, mode)
    assert same(again, ours)
    unmerged = dict(plain.named_parameters())
    assert same(ours, unmerged) == (not is_peft(model)), "control: merged weights are others"


@pytest.mark.parametrize("exact", [True, False])
def test_a_hundred_syncs(exact: bool) -> None:
    """The last sync sends the bits of the first if merges are exact; the control drifts."""
    plain, model = MODELS["lora"]()
    fastpack.patch(model)
    if exact:
        fastpack.exact_merges(model)
    syncs = synced(model, plain, times=100)
    assert same(syncs[-1], syncs[0]) == exact
    assert same(base_weights(model), dict(plain.named_parameters())) == exact


OF_LOSS = 5e-6
TRAINERS: dict[str, tuple[Any, Any]] = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def trainer_with_vllm(name: str, folder: Path, lora: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, StandIn]:
    """Return a trainer whose completions come from a stand-in."""
    trainer, config = TRAINERS[name]
    model = tiny_model("llama", attn_implementation="sdpa").to(dtype)
    sampling = {"num_generations": 2, "max_completion_length": 12, "beta": 0.1 if lora else 0.0}
    with standing_in(model) as engine:
        built = trainer(
            with_lora(model) if lora else model,
            reward_funcs=share_of_low_words,
            args=config(**settings(folder, use_vllm=True, vllm_mode="colocate", **sampling)),
            train_dataset=pairs().remove_columns(["chosen", "rejected"]),
            processing_class=word_tokenizer(),
        )
    return built, engine


@pytest.mark.sample(2)
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("name", TRAINERS)
def test_training_with_it(name: str, lora: bool, tmp_path: Path, calls: Calls) -> None:
    """Each step's weights arrive, completions are drawn from them, and the steps are stock's."""
    with standing_in(tiny_model("llama")):  # while it generates, TRL asks vLLM for a class of settings
        trainer, theirs = trainer_with_vllm(name, tmp_path, lora)
        stock = logged(trainer)
        assert not calls.all
        trainer, ours = trainer_with_vllm(name, tmp_path, lora)
        before = {n: p.clone() for n, p in base_weights(trainer.model).items()} if lora else {}
        fastpack.patch(trainer, loss="fused")
        if lora:
            fastpack.exact_merges(trainer.model)
        mine = logged(trainer)
    assert calls.all
    assert len(ours.syncs) == len(theirs.syncs) >= STEPS
    assert same(ours.syncs[0], theirs.syncs[0])
    assert not same(ours.syncs[-1], ours.syncs[0]), "control: training changes what is sent"
    for of_ours, of_theirs in zip(ours.syncs, theirs.syncs, strict=True):
        for weight, other in zip(of_ours.values(), of_theirs.values(), strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-4)
    for step, other in zip(mine, stock, strict=True):
        assert step.keys() == other.keys()
        # with vLLM the loss is a mean of advantages whose sum is 0, times ratios near 1: what is left is rounding
        assert abs(step.pop("loss") - other.pop("loss")) <= OF_LOSS
        assert check_step(step, other) >= 2
    if lora:
        assert all(torch.equal(p, before[n]) for n, p in base_weights(trainer.model).items())


def test_the_report_names_the_drift(tmp_path: Path) -> None:
    def notes(dtype: torch.dtype, lora: bool, exact: bool = False) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            trainer, _ = trainer_with_vllm("grpo", tmp_path, lora, dtype)
        fastpack.patch(trainer)
        if exact:
            fastpack.exact_merges(trainer.model)
        return [note for note in fastpack.report(trainer).notes if note.startswith("weight sync")]

    (note,) = notes(torch.bfloat16, True)
    layers = 2 * len(lora_config().target_modules)
    assert f"the adapter of {layers} layers in bfloat16" in note
    assert "fastpack.exact_merges(trainer.model)" in note
    assert not notes(torch.bfloat16, True, exact=True)
    assert not notes(torch.float32, True)
    assert not notes(torch.bfloat16, False)
