"""Models with LoRA, IA3 and quantised layers, as users make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    FLOAT32_BOUND,
    compare,
    make_sequences,
    run_batch,
)
from peft import (
    IA3Config,
    LoraConfig,
    get_peft_model,
)
from tiny import VOCAB, tiny_model
from torch import nn

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


KINDS = ("padded left", "TRL's keywords")


def lora_config(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **settings})


def with_lora(model: nn.Module, **settings: Any) -> Any:
    """LoRA whose B is not zero, so that it takes part."""
    torch.manual_seed(1)
    wrapped = get_peft_model(model, lora_config(**settings))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return wrapped.train()


def with_ia3(model: nn.Module, **settings: Any) -> Any:
    """IA3 whose scales are not one, so that it takes part: before down_proj, behind the others."""
    torch.manual_seed(1)
    settings = {"target_modules": TARGETS, "feedforward_modules": ["down_proj"], **settings}
    wrapped = get_peft_model(model, IA3Config(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "ia3_l" in name:
                parameter.normal_(mean=1, std=0.3)
    return wrapped.train()


def quantised(
    tmp_path: Path, *, model_type: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any
) -> nn.Module:
    """A tiny model whose projections are bitsandbytes layers."""
    model = tiny_model(model_type, hidden_size=64, intermediate_size=128, head_dim=16)
    return loaded_again(tmp_path, model, dtype, **settings)


def loaded_again(folder: Path, model: nn.Module, dtype: torch.dtype, device: str = "cpu", **settings: Any) -> nn.Module:
    """By transformers, with bitsandbytes' layers."""
    model.save_pretrained(folder)
    return loaded(folder, dtype, device, **settings)


def loaded(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **settings: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=BitsAndBytesConfig(**settings),
        attn_implementation="eager",
        dtype=dtype,
        device_map={"": device},
    ).train()
    assert any(type(module).__module__ == "bitsandbytes.nn.modules" for module in model.modules())
    return model


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def nf4(tmp_path: Path, compute_dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    return quantised(tmp_path, **NF4, bnb_4bit_compute_dtype=compute_dtype, **settings)


def check(model: nn.Module, alone: Any, bound: float = FLOAT32_BOUND) -> None:
    for kind in KINDS:
        error = compare(run_batch(model, make_sequences(VOCAB), kind), alone)
        assert error.worst <= bound, f"{kind}: {error}"
    assert alone.grads, "something is trained"


def qlora(
    tmp_path: Path,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    *,
    prepared: bool,
    reentrant: bool | None = None,
    model_type: str = "llama",
) -> Any:
    """LoRA over NF4 that computes in a dtype of its own, from a checkpoint in ``dtype``; norms, and embeddings (for the
    gradient of the input), are trained too. Prepared by PEFT, or with norms and head in float32 alone."""
    from peft import prepare_model_for_kbit_training

    model = nf4(tmp_path, compute_dtype, model_type=model_type, dtype=dtype)
    if prepared:
        checkpointing = {"use_reentrant": reentrant}
        model = prepare_model_for_kbit_training(model, reentrant is not None, checkpointing)
    model = with_lora(model)
    for name, parameter in model.named_parameters():
        if "norm" in name or "lm_head" in name:
            parameter.data = parameter.data.float()
        if "norm" in name or "embed_tokens" in name:
            parameter.requires_grad_()
    return model


def in_float32(model: Any) -> Any:
    """What the same weights give without rounding."""
    for module in model.modules():
        if type(module).__module__ == "bitsandbytes.nn.modules":
            module.compute_dtype = torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.float() if parameter.is_floating_point() else parameter.data
    return model
