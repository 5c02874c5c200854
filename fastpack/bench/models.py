"""The timed models, with real shapes and random weights; trained whole, with LoRA, or with LoRA on 4-bit weights."""

from __future__ import annotations

from typing import Any

import torch

import fastpack
from fastpack.bench import stock_varlen
from fastpack.bench.settings import RunSettings
from fastpack.bench.shapes import TOWER, has_images, make_config
from fastpack.model.unwrap import find_parts

LORA_RANK = 16


def auto_class(shape: str) -> Any:
    """Return the auto class of transformers that builds a shape's model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_images(shape) else AutoModelForCausalLM


def build_model(settings: RunSettings, device: torch.device) -> tuple[Any, str]:
    """Return a variant's model on ``device``, in training mode, and the name of the stock model's attention kernel.

    For ``DPOTrainer`` and ``GRPOTrainer`` the model is plain: the trainer adds adapters and a reference, and is patched
    as a whole.
    """
    variant = settings.spec
    stock = backend = "sdpa"
    if variant.varlen and not variant.patched:
        stock, backend = stock_varlen.implementation()
    torch.manual_seed(settings.seed)
    config = make_config(settings.shape)
    with device:
        model: Any = auto_class(settings.shape).from_config(config, dtype=dtype_of(device), attn_implementation=stock)
    if variant.varlen and has_images(settings.shape):
        stock_varlen.use_in_tower(model)
    if settings.mode == "qlora":
        model = quantised(model)
    if settings.trainer != "sft":
        return model.train(), backend
    if settings.mode != "full":
        model = with_lora(model)
    if variant.patched:
        patch(model, settings)
    return model.train(), backend


def patch(target: Any, settings: RunSettings) -> None:
    """Patch a model or trainer with the options of the settings."""
    fastpack.patch(
        target,
        attention=settings.attention,
        kernels=settings.kernels,
        graphs=settings.graphs,
        loss="fused" if settings.spec.fused else settings.loss,
        offload=settings.offload,
        share_prefixes="auto" if settings.spec.shared else None,
    )


def quantised(model: Any) -> Any:
    """Return the model with every linear layer except the head in bitsandbytes' NF4, with double quantisation.

    The model is loaded as a user loads a checkpoint, but from the weights in memory instead of a file.
    """
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=model.dtype,
    )
    return type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        quantization_config=how,
        device_map={"": model.device},
        dtype=model.dtype,
        attn_implementation=model.config._attn_implementation,
    )


def lora_config(tower: str | None = None) -> Any:
    """Return the config of LoRA of rank 16 on every linear layer except the head, without dropout.

    Args:
        tower: the name of an image tower that stays frozen, as most recipes for vision-language models have it, or
            None.
    """
    from peft import LoraConfig

    return LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        lora_dropout=0.0,
        target_modules="all-linear",
        exclude_modules=None if tower is None else rf".*\.{tower}\..*",
        task_type="CAUSAL_LM",
    )


def with_lora(model: Any) -> Any:
    """Add LoRA (:func:`lora_config`).

    On 4-bit weights, A and B are bfloat16, as in TRL.
    """
    from peft import get_peft_model

    wrapped = get_peft_model(model, lora_config(TOWER if find_parts(model).composite is not None else None))
    if getattr(model, "is_loaded_in_4bit", False):
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return wrapped


def dtype_of(device: torch.device) -> torch.dtype:
    """Return the dtype of the weights on a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
