"""Tiny models of every family, from their own config classes, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB = 97
WINDOW = 8
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

SPECIAL: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True, "head_dim": None},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, **MOE},
    "phi3": {"sliding_window": WINDOW, "head_dim": None},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "head_dim": None},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [1], **MOE},
    "smollm3": {"no_rope_layer_interval": 2, "head_dim": None},
}
"""What a family needs beside :data:`COMMON`, chosen so that its own traits (windows, softcap, experts) take part."""


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A config of this family with two small layers; None as a value leaves the family's default."""
    from transformers import AutoConfig

    settings = {**COMMON, **SPECIAL.get(model_type, {}), **overrides}
    return AutoConfig.for_model(model_type, **{k: v for k, v in settings.items() if v is not None})


def tiny_model(
    model_type: str, *, attn_implementation: str = "eager", seed: int = 0, auto: Any = None, **overrides: Any
) -> nn.Module:
    """A model of this family with random weights, in training mode with no dropout.

    Weights are drawn larger than by the family's own initialisation, so that attention is far from uniform, and
    norms are perturbed, so that a wrong formula shows.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_config(model_type, **overrides)
    config._attn_implementation = attn_implementation
    model = (auto or AutoModelForCausalLM).from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.ndim > 1 else parameter + 0.1 * noise)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()
