"""Tiny models with experts, and LoRA on their stacks as PEFT lays it out (``target_parameters``)."""

from __future__ import annotations

from typing import Any

import torch
from adapter_cases import KINDS, check
from oracle import FLOAT32_BOUND, Result, make_sequences, run_alone, run_batch
from peft import LoraConfig, get_peft_model
from tiny import VOCAB, tiny_model
from torch import nn

import fastpack
from fastpack.exactness.expert_choices import choosers_of, recorded, replayed
from fastpack.exactness.rule import FACTOR, compare_draws

FAMILIES = ("qwen3_moe", "gpt_oss")
"""Stacks as most families have them; and transposed ones with biases, interleaved columns and clamps."""
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ROUTERS = ("Qwen3MoeTopKRouter", "GptOssTopKRouter")
DRAWS = 3
COUNTS = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}


def expert_model(model_type: str, **overrides: Any) -> Any:
    """Return a model whose two layers have five experts each."""
    every_layer = {"mlp_only_layers": [], "num_hidden_layers": 2} if model_type == "qwen3_moe" else {}
    return tiny_model(model_type, **{COUNTS[model_type]: 5, **every_layer, **overrides})


def lora_config(**settings: Any) -> LoraConfig:
    """Return a config of LoRA on q, v and both stacks."""
    common = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "target_parameters": list(STACKS)}
    return LoraConfig(**{**common, "task_type": "CAUSAL_LM", **settings})


def fill(model: nn.Module, seed: int = 1) -> None:
    """Give each B values other than zero, so that adapters take part."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)


def with_expert_lora(model: nn.Module, **settings: Any) -> Any:
    torch.manual_seed(1)
    wrapped = get_peft_model(model, lora_config(**settings))
    fill(wrapped)
    return wrapped.train()


def blocks_of(model: nn.Module) -> list[Any]:
    """Return the innermost block of experts of each layer."""
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def outermost_of(model: Any) -> list[Any]:
    """Return what stands in the place of each block: the block itself, or a wrapper of PEFT around it."""
    return [layer.mlp.experts for layer in plain(model).model.layers]


def reasons(model: Any) -> list[str]:
    """Return why blocks of experts of a patched model run stock, as its report says."""
    return [why for what, why in fastpack.report(model).skipped if what.endswith("Experts")]


def plain(model: Any) -> Any:
    """Return the model inside PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_against_stock(
    model: nn.Module, stock: nn.Module, calls: list[Any], runs: int = 2, bound: float = FLOAT32_BOUND
) -> None:
    """Check logits, loss and gradients of a patched model against a stock one on each sequence alone.

    Args:
        model: the patched model.
        stock: the stock model.
        calls: the calls of the op of experts so far; afterwards those of this check.
        runs: the number of layers that call it in each forward.
        bound: the largest error.
    """
    assert fastpack.is_patched(model)
    assert not fastpack.is_patched(stock)
    alone = run_alone(stock, make_sequences(VOCAB))
    calls.clear()
    check(model, alone, bound)
    assert len(calls) == runs * len(KINDS)


def check_half(model: nn.Module, stock: nn.Module, wide: nn.Module, calls: list[Any], autocast: str = "") -> None:
    """Check that a model is at most 1.5 times as far from a float32 copy as the stock one, with the copy's routing.

    Args:
        model: the patched model.
        stock: the stock model.
        wide: the float32 copy.
        calls: the calls of the op of experts so far; afterwards those of this check.
        autocast: the device whose autocast is on for the first two; empty for none.
    """
    results: dict[str, list[Result]] = {"wide": [], "stock": [], "ours": []}
    calls.clear()
    for seed in range(DRAWS):
        sequences = make_sequences(VOCAB, (7, 1, 9), seed)
        with recorded(choosers_of(wide, ROUTERS)) as chosen:
            results["wide"].append(run_alone(wide, sequences))
        for name, each in (("stock", stock), ("ours", model)):
            held = replayed(choosers_of(each, ROUTERS), chosen())
            with held, torch.autocast(autocast or "cpu", torch.bfloat16, enabled=bool(autocast)):
                alone = run_alone(each, sequences) if name == "stock" else run_batch(each, sequences, KINDS[0])
            results[name].append(alone)
    allowed, error = (compare_draws(results[name], results["wide"], half=True) for name in ("stock", "ours"))
    assert 1e-4 < error.logits <= FACTOR * allowed.logits
    assert 1e-4 < error.grads <= FACTOR * allowed.grads
    assert len(calls) == 2 * DRAWS
    assert all(any(setting is torch.bfloat16 for setting in call) for call in calls)
