"""Heads of the fused loss: tied, with LoRA, copied by PEFT, frozen, 4-bit; with checkpointing and autocast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import nf4, with_lora
from loss_cases import NAIVE_BOUND, TRAITS, Calls, check, grads_of, run_fused
from oracle import (
    FLOAT32_BOUND,
    LENGTHS,
    Result,
    compare,
    make_sequences,
    padded,
    relative,
    run_alone,
    trained_tokens,
)
from tiny import VOCAB, tiny_model

import fastpack


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere"])
def test_a_tied_head(model_type: str, op_calls: Calls) -> None:
    model = tiny_model(model_type, tie_word_embeddings=True, **TRAITS.get(model_type, {}))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    alone = run_alone(model, make_sequences(VOCAB))
    check(fastpack.patch(model, loss="fused"), alone, op_calls)


@pytest.mark.parametrize("order", ["patched, then wrapped", "wrapped, then patched"])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "r": 3}])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_lora_on_the_head(model_type: str, settings: dict[str, Any], order: str, op_calls: Calls) -> None:
    targets = {"target_modules": ["q_proj", "down_proj", "lm_head"], **settings}
    traits = {"tie_word_embeddings": False, **TRAITS.get(model_type, {})}
    alone = run_alone(with_lora(tiny_model(model_type, **traits), **targets), make_sequences(VOCAB))
    assert any("lm_head" in name for name in alone.grads)
    model = tiny_model(model_type, **traits)
    if order == "patched, then wrapped":
        wrapped = with_lora(fastpack.patch(model, loss="fused"), **targets)
    else:
        wrapped = fastpack.patch(with_lora(model, **targets), loss="fused")
    check(wrapped, alone, op_calls)
    wrapped.get_base_model().lm_head.scaling["default"] *= 2
    error = compare(run_fused(wrapped, make_sequences(VOCAB), "padded left", alone), alone)
    assert error.worst > NAIVE_BOUND, "the negative control: the adapter takes part"


def test_a_head_that_peft_keeps_a_copy_of(op_calls: Calls) -> None:
    targets = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}

    def build() -> Any:
        wrapped = with_lora(tiny_model("llama"), **targets)
        with torch.no_grad():
            wrapped.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
        return wrapped

    wrapped = build()
    alone = run_alone(wrapped, make_sequences(VOCAB))
    assert any("lm_head" in name for name in alone.grads)
    check(fastpack.patch(wrapped, loss="fused"), alone, op_calls)
    with wrapped.disable_adapter():
        base = run_alone(tiny_model("llama"), make_sequences(VOCAB))
        loss = wrapped(**padded(make_sequences(VOCAB), "left")).loss
    assert relative(loss, base.loss) <= FLOAT32_BOUND
    assert op_calls.rows == [sum(LENGTHS)] * 2


def test_a_frozen_head_gets_no_gradient(op_calls: Calls) -> None:
    model = fastpack.patch(with_lora(tiny_model("llama")), loss="fused")
    model(**padded(make_sequences(VOCAB), "left")).loss.backward()
    assert op_calls.rows == [sum(LENGTHS)]
    assert model.get_base_model().lm_head.weight.grad is None


@pytest.mark.parametrize("adapter", [False, True])
def test_an_nf4_head(adapter: bool, tmp_path: Path, op_calls: Calls) -> None:
    def build() -> Any:
        from bitsandbytes.nn import Linear4bit

        model: Any = nf4(tmp_path)
        head = Linear4bit(64, VOCAB, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        head.weight = type(head.weight)(model.lm_head.weight.data.clone(), requires_grad=False, quant_type="nf4")
        model.lm_head = head.to("cpu").train()
        return with_lora(model, target_modules=["q_proj", *(["lm_head"] if adapter else [])])

    alone = run_alone(build(), make_sequences(VOCAB))
    model = fastpack.patch(build(), loss="fused")
    assert not [why for what, why in fastpack.report(model).skipped if what == "loss"]
    check(model, alone, op_calls)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool, op_calls: Calls) -> None:
    model = tiny_model("gemma2", **TRAITS["gemma2"])
    alone = run_alone(model, make_sequences(VOCAB))
    fastpack.patch(model, loss="fused")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    check(model, alone, op_calls)


def test_autocast(op_calls: Calls) -> None:
    """bf16 over float32 weights is no farther from float32 than the stock loss."""
    sequences = make_sequences(VOCAB)
    results = []
    exact = run_alone(tiny_model("llama"), sequences)
    for fused in (None, "fused"):
        model = fastpack.patch(tiny_model("llama"), loss=fused)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**padded(sequences, "left"), num_items_in_batch=trained_tokens(sequences)).loss
        loss.backward()
        results.append(compare(Result(exact.logits, loss.detach(), grads_of(model)), exact))
    stock, ours = results
    assert op_calls.rows == [sum(LENGTHS)]
    assert 1e-4 < ours.grads <= 1.5 * stock.grads
