"""LoRA on experts while a user works with it: adapters switched, disabled, merged, saved, loaded, deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import KINDS, with_ia3
from expert_models import (
    FAMILIES,
    blocks_of,
    check_against_stock,
    expert_model,
    fill,
    lora_config,
    outermost_of,
    reasons,
    with_expert_lora,
)
from oracle import FLOAT32_BOUND, compare, make_sequences, relative, run_alone, run_batch
from peft import PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from tiny import VOCAB
from torch import Tensor

import fastpack

SEQUENCES = make_sequences(VOCAB, (7, 1, 9))
STOCK_RUNS = "the stock forward runs"


def two_adapters(model_type: str, *, patch: str = "") -> Any:
    """Return a model with two adapters, patched before the first, between them, after both, or not at all."""
    model = expert_model(model_type)
    if patch == "first":
        fastpack.patch(model)
    model = with_expert_lora(model)
    if patch == "between":
        fastpack.patch(model)
    model.add_adapter("second", lora_config(r=2, lora_alpha=5))
    fill(model, seed=2)
    return fastpack.patch(model) if patch == "after" else model


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        batch = {"input_ids": torch.cat(SEQUENCES)[None], "packed_seq_lens": [len(s) for s in SEQUENCES]}
        if not fastpack.is_patched(model):
            return torch.cat([model(input_ids=s[None], use_cache=False).logits[0] for s in SEQUENCES])
        result: Tensor = model(**batch).logits[0]
        return result


@pytest.mark.parametrize("patch", ["first", "between", "after"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_are_switched(model_type: str, patch: str, expert_calls: list[Any]) -> None:
    model, stock = two_adapters(model_type, patch=patch), two_adapters(model_type)
    results = []
    for name in ("second", "default"):
        for each in (model, stock):
            each.set_adapter(name)
        check_against_stock(model, stock, expert_calls)
        results.append(logits_of(model))
        assert reasons(model) == []
    assert relative(results[0], results[1]) > 1e-2, "the control: adapters differ"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_two_adapters_at_once_run_as_stock(model_type: str, expert_calls: list[Any]) -> None:
    model, stock = two_adapters(model_type, patch="after"), two_adapters(model_type)
    for each in (model, stock):
        each.base_model.set_adapter(["default", "second"])
    check_against_stock(model, stock, expert_calls, runs=0)
    assert reasons(model) == [f"2 adapters are active at once: {STOCK_RUNS}"]
    for each in (model, stock):
        each.base_model.set_adapter("default")
    check_against_stock(model, stock, expert_calls)
    assert reasons(model) == []


@pytest.mark.parametrize("model_type", FAMILIES)
def test_disabled_adapters(model_type: str, expert_calls: list[Any]) -> None:
    """As in DPO, where the reference model is the same one without its adapters."""
    model = fastpack.patch(with_expert_lora(expert_model(model_type)))
    base = torch.cat(run_alone(expert_model(model_type), SEQUENCES).logits)
    expert_calls.clear()
    with model.disable_adapter():
        assert relative(logits_of(model), base) <= FLOAT32_BOUND
        assert all(call[index].lora is None for call in expert_calls for index in (3, 4))
    assert relative(logits_of(model), base) > 1e-2
    assert len(expert_calls) == 4
    check_against_stock(model, with_expert_lora(expert_model(model_type)), expert_calls)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_merged_and_unmerged(model_type: str, expert_calls: list[Any]) -> None:
    model = fastpack.patch(with_expert_lora(expert_model(model_type)))
    before = logits_of(model)
    model.merge_adapter()
    expert_calls.clear()
    assert relative(logits_of(model), before) <= FLOAT32_BOUND
    assert all(call[index].lora is None for call in expert_calls for index in (3, 4))
    model.unmerge_adapter()
    assert relative(logits_of(model), before) <= FLOAT32_BOUND
    assert all(call[index].lora is not None for call in expert_calls[2:] for index in (3, 4))
    model.merge_adapter()
    base = torch.cat(run_alone(expert_model(model_type), SEQUENCES).logits)
    with model.disable_adapter():  # which unmerges them
        assert relative(logits_of(model), base) <= FLOAT32_BOUND
    assert len(expert_calls) == 6
    check_against_stock(model, with_expert_lora(expert_model(model_type)), expert_calls)


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_wrappers_are_taken_away(model_type: str, patch_first: bool, merge: bool, expert_calls: list[Any]) -> None:
    """``merge_and_unload`` and ``unload`` leave a patched model, whose report is right before it runs again."""

    def unwrapped(model: Any) -> Any:
        inside = model.merge_and_unload() if merge else model.unload()
        return inside.requires_grad_(True)

    if patch_first:
        model = with_expert_lora(fastpack.patch(expert_model(model_type)))
    else:
        model = fastpack.patch(with_expert_lora(expert_model(model_type)))
    logits_of(model)
    model = unwrapped(model)
    assert reasons(model) == []
    check_against_stock(model, unwrapped(with_expert_lora(expert_model(model_type))), expert_calls)
    assert all("forward" in block.__dict__ for block in blocks_of(model))
    again = with_expert_lora(model)
    check_against_stock(again, with_expert_lora(unwrapped(with_expert_lora(expert_model(model_type)))), expert_calls)
    fastpack.unpatch(again)
    assert not any("forward" in module.__dict__ for module in again.modules())


def test_an_adapter_is_deleted(expert_calls: list[Any]) -> None:
    model, stock = two_adapters("qwen3_moe", patch="after"), two_adapters("qwen3_moe")
    for each in (model, stock):
        each.set_adapter("second")
        each.delete_adapter("default")
    check_against_stock(model, stock, expert_calls)
    assert all(call[index].lora is not None for call in expert_calls for index in (3, 4))


@pytest.mark.parametrize("how", ["weights are zero", "trained"])
def test_the_first_step_of_an_adapter(how: str, expert_calls: list[Any]) -> None:
    """PEFT starts from B = 0: gradients of A are zero, and are there."""
    model, stock = (get_peft_model(expert_model("gpt_oss"), lora_config()) for _ in range(2))
    for each in (model, stock):
        torch.manual_seed(3)
        for name, parameter in each.named_parameters():
            if "lora_A" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        if how == "trained":
            fill(each)
    fastpack.patch(model)
    check_against_stock(model, stock, expert_calls)
    grads = {name: p.grad for name, p in model.named_parameters() if "experts" in name and "lora_A" in name}
    assert len(grads) == 4
    assert all(grad is not None and bool(grad.any()) == (how == "trained") for grad in grads.values())


@pytest.mark.parametrize("part", ["A", "B"])
def test_a_frozen_half_of_an_adapter(part: str, expert_calls: list[Any]) -> None:
    model, stock = (with_expert_lora(expert_model("gpt_oss")) for _ in range(2))
    for each in (model, stock):
        for name, parameter in each.named_parameters():
            if f"lora_{part}" in name:
                parameter.requires_grad_(False)
    fastpack.patch(model)
    check_against_stock(model, stock, expert_calls)


def test_stacks_and_adapters_train_together(expert_calls: list[Any]) -> None:
    model, stock = (with_expert_lora(expert_model("qwen3_moe")) for _ in range(2))
    for each in (model, stock):
        for block in blocks_of(each):
            block.down_proj.requires_grad_(True)
    fastpack.patch(model)
    check_against_stock(model, stock, expert_calls)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_adapters_of_another_dtype(dtype: torch.dtype, expert_calls: list[Any]) -> None:
    """PEFT casts A and B to the dtype of the stack; their gradients keep their own."""
    model, stock = (with_expert_lora(expert_model("gpt_oss"), target_modules=[]) for _ in range(2))
    for each in (model, stock):
        for name, parameter in each.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
    fastpack.patch(model)
    alone = run_alone(stock, SEQUENCES)
    expert_calls.clear()
    ours = run_batch(model, SEQUENCES, KINDS[0])
    assert len(expert_calls) == 2
    assert all(ours.grads[name].dtype == grad.dtype for name, grad in alone.grads.items())
    bound = 1e-2 if dtype == torch.bfloat16 else FLOAT32_BOUND  # gradients of bfloat16 round differently
    assert compare(ours, alone).worst <= bound


# --- saved and loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["patched, then wrapped", "wrapped, then patched"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_saved_adapters_are_peft_s(model_type: str, order: str, tmp_path: Path, expert_calls: list[Any]) -> None:
    """Names, shapes and values are those of a stock model; it loads ours, and we load its."""
    if order == "patched, then wrapped":
        model = with_expert_lora(fastpack.patch(expert_model(model_type)))
    else:
        model = fastpack.patch(with_expert_lora(expert_model(model_type)))
    stock = with_expert_lora(expert_model(model_type))
    ours, theirs = logits_of(model), logits_of(stock)
    assert relative(ours, theirs) <= FLOAT32_BOUND
    saved, expected = (get_peft_model_state_dict(each) for each in (model, stock))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    model.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "theirs")
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("ours", "theirs")]
    assert files[0] == files[1]

    stock_again = PeftModel.from_pretrained(expert_model(model_type), tmp_path / "ours")
    assert relative(logits_of(stock_again), theirs) == 0
    expert_calls.clear()
    for again in (
        PeftModel.from_pretrained(fastpack.patch(expert_model(model_type)), tmp_path / "theirs"),
        fastpack.patch(PeftModel.from_pretrained(expert_model(model_type), tmp_path / "theirs")),
    ):
        expert_calls.clear()
        assert relative(logits_of(again), ours) <= FLOAT32_BOUND
        assert len(expert_calls) == 2
    model.load_adapter(tmp_path / "theirs", adapter_name="loaded")
    model.set_adapter("loaded")
    assert relative(logits_of(model), ours) <= FLOAT32_BOUND


def test_a_saved_whole_model(tmp_path: Path) -> None:
    """The base weights' names are the stock ones, whatever was wrapped and moved in between."""
    model = with_expert_lora(fastpack.patch(expert_model("gpt_oss")))
    logits_of(model)
    stock = with_expert_lora(expert_model("gpt_oss"))
    assert model.state_dict().keys() == stock.state_dict().keys()
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = type(merged).from_pretrained(tmp_path, attn_implementation="eager")
    assert relative(logits_of(again), logits_of(merged)) <= FLOAT32_BOUND


