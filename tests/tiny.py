"""Tiny models of every family, from their own config classes, with random weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

VOCAB = 97
EXPERTS = (
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
"""Families of the fast rung that stand for all: there is one here for each form of attention."""
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
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
MLA_MOE: dict[str, Any] = {**MLA, **MOE}
MIXED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MIXED_MOE: dict[str, Any] = {**MIXED, **MOE}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
STATIC_NTK: dict[str, Any] = {"rope_parameters": {**ROPE, "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
POSITION_TABLE: dict[str, Any] = {"max_position_embeddings": 128}
"""Learned positions: a table long enough for the negative control, which counts on through all sequences."""

SPECIAL: dict[str, dict[str, Any]] = {
    "afmoe": MIXED_MOE,
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 24},
    "axk1": MLA_MOE,
    "beam": MIXED_MOE,
    "biogpt": {**POSITION_TABLE, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    "cohere": {"use_qk_norm": True, "head_dim": None},
    "cohere2": MIXED,
    "cohere2_moe": MIXED_MOE,
    "cohere_compass_text": {**MIXED, "rope_parameters": {"sliding_attention": ROPE, "full_attention": None}},
    "ctrl": {**POSITION_TABLE, "dff": 48},
    "cwm": MIXED,
    "dbrx": {
        "d_model": 32,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": MLA_MOE,
    "deepseek_v3": MLA_MOE,
    "dots1": MIXED_MOE,
    "dory": {"initializer_range": 0.1, "sliding_window": WINDOW},  # see fastpack/smoke/special.py
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "exaone4": MIXED,
    "exaone_moe": MIXED_MOE,
    "flex_olmo": MOE,
    "flint": MIXED_MOE,
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "glm4_moe": MOE,
    "glm4_moe_lite": MLA_MOE,
    "gpt2": POSITION_TABLE,
    "gpt_bigcode": {**POSITION_TABLE, "attn_pdrop": 0.0},
    "gpt_oss": MIXED_MOE,
    "granite_swa": MIXED,
    "granitemoe": MOE,
    "granitemoe_swa": MIXED_MOE,
    "granitemoeshared": {**MOE, "shared_intermediate_size": 24},
    "hunyuan_v1_dense": STATIC_NTK,
    "hunyuan_v1_moe": {**STATIC_NTK, **MOE, "moe_topk": 2},
    "hy_v3": MOE,
    "jetmoe": MOE,
    "kolibri1": MIXED_MOE,
    "laguna": MIXED_MOE,
    "longcat_flash": {
        **MLA_MOE,
        "num_layers": 2,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
    },
    "mellum": MIXED_MOE,
    "mimo_v2_flash": {**MIXED_MOE, "v_head_dim": 6},
    "minicpm3": MLA,
    "minimax_m2": MOE,
    "ministral": MIXED,
    "ministral3": {
        "sliding_window": WINDOW,
        "rope_parameters": {**ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
    },
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, **MOE},
    "modernbert-decoder": MIXED,
    "olmo": {"clip_qkv": 0.5},
    "olmo3": MIXED,
    "olmoe": {**MOE, "clip_qkv": 0.5},
    "phi": {"qk_layernorm": True},
    "phi3": {"sliding_window": WINDOW, "head_dim": None},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "head_dim": None},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 1, "head_dim": None, **MIXED_MOE},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3_moe": {"mlp_only_layers": [1], **MOE},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layer_interval": 2, "head_dim": None},
    "solar_open": MOE,
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {**MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "youtu": MLA,
}
"""What a family needs beside :data:`COMMON`, chosen so that its own traits (windows, softcap, experts) take part."""


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A config of this family with two small layers; None as a value leaves the family's default."""
    from transformers import AutoConfig

    # A copy: configs fill in and correct the lists and dicts that they are given.
    settings = copy.deepcopy({**COMMON, **SPECIAL.get(model_type, {}), **overrides})
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
