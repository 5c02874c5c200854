"""Unsloth's model of a shape, loaded and adapted by Unsloth's public functions.

The base weights and LoRA's A and B are those of the other variants, so that losses and gradients can be compared.

Source: https://unsloth.ai/docs/get-started/fine-tuning-llms-guide and https://unsloth.ai/docs/new/faster-moe.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from fastpack.bench.models import (
    EXPERTS,
    build_base,
    dtype_of,
    linear_layers,
    lora_config,
    quantised,
    with_lora,
)
from fastpack.bench.settings import RunSettings
from fastpack.bench.shapes import has_experts
from fastpack.errors import FastpackError
from fastpack.testing.id_tokenizer import tokenizer_of_ids

BACKEND = "Unsloth's"
"""The name to show for the attention kernel, which Unsloth chooses."""


def build_unsloth_model(settings: RunSettings, device: torch.device) -> tuple[Any, str]:
    """Return Unsloth's model of a shape in training mode, and the name of its attention kernel.

    Raises:
        FastpackError: Unsloth's adapters have other names than PEFT's.
    """
    from unsloth import FastLanguageModel

    checkpointing = "unsloth" if settings.checkpointing else False
    with tempfile.TemporaryDirectory() as folder:
        adapters = save_start(settings, device, folder)
        model, _ = FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=max(settings.row_lengths()),
            dtype=dtype_of(device),
            load_in_4bit=settings.mode == "qlora",
            full_finetuning=settings.mode == "full",
            use_gradient_checkpointing=checkpointing,
        )
    if settings.mode != "full":
        model = FastLanguageModel.get_peft_model(
            model,
            r=settings.rank,
            lora_alpha=2 * settings.rank,
            lora_dropout=0,
            target_modules=linear_layers(settings),
            target_parameters=[*EXPERTS] if settings.lora_experts else None,
            use_gradient_checkpointing=checkpointing,
            random_state=settings.seed,
        )
        load_adapters(model, adapters)
    return model.train(), BACKEND


def save_start(settings: RunSettings, device: torch.device, folder: str) -> dict[str, torch.Tensor]:
    """Save the weights of the other variants with a tokenizer, and return their adapters; none for full fine-tuning."""
    from peft import get_peft_model_state_dict

    base, _ = build_base(settings, device)
    base.save_pretrained(folder)
    tokenizer_of_ids().save_pretrained(folder)
    if settings.mode == "full":
        return {}
    if settings.mode == "qlora":
        base = quantised(base, experts=has_experts(settings.shape))
    adapted = with_lora(base, lora_config(settings))
    return {name: value.cpu() for name, value in get_peft_model_state_dict(adapted).items()}


def load_adapters(model: Any, adapters: dict[str, torch.Tensor]) -> None:
    """Copy LoRA's A and B into a PEFT model.

    Raises:
        FastpackError: the model's adapters have other names.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    if others := get_peft_model_state_dict(model).keys() ^ adapters.keys():
        raise FastpackError(f"Unsloth and PEFT do not adapt the same weights: {', '.join(sorted(others)[:4])}.")
    set_peft_model_state_dict(model, adapters)
