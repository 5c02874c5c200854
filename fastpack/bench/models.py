"""The model of a variant: random weights, whole, with LoRA, or with LoRA on 4-bit weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fastpack
from fastpack.bench.settings import Settings
from fastpack.bench.shapes import make_config

LORA_RANK = 16


def build_model(settings: Settings, device: torch.device) -> tuple[Any, str]:
    """Return a variant's model on ``device``, in training mode, and the name of the stock model's attention kernel.

    For ``DPOTrainer`` without adapters and not patched: it makes them itself, and a reference beside the model.
    """
    from transformers import AutoModelForCausalLM

    stock = backend = "sdpa"
    if settings.variant.varlen:
        from fastpack.bench import stock_varlen

        stock, backend = stock_varlen.implementation()
    torch.manual_seed(settings.seed)
    dtype = dtype_of(device)
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            make_config(settings.shape), dtype=dtype, attn_implementation=stock
        )
    if settings.mode == "qlora":
        quantise(model, dtype)
    if settings.trainer == "dpo":
        return model.train(), backend
    if settings.mode != "full":
        model = with_lora(model)
    if settings.variant.patched:
        patch(model, settings)
    return model.train(), backend


def patch(target: Any, settings: Settings) -> None:
    """Patch a model or trainer as the flags say."""
    fastpack.patch(
        target,
        attention=settings.attention,
        kernels=settings.kernels,
        graphs=settings.graphs,
        loss="fused" if settings.variant.fused else settings.loss,
        offload=settings.offload,
        share_prefixes="auto" if settings.variant.shared else None,
    )


def quantise(model: nn.Module, compute_dtype: torch.dtype) -> None:
    """Turn every linear layer but the head into bitsandbytes' NF4 with double quantisation, where it is.

    The result is that of ``from_pretrained`` with a ``BitsAndBytesConfig``, without a checkpoint on disk. One layer
    is converted after the other, so the model is never held twice.
    """
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    head = model.get_output_embeddings()  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is not nn.Linear or layer is head:
                continue
            four_bit = Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                compute_dtype=compute_dtype,
                quant_type="nf4",
                device="meta",
            )
            weight: Any = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=four_bit)
            four_bit.weight = weight.to(layer.weight.device)  # which is when it is quantised
            four_bit.bias = layer.bias
            setattr(parent, name, four_bit)
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # what PEFT and TRL ask


def lora_config() -> Any:
    """LoRA of rank 16 on every linear layer but the head, without dropout."""
    from peft import LoraConfig

    return LoraConfig(
        r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def with_lora(model: Any) -> Any:
    """LoRA of rank 16 on every linear layer but the head.

    On 4-bit weights A and B are bfloat16, which is what TRL makes of them.
    """
    from peft import get_peft_model

    wrapped = get_peft_model(model, lora_config())
    if getattr(model, "is_loaded_in_4bit", False):
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return wrapped


def dtype_of(device: torch.device) -> torch.dtype:
    """Return that of the weights."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
