"""What a model computes, read from it, against what torch counts, what the attention kernels get, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import FAST, WINDOW, tiny_config, tiny_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification

import fastpack
from fastpack.errors import UnsupportedModelError
from fastpack.exactness.tiny import model_types
from fastpack.families import FAMILIES
from fastpack.flops import FULL, Attention, Layer, Load, Product, Span, forward_flops, training_flops
from fastpack.layers import attention as fast_attention
from fastpack.layers import hf_attention as interface
from fastpack.metrics.plan import ModelPlan, read_plan

TOKENS = 12
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def count(model: nn.Module, *, backward: bool) -> int:
    """Operations that torch counts in a step on one sequence; eager attention works on all T x T pairs.

    So does torch's own in terms of products; of its kernel for a CPU, which from 2.14 on serves falcon's single head of
    keys too, torch counts nothing.
    """
    stock: Any = model.base_model.model if hasattr(model, "peft_config") else model
    stock.set_experts_implementation("eager")
    ids = torch.randint(3, 90, (1, TOKENS))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


def expected(plan: ModelPlan, *, backward: bool) -> int:
    """Ours of the same: over all pairs, and with the four products of a backward that kept its scores, not five."""
    load = Load(TOKENS, dict.fromkeys(plan.spans, TOKENS**2), TOKENS)
    if not backward:
        return plan.forward(load).total
    kept = sum(
        2 * a.forward(TOKENS**2) - (a.training(TOKENS**2) - a.forward(TOKENS**2))
        for layer in plan.layers
        for a in layer.attentions
        if a.backward
    )
    return plan.training(load).total + kept


def test_pairs_by_brute_force() -> None:
    at = torch.arange(30)
    causal = at[:, None] >= at
    for length in (1, 2, 7, 8, 9, 30):
        seen = causal[:length, :length]
        near = (at[:length, None] - at[:length]) < 8
        same = (at[:length, None] // 8) == (at[:length] // 8)
        assert FULL.pairs(length) == int(seen.sum())
        assert Span(window=8).pairs(length) == int((seen & near).sum())
        assert Span(chunk=8).pairs(length) == int((seen & same).sum())
    assert FULL.pairs(30) != Span(window=8).pairs(30) != Span(chunk=8).pairs(30)


def test_by_hand() -> None:
    """One layer 4 -> 6 -> 4 without attention's projections, a sequence of 3 and one of 1."""
    layer = Layer(
        (Product(4, 6), Product(6, 4, recomputed=False), Product(4, 2, lora=True, weight_grad=False)),
        (Attention(2, 3, 5, Span(window=2)),),
        checkpointed=True,
    )
    load = Load.of([3, 1], [Span(window=2)])
    assert (load.tokens, load.pairs, load.head_positions) == (4, {Span(window=2): 6}, 2)
    found = training_flops([layer], [Product(4, 50, input_grad=False)], load)
    assert found.linear == 2 * (3 * 2 * 4 * 24)
    assert found.lora == 2 * (2 * 4 * 8)
    assert found.attention == 2 * 6 * 2 * ((3 + 5) + (3 * 3 + 2 * 5))
    assert found.head == 2 * (2 * 2 * 200)
    assert found.recomputed == 2 * 4 * 24 + 2 * 4 * 8 + 2 * 6 * 2 * (3 + 5)
    assert found.once == found.total - found.recomputed
    alone = forward_flops([layer], [Product(4, 50)], load, lora=False)
    assert (alone.linear, alone.lora, alone.recomputed) == (2 * 2 * 4 * 24, 0, 0)
    assert forward_flops([layer], [], load).lora == 2 * 4 * 8


