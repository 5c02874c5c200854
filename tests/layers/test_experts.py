"""Blocks of experts in models: full fine-tuning and LoRA, patched before PEFT or after it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from adapter_cases import KINDS
from expert_models import (
    FAMILIES,
    STACKS,
    blocks_of,
    check_against_stock,
    expert_model,
    outermost_of,
    plain,
    with_expert_lora,
)
from op_checks import ON_CPU
from oracle import FLOAT32_BOUND, compare, make_sequences, run_alone, run_batch
from patch_checks import fingerprint
from tiny import VOCAB

import fastpack

ORDERS = ("patched, then wrapped", "wrapped, then patched", "base patched inside")


def patched_lora(model_type: str, order: str = ORDERS[1], **settings: Any) -> Any:
    model = expert_model(model_type)
    if order == "patched, then wrapped":
        return with_expert_lora(fastpack.patch(model), **settings)
    wrapped = with_expert_lora(model, **settings)
    fastpack.patch(wrapped if order == "wrapped, then patched" else wrapped.get_base_model())
    return wrapped


@pytest.mark.parametrize("model_type", FAMILIES)
def test_whole_models(model_type: str, expert_calls: list[Any]) -> None:
    model = fastpack.patch(expert_model(model_type), strict=True)
    check_against_stock(model, expert_model(model_type), expert_calls)
    assert fastpack.report(model).swapped["experts"] == 2


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_lora_on_both_stacks(model_type: str, order: str, expert_calls: list[Any]) -> None:
    model = patched_lora(model_type, order)
    check_against_stock(model, with_expert_lora(expert_model(model_type)), expert_calls)
    assert all(call[index].lora is not None for call in expert_calls for index in (3, 4))
    report = fastpack.report(model)
    assert report.as_modules == {}
    (kind,) = (kind for kind in report.projections if "Experts" in kind)
    assert kind.endswith("Experts + lora")
    assert report.projections[kind] == 2


SETTINGS: dict[str, dict[str, Any]] = {
    "one stack, first": {"target_parameters": [STACKS[0]]},
    "one stack, second": {"target_parameters": [STACKS[1]]},
    "experts alone": {"target_modules": []},
    "rsLoRA": {"use_rslora": True},
    "ranks and scales of their own": {
        "rank_pattern": {r".*experts\.gate_up_proj": 5, r".*experts\.down_proj": 1},
        "alpha_pattern": {r".*experts\.down_proj": 7},
    },
    "the router too": {"target_parameters": [*STACKS, "mlp.gate.weight", "mlp.router.weight"]},
    "not the first layer": {"target_parameters": [f"layers.1.{name}" for name in STACKS]},
}


@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore:.*not match any:RuntimeWarning")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("order", ORDERS[:2])
def test_settings_of_lora(order: str, model_type: str, name: str, expert_calls: list[Any]) -> None:
    model = patched_lora(model_type, order, **SETTINGS[name])
    check_against_stock(model, with_expert_lora(expert_model(model_type), **SETTINGS[name]), expert_calls)
    ranks = [[len(c[i].lora.a) // 5 if c[i].lora else 0 for i in (3, 4)] for c in expert_calls[:2]]
    both = [3, 3]
    expected = {"one stack, first": [3, 0], "one stack, second": [0, 3], "ranks and scales of their own": [5, 1]}
    first = [0, 0] if name == "not the first layer" else expected.get(name, both)
    assert ranks == [first, expected.get(name, both)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_check_sees_swapped_adapters(model_type: str, expert_calls: list[Any]) -> None:
    """The control: two experts of one layer have each other's adapters."""
    alone = run_alone(with_expert_lora(expert_model(model_type)), make_sequences(VOCAB))
    model = patched_lora(model_type)
    wrapper = outermost_of(model)[1]
    expert_calls.clear()
    with torch.no_grad():
        a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
        order = torch.tensor([1, 0, 2, 3, 4])
        a.copy_(a.view(5, -1, a.shape[1])[order].reshape(a.shape))
        b.copy_(b.view(len(b), -1, 5)[..., order].reshape(b.shape))
    assert compare(run_batch(model, make_sequences(VOCAB), KINDS[0]), alone).worst > 1e-2
    assert len(expert_calls) == 2


