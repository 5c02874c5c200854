"""What other code puts in place of a part of experts runs, or is refused: it is never bypassed without a word."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from expert_models import FAMILIES, blocks_of, expert_model, outermost_of, reasons, with_expert_lora
from tiny import VOCAB
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

import fastpack
from fastpack.errors import PatchError

IDS = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))


@contextmanager
def set_on(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@pytest.mark.filterwarnings("ignore:GptOssExperts")  # its own forward calls the method, so its source is another
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("level", ["instance", "class"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_gated_unit_of_a_user(model_type: str, level: str, before: bool, expert_calls: list[Any]) -> None:
    model = expert_model(model_type)
    block = blocks_of(model)[0]
    theirs, calls = type(block)._apply_gate, []

    def mine(self: Any, x: Any) -> Any:
        calls.append(1)
        return theirs(self, x) * 2

    owner, value = (block, types.MethodType(mine, block)) if level == "instance" else (type(block), mine)
    if not before:
        fastpack.patch(model)
        model(IDS)
        assert len(expert_calls) == 2
        expert_calls.clear()
    with set_on(owner, "_apply_gate", value):
        fastpack.patch(model)
        calls.clear()  # a twin may have tried it
        expert_calls.clear()
        ours = model(IDS).logits
        assert reasons(model)
        assert len(calls) == (1 if level == "instance" else 2)
        assert len(expert_calls) == 2 - len(calls)
        assert torch.equal(ours, model(IDS).logits)


def test_a_function_under_the_default_name(monkeypatch: pytest.MonkeyPatch, expert_calls: list[Any]) -> None:
    calls: list[int] = []

    def mine(*args: Any) -> Any:
        calls.append(1)
        return grouped_mm_experts_forward(*args)

    model = fastpack.patch(expert_model("qwen3_moe"))
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", mine)
    model(IDS)
    assert (len(calls), len(expert_calls)) == (2, 0)
    assert any("mine" in why for why in reasons(model))


def test_a_forward_on_a_wrapper_of_peft(expert_calls: list[Any]) -> None:
    """Before the patch, or after it on a wrapper that came later."""
    calls: list[int] = []

    def own_forward(module: Any) -> None:
        theirs = module.forward

        def mine(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return theirs(*args, **kwargs)

        module.forward = mine

    model = with_expert_lora(expert_model("qwen3_moe"))
    own_forward(outermost_of(model)[0])
    fastpack.patch(model)(IDS)
    assert (len(calls), len(expert_calls)) == (1, 1)
    assert any("mine" in why for why in reasons(model))
    model = with_expert_lora(fastpack.patch(expert_model("qwen3_moe")))
    own_forward(outermost_of(model)[0])
    model(IDS)
    assert len(calls) == 2


@pytest.mark.parametrize("lora", [False, True])
def test_a_forward_on_the_class_after_the_patch(lora: bool) -> None:
    model = expert_model("qwen3_moe")
    model = fastpack.patch(with_expert_lora(model) if lora else model)
    cls = type(blocks_of(model)[0])
    with set_on(cls, "forward", lambda self, x, *_: x), pytest.raises(PatchError, match="Qwen3MoeExperts became"):
        model(IDS)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_releases_of_peft_that_turn_a_stack_around(model_type: str, expert_calls: list[Any]) -> None:
    """PEFT 0.18 and 0.19 give A the other side of some stacks: PEFT adds these updates itself."""
    model = with_expert_lora(expert_model(model_type))
    fastpack.patch(model)(IDS)
    assert len(expert_calls) == 2
    wrapper = outermost_of(model)[0]
    wrapper._did_swap_in_out_features = not wrapper._did_swap_in_out_features
    expert_calls.clear()
    assert any("upgrade PEFT" in why for why in reasons(model))
