"""A model's operations against torch's counter, the attention kernels' arguments, and counts by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from tiny import FAST, WINDOW, tiny_config, tiny_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification

import fastpack
from fastpack.errors import UnsupportedModelError
from fastpack.exactness.tiny import model_types
from fastpack.families.registry import FAMILIES
from fastpack.layers import attention as fast_attention
from fastpack.layers import hf_attention as interface
from fastpack.trainers.metrics.flops import ModelFlops, read_flops

TOKENS = 12
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def count(model: nn.Module, *, backward: bool) -> int:
    """Return torch's count of operations in a step on one sequence; eager attention computes all T x T pairs.

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


def expected(flops: ModelFlops) -> int:
    """Return our count of the same step, over all pairs."""
    return flops.of(TOKENS, [TOKENS**2] * len(flops.per_pair))


def test_by_hand() -> None:
    """Llama: q and o 32 x 32, k and v 32 x 16, an MLP of 3 x 32 x 48; heads 4 of 8; a head of 32 x 97."""
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 97
    assert read_flops(tiny_model("llama")) == ModelFlops(6 * weights, {None: 3 * 2 * 2 * 2 * 4 * 8})
    frozen = read_flops(tiny_model("llama").requires_grad_(False))
    assert frozen == ModelFlops(2 * weights, {None: 2 * 2 * 2 * 4 * 8})
    assert ModelFlops(7, {None: 3, 8: 5}).of(10, [100, 1000]) == 70 + 300 + 5000


@pytest.mark.parametrize("model_type", [*FAST, "gpt2", "gpt_neox", "jetmoe", "opt", "olmoe"])
def test_forward_of_each_family(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts the same in the stock forward; the patched one passes such heads, sizes and windows on."""
    model = tiny_model(model_type).requires_grad_(False)
    flops = read_flops(model)
    assert count(model, backward=False) == expected(flops)
    calls = Counter[int | None]()
    count_of_calls = 0
    stock = fast_attention.attend

    def attend(call: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count_of_calls
        count_of_calls += 1
        calls[call.window] += 2 * call.q.shape[1] * (call.q.shape[2] + call.v.shape[2])
        return stock(call, *args, **kwargs)

    fastpack.patch(model)  # before calls are counted: twins of parts that are not proved may run
    for module in (fast_attention, interface):
        monkeypatch.setattr(module, "attend", attend)
    model(input_ids=torch.randint(3, 90, (1, TOKENS)))
    assert flops.per_pair == calls
    assert count_of_calls == 2
    assert read_flops(model) == flops, "a patched model computes the same products"


UNKNOWN = {"dbrx", "diffllama", "dory", "gemma3n_text", "hrm_text", "longcat_flash"}
"""Families in which only attention mixes tokens, but whose operations their modules don't show."""


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() & {*model_types()}))
def test_every_family_is_exact_or_refused(model_type: str) -> None:
    from fastpack.exactness.tiny import build_tiny

    model = build_tiny(model_type).requires_grad_(False)
    family = FAMILIES[model_type]
    if family.tier.startswith("re-padded") or family.packs_mixers or model_type in UNKNOWN:
        with pytest.raises(UnsupportedModelError, match="no formula"):
            read_flops(model)
    else:
        model.set_attn_implementation("eager")
        assert count(model, backward=False) == expected(read_flops(model))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen2", "gpt_oss", "qwen3_moe", "cohere"])
def test_a_full_step(model_type: str) -> None:
    model: Any = tiny_model(model_type)
    flops = read_flops(model)
    assert count(model, backward=True) == expected(flops)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert read_flops(model) == flops, "nothing counts twice"
    assert count(model, backward=True) > expected(flops)


ONE_PRODUCT = 2 * 32 * TOKENS**2
"""The operations of attention for one pair, over all heads."""
KV, MLP = 2 * 32 * 16, 32 * 48
"""The numbers of weights of a layer's keys and values, and of one matmul of its MLP."""
QKV = 32 * 32 + KV


@pytest.mark.parametrize(
    ("targets", "left_out"),
    [
        # gradients that the lowest layer can do without: those of the inputs of its first products, and of LoRA's A
        (ALL_LINEAR, 2 * TOKENS * (QKV + 3 * 3 * 32)),
        (["q_proj", "v_proj"], 2 * TOKENS * (QKV + 2 * 3 * 32) + ONE_PRODUCT),  # and of its keys
        (["gate_proj", "up_proj"], 2 * TOKENS * (QKV + 32 * 32 + 2 * MLP + 2 * 3 * 32) + 4 * ONE_PRODUCT),
        (["down_proj"], 2 * TOKENS * (QKV + 32 * 32 + 3 * MLP + 3 * 48) + 4 * ONE_PRODUCT),
    ],
    ids=str,
)
def test_a_step_of_lora(targets: list[str], left_out: int) -> None:
    model = tiny_model("llama")
    full = read_flops(model)
    wrapped: Any = get_peft_model(model, LoraConfig(r=3, target_modules=targets, init_lora_weights=False))
    flops = read_flops(wrapped)
    assert count(wrapped, backward=True) == expected(flops) - left_out
    assert expected(full) != expected(flops)
    frozen = read_flops(wrapped.requires_grad_(False))
    assert frozen.per_token > read_flops(tiny_model("llama").requires_grad_(False)).per_token


def test_only_some_layers_train() -> None:
    """Below the lowest layer that trains, no module needs a gradient."""
    model: Any = tiny_model("llama", num_hidden_layers=4).requires_grad_(False)
    frozen = expected(read_flops(model))
    model.model.layers[2].requires_grad_(True)
    result = expected(read_flops(model))
    assert count(model, backward=True) == result
    model.model.layers[0].requires_grad_(True)
    assert frozen < result < expected(read_flops(model))