# --- what PEFT refuses, and what is not read --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"), [({"lora_dropout": 0.1}, "lora_dropout != 0"), ({"use_dora": True}, "use_dora")]
)
def test_what_peft_refuses_on_a_patched_model(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        get_peft_model(fastpack.patch(expert_model("qwen3_moe")), lora_config(**settings))


@pytest.mark.parametrize("patch_first", [True, False])
def test_experts_that_are_saved_as_modules(patch_first: bool, expert_calls: list[Any]) -> None:
    """``modules_to_save`` trains a copy of the whole block, in a wrapper of its own."""
    settings: dict[str, Any] = {"target_parameters": None, "modules_to_save": ["experts"]}
    if patch_first:
        model = with_expert_lora(fastpack.patch(expert_model("qwen3_moe")), **settings)
    else:
        model = fastpack.patch(with_expert_lora(expert_model("qwen3_moe"), **settings))
    stock = with_expert_lora(expert_model("qwen3_moe"), **settings)
    alone = run_alone(stock, SEQUENCES)
    expert_calls.clear()
    error = compare(run_batch(model, SEQUENCES, KINDS[0]), alone)
    assert error.worst <= FLOAT32_BOUND, error
    assert any("modules_to_save" in name and "experts" in name for name in alone.grads)
    assert len(expert_calls) == 2


def test_another_adapter_beside_them(expert_calls: list[Any]) -> None:
    """IA3 on attention alone leaves the experts fast."""
    settings = {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []}
    model = fastpack.patch(with_ia3(expert_model("qwen3_moe"), **settings))
    check_against_stock(model, with_ia3(expert_model("qwen3_moe"), **settings), expert_calls)
    assert not hasattr(outermost_of(model)[0], "base_layer")