@ON_CPU.marks[0]
@pytest.mark.parametrize("model_type", FAMILIES)
def test_kernels_in_a_model(model_type: str, expert_calls: list[Any]) -> None:
    """Through Triton's interpreter."""
    stock = with_expert_lora(expert_model(model_type))
    sequences = make_sequences(VOCAB, (5, 1, 3))
    model = fastpack.patch(with_expert_lora(expert_model(model_type)), kernels="triton")
    expert_calls.clear()
    error = compare(run_batch(model, sequences, KINDS[0]), run_alone(stock, sequences))
    assert error.worst <= FLOAT32_BOUND, error
    assert len(expert_calls) == 2


# --- undone, copied, pickled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_undone_after_peft(model_type: str, expert_calls: list[Any]) -> None:
    """Patched, wrapped, run, unwrapped by ``unpatch``: nothing is left on a wrapper or a block."""
    model = with_expert_lora(fastpack.patch(expert_model(model_type)))
    expert_calls.clear()
    run_batch(model, make_sequences(VOCAB), KINDS[0])
    assert len(expert_calls) == 2
    assert all("forward" in outermost.__dict__ for outermost in outermost_of(model))
    assert not any("forward" in block.__dict__ for block in blocks_of(model)), "only the outermost is replaced"
    fastpack.unpatch(model)
    assert fingerprint(model).keys() == fingerprint(with_expert_lora(expert_model(model_type))).keys()
    stock = run_alone(with_expert_lora(expert_model(model_type)), make_sequences(VOCAB))
    assert compare(run_alone(model, make_sequences(VOCAB)), stock).worst == 0
    assert len(expert_calls) == 2


@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_undone_in_every_order(order: str, run: bool) -> None:
    """Whether a forward has moved the replacement to the wrappers or not."""
    model = patched_lora("qwen3_moe", order)
    if run:
        run_batch(model, make_sequences(VOCAB), KINDS[0])
    fastpack.unpatch(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    fastpack.patch(model)
    fastpack.unpatch(model)
    assert fingerprint(model).keys() == fingerprint(with_expert_lora(expert_model("qwen3_moe"))).keys()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("order", ORDERS[:2])
def test_copies(order: str, how: str, expert_calls: list[Any]) -> None:
    """A copy reads its own adapters, follows wrappers of its own, and is undone alone."""
    model = patched_lora("gpt_oss", order)
    run_batch(model, make_sequences(VOCAB), KINDS[0])
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    check_against_stock(twin, with_expert_lora(expert_model("gpt_oss")), expert_calls)
    assert fastpack.report(twin).swapped["experts"] == 2
    merged = twin.merge_and_unload()
    check_merged(merged, "gpt_oss", expert_calls)
    fastpack.unpatch(merged)
    assert not any("forward" in module.__dict__ for module in merged.modules())
    assert fastpack.is_patched(model)


def check_merged(merged: Any, model_type: str, expert_calls: list[Any]) -> None:
    """Check a merged model: its base weights are frozen, so only logits and loss are compared."""
    stock = with_expert_lora(expert_model(model_type)).merge_and_unload()
    for each in (merged, stock):
        each.requires_grad_(True)
    check_against_stock(merged, stock, expert_calls)
    assert all(call[index].lora is None for call in expert_calls for index in (3, 4))


@pytest.mark.parametrize("wrapped", [False, True])
def test_copies_before_peft(wrapped: bool, expert_calls: list[Any]) -> None:
    """A patched model is copied, and the copy is wrapped."""
    model = fastpack.patch(expert_model("qwen3_moe"))
    twin = with_expert_lora(copy.deepcopy(model)) if wrapped else copy.deepcopy(model)
    stock = expert_model("qwen3_moe")
    check_against_stock(twin, with_expert_lora(stock) if wrapped else stock, expert_calls)
    assert not hasattr(outermost_of(model)[0], "lora_A")


def test_a_subclass_of_the_experts_is_recognised(expert_calls: list[Any]) -> None:
    """One that changes nothing is its parent."""
    model = expert_model("qwen3_moe")
    for block in blocks_of(model):
        block.__class__ = type("MyExperts", (type(block),), {"__module__": __name__})
    fastpack.patch(model)
    check_against_stock(model, expert_model("qwen3_moe"), expert_calls)
    assert len(blocks_of(plain(model))) == 2