def test_adapters_in_force_count_alone() -> None:
    """Neither the other adapter counts, nor the frozen copy of a trained head."""
    lora = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model: Any = get_peft_model(tiny_model("llama"), lora)
    alone = read_flops(model)
    left_out = 2 * TOKENS * (QKV + 3 * 32) + 2 * ONE_PRODUCT
    assert count(model, backward=True) == expected(alone) - left_out
    model.add_adapter("other", LoraConfig(r=7, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    assert read_flops(model) == alone
    model.set_adapter("other")
    assert read_flops(model) != alone


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def with_lora_on_parameters(model_type: str, targets: list[str], rank: int = 3) -> Any:
    config = LoraConfig(r=rank, target_modules=[], target_parameters=targets, init_lora_weights=False)
    return get_peft_model(tiny_model(model_type), config)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("targets", [STACKS, STACKS[:1], STACKS[1:]], ids=["both", "gate and up", "down"])
def test_lora_on_experts_by_hand(model_type: str, targets: list[str]) -> None:
    """A token multiplies with A and B of the experts that it is routed to, not of all, in each layer with experts."""
    rank, config, plain = 3, tiny_config(model_type), tiny_model(model_type).requires_grad_(False)
    frozen = read_flops(plain).per_token
    inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
    sizes = {STACKS[0]: config.hidden_size + 2 * inner, STACKS[1]: inner + config.hidden_size}
    layers = sum(name.endswith(STACKS[0]) for name, _ in plain.named_parameters())
    adapters = layers * config.num_experts_per_tok * rank * sum(sizes[name] for name in targets)
    model = with_lora_on_parameters(model_type, targets, rank)
    # frozen products twice, forward and for the gradients of inputs; those of A and B a third time for their own
    assert read_flops(model).per_token == 2 * frozen + 3 * 2 * adapters
    assert read_flops(model.requires_grad_(False)).per_token == frozen + 2 * adapters
    held = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    assert held > adapters, "all experts' A and B are more"


def test_lora_on_a_matrix_that_is_a_parameter() -> None:
    """A router's, of which a token multiplies with all."""
    config, plain = tiny_config("qwen3_moe"), tiny_model("qwen3_moe").requires_grad_(False)
    layers = sum(name.endswith("mlp.gate.weight") for name, _ in plain.named_parameters())
    adapters = layers * 3 * (config.hidden_size + config.num_experts)
    wrapped = with_lora_on_parameters("qwen3_moe", ["mlp.gate.weight"])
    assert read_flops(wrapped).per_token == 2 * read_flops(plain).per_token + 3 * 2 * adapters


def test_adapters_without_a_formula() -> None:
    for config in (
        LoraConfig(target_modules=["q_proj"], use_dora=True),
        LoraConfig(target_modules=["embed_tokens"]),
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    ):
        wrapped: Any = get_peft_model(tiny_model("qwen3_moe"), config)
        with pytest.raises(UnsupportedModelError, match="no formula for PEFT's"):
            read_flops(wrapped)


def test_rows_that_train_alone() -> None:
    """With PEFT's trainable_token_indices, the weight with those rows is frozen, and so is a tied head's."""
    lora = LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[5, 6], init_lora_weights=False)
    model: Any = get_peft_model(tiny_model("llama", tie_word_embeddings=False), lora)
    assert count(model, backward=True) == expected(read_flops(model))
    tied: Any = get_peft_model(tiny_model("llama", tie_word_embeddings=True), lora)
    assert read_flops(tied) == read_flops(model)


def test_a_classifier_and_a_bare_backbone() -> None:
    model: Any = tiny_model("llama", auto=AutoModelForSequenceClassification, num_labels=3)
    whole, bare = read_flops(model), read_flops(model.model)
    assert whole.per_token - bare.per_token == 6 * 32 * 3
    assert whole.per_pair == bare.per_pair


def test_four_bit_weights_have_their_own_sizes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model: Any = tiny_model("llama")
    plain = read_flops(model.requires_grad_(False))
    for layer in model.model.layers:
        stock = layer.mlp.down_proj
        layer.mlp.down_proj = bitsandbytes.nn.Linear4bit(stock.in_features, stock.out_features, bias=False)
        layer.mlp.down_proj.weight.requires_grad_(False)
    assert read_flops(model) == plain
    quantized = model.model.layers[0].mlp.down_proj.to("cpu")
    assert quantized.weight.numel() <= 48 * 32


def test_windows() -> None:
    assert set(read_flops(tiny_model("gemma2")).per_pair) == {WINDOW, None}
    with pytest.raises(UnsupportedModelError, match="no formula"):
        read_flops(
            tiny_model(
                "llama4_text", attention_chunk_size=6, num_hidden_layers=2, layer_types=["chunked_attention"] * 2
            )
        )


def test_towers_are_left_out() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 5, "image_size": 28, "patch_size": 14}
    text = tiny_config("gemma3_text", num_hidden_layers=2).to_dict()
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config={**vision, "num_attention_heads": 2})
    model: Any = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    assert any("vision_tower" in name for name, _ in model.named_parameters())
    assert count(model, backward=False) == expected(read_flops(model)), "of text"


def test_wrappers_and_what_is_no_model() -> None:
    with pytest.raises(UnsupportedModelError):
        read_flops(nn.Linear(2, 2))
    model = tiny_model("llama")
    assert read_flops(nn.DataParallel(model)) == read_flops(model)
