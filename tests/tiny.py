"""The tiny models of :mod:`fastpack.exactness.tiny` for most tests: heads of 8, eager attention, training mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastpack.exactness import tiny
from fastpack.exactness.family_settings import VOCAB, WINDOW

__all__ = ["EXPERTS", "FAST", "HEAD_DIM", "VOCAB", "WINDOW", "tiny_config", "tiny_model"]

HEAD_DIM = 8
PATTERNS = ("layer_types", "no_rope_layers")
EXPERTS = (
    "afmoe",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "minimax_m2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)
FAST = (
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "granite",
    "granite_swa",
    "hunyuan_v1_dense",
    "llama",
    "ministral3",
    "mistral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
    *EXPERTS,
)
"""Families that stand for the whole fast tier, one for each form of attention."""


def tiny_config(model_type: str, head_dim: int | None = None, **overrides: Any) -> Any:
    """Return a small config of this family, of two layers for :data:`FAST`; ``head_dim`` sets the heads alone."""
    if model_type in FAST:
        overrides = {"intermediate_size": 48, **overrides}
    config = tiny.tiny_config(model_type, head_dim=HEAD_DIM, **overrides)
    patterns = {name: list(dict.fromkeys(getattr(config, name, None) or ())) for name in PATTERNS}
    patterns = {name: kinds for name, kinds in patterns.items() if len(kinds) == 2}
    if model_type in FAST and patterns and not overrides.keys() & {"num_hidden_layers", *PATTERNS}:
        config = tiny.tiny_config(model_type, head_dim=HEAD_DIM, num_hidden_layers=2, **patterns, **overrides)
    if head_dim is not None:
        config.head_dim = head_dim
    return config


def tiny_model(
    model_type: str, *, attn_implementation: str = "eager", seed: int = 0, auto: Any = None, **overrides: Any
) -> nn.Module:
    """Return a model of this family with random weights, in training mode without dropout; torch gets the same seed."""
    config = tiny_config(model_type, attn_implementation=attn_implementation, **overrides)
    make = auto.from_config if auto else tiny.model_class(model_type)._from_config
    torch.manual_seed(seed)
    model = tiny.build(make, config, seed, head_dim=HEAD_DIM, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # the head's dropout, which no config turns off
            module.p = 0.0
    return model.train()