@pytest.mark.parametrize("model_type", [*FAST, "dbrx", "gpt2", "gpt_neox", "jetmoe", "opt", "olmoe"])
def test_forward_of_each_family(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's count of the stock forward, and heads, sizes and windows as the patched one hands them to a kernel."""
    model = tiny_model(model_type).requires_grad_(False)
    plan = read_plan(model)
    assert plan.uncounted == ()
    assert count(model, backward=False) == expected(plan, backward=False)
    calls = []
    stock = fast_attention.attend

    def attend(call: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((call.q.shape[1], call.q.shape[2], call.v.shape[2], call.window))
        return stock(call, *args, **kwargs)

    for module in (fast_attention, interface):
        monkeypatch.setattr(module, "attend", attend)
    fastpack.patch(model)
    model(input_ids=torch.randint(3, 90, (1, TOKENS)))
    ours = [(a.heads, a.key_dim, a.value_dim, a.span.window) for layer in plan.layers for a in layer.attentions]
    assert ours == calls
    assert len(calls) == model.config.num_hidden_layers
    assert read_plan(model) == plan, "a patched model computes the same products"


COUNTED_OTHERWISE = {
    "lfm2": "torch counts a convolution's rim",
    "lfm2_moe": "the same",
    "lfm3": "the same",
    "llama4_text": "all experts run on each token in eager mode",
}


@pytest.mark.parametrize("model_type", sorted((FAMILIES.keys() & {*model_types()}) - COUNTED_OTHERWISE.keys()))
def test_every_family_is_exact_or_says_what_it_lacks(model_type: str) -> None:
    from fastpack.exactness.tiny import build_tiny

    model = build_tiny(model_type).requires_grad_(False)
    plan = read_plan(model)
    if not plan.uncounted:
        model.set_attn_implementation("eager")
        assert count(model, backward=False) == expected(plan, backward=False)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen2", "gpt_oss", "qwen3_moe", "cohere"])
def test_a_full_step(model_type: str, checkpointing: bool) -> None:
    model: Any = tiny_model(model_type)
    once = read_plan(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plan = read_plan(model)
    counted = count(model, backward=True)
    assert counted == expected(plan, backward=True)
    assert (counted != expected(once, backward=True)) == checkpointing


ONE_PRODUCT = 2 * 32 * TOKENS**2
"""Of attention, over all heads."""


@pytest.mark.parametrize(
    ("targets", "left_out"),
    [
        (ALL_LINEAR, 0),
        (["q_proj", "v_proj"], ONE_PRODUCT),  # eager attention can do without the gradient of the first layer's keys
        (["gate_proj", "up_proj"], 0),
        (["down_proj"], 0),
    ],
    ids=str,
)
def test_a_step_of_lora(targets: list[str], left_out: int) -> None:
    model = tiny_model("llama")
    full = read_plan(model)
    wrapped: Any = get_peft_model(model, LoraConfig(r=3, target_modules=targets, init_lora_weights=False))
    plan = read_plan(wrapped)
    assert count(wrapped, backward=True) == expected(plan, backward=True) - left_out
    assert expected(full, backward=True) != expected(plan, backward=True)
    frozen = read_plan(wrapped.requires_grad_(False))
    load = Load(TOKENS, {FULL: 78}, TOKENS)
    assert frozen.training(load).total == frozen.forward(load).total
    assert frozen.forward(load, lora=False) == full.forward(load), "switched off"
    assert frozen.forward(load).lora > 0


def test_checkpointed_lora_counts_what_is_needed() -> None:
    """PEFT computes down_proj's product before what is kept of it, and asks for gradients of the embeddings."""
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=3, target_modules=ALL_LINEAR, init_lora_weights=False))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    wasted = 2 * (2 * TOKENS * 48 * 32) + 2 * TOKENS * (32 * (32 + 16 + 16) + 3 * 3 * 32)
    assert count(model, backward=True) == expected(read_plan(model), backward=True) + wasted


def test_only_some_layers_train() -> None:
    """Below the first trained weight nothing needs a gradient."""
    model: Any = tiny_model("llama", num_hidden_layers=4).requires_grad_(False)
    model.model.layers[2].requires_grad_(True)
    assert count(model, backward=True) == expected(read_plan(model), backward=True)
    assert not any(a.backward for layer in read_plan(model).layers[:3] for a in layer.attentions)


def test_adapters_in_force_count_alone() -> None:
    """Not the other adapter, nor the frozen copy of a trained head."""
    lora = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model: Any = get_peft_model(tiny_model("llama"), lora)
    alone = read_plan(model)
    model.add_adapter("other", LoraConfig(r=7, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    assert read_plan(model) == alone
    assert count(model, backward=True) == expected(alone, backward=True) - 2 * ONE_PRODUCT
    assert [(p.inputs, p.outputs, p.weight_grad) for p in alone.head] == [(32, 97, True)]
    model.set_adapter("other")
    assert read_plan(model) != alone


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_train_alone(tied: bool) -> None:
    """PEFT's trainable_token_indices: the gradient is that of the whole weight, of a tied head too."""
    lora = LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[5, 6], init_lora_weights=False)
    model: Any = get_peft_model(tiny_model("llama", tie_word_embeddings=tied), lora)
    plan = read_plan(model)
    assert count(model, backward=True) == expected(plan, backward=True)
    assert [p.weight_grad for p in plan.head] == [tied]
    with model.disable_adapter():
        assert not read_plan(model).head[0].weight_grad


def test_a_classifier_and_a_bare_backbone() -> None:
    model: Any = tiny_model("llama", auto=AutoModelForSequenceClassification, num_labels=3)
    assert [(p.inputs, p.outputs) for p in read_plan(model).head] == [(32, 3)]
    assert read_plan(model.model).head == ()
    assert read_plan(model.model).layers == read_plan(model).layers


def test_four_bit_weights_have_their_own_sizes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model: Any = tiny_model("llama")
    plain = read_plan(model.requires_grad_(False))
    for layer in model.model.layers:
        stock = layer.mlp.down_proj
        layer.mlp.down_proj = bitsandbytes.nn.Linear4bit(stock.in_features, stock.out_features, bias=False)
        layer.mlp.down_proj.weight.requires_grad_(False)
    assert read_plan(model) == plain
    quantized = model.model.layers[0].mlp.down_proj.to("cpu")
    assert quantized.weight.numel() <= 48 * 32


def test_windows_and_chunks() -> None:
    spans = [a.span for layer in read_plan(tiny_model("gemma2")).layers for a in layer.attentions]
    assert spans == [Span(window=WINDOW), FULL]
    chunked = read_plan(
        tiny_model("llama4_text", attention_chunk_size=6, num_hidden_layers=2, layer_types=["chunked_attention"] * 2)
    )
    assert chunked.spans == (Span(chunk=6),)


def test_what_has_no_formula_is_named() -> None:
    assert any("MambaMixer" in what for what in read_plan(tiny_model("jamba")).uncounted)
    assert any("DiffLlamaAttention" in what for what in read_plan(tiny_model("diffllama")).uncounted)


def test_towers_are_left_out_and_named() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 5, "image_size": 28, "patch_size": 14}
    text = tiny_config("gemma3_text", num_hidden_layers=2).to_dict()
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config={**vision, "num_attention_heads": 2})
    plan = read_plan(AutoModelForCausalLM.from_config(config))
    assert [len(layer.products) for layer in plan.layers] == [0, 7, 7]
    assert any("vision_tower" in what for what in plan.uncounted)


def test_wrappers_and_what_is_no_model() -> None:
    with pytest.raises(UnsupportedModelError):
        read_plan(nn.Linear(2, 2))
    model = tiny_model("llama")
    assert read_plan(nn.DataParallel(model)) == read_plan(model)
