"""A real checkpoint's config becomes a small one with the same traits, whose thresholds a few dozen tokens cross."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from fastpack.exactness.family_settings import BEYOND, NOT_BUILT, VOCAB, WINDOW
from fastpack.exactness.inputs import make_sequences
from fastpack.exactness.tiny import build, model_class, model_types, shrink

LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [1.0] * 24 + [9.0] * 24,
    "short_factor": [1.0] * 48,
}
LONGEST = 33


def real(model_type: str, **settings: Any) -> Any:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 128_256}
    return AutoConfig.for_model(model_type, **{**sizes, **settings})


REAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama 3.1": (
        lambda: real(
            "llama",
            num_key_value_heads=8,
            max_position_embeddings=131_072,
            eos_token_id=[128_001, 128_009],
            rope_parameters={**LLAMA_3, "original_max_position_embeddings": 8192},
        ),
        {"num_key_value_heads": 2, "num_hidden_layers": 2, "rope_parameters.original_max_position_embeddings": BEYOND},
    ),
    "all heads have their own keys": (lambda: real("llama", num_key_value_heads=32), {"num_key_value_heads": 4}),
    "all heads share one": (lambda: real("llama", num_key_value_heads=1), {"num_key_value_heads": 1}),
    "dynamic": (
        lambda: real("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        {"max_position_embeddings": BEYOND},
    ),
    "phi 3.5": (
        lambda: real(
            "phi3",
            hidden_size=3072,
            max_position_embeddings=131_072,
            original_max_position_embeddings=4096,
            sliding_window=262_144,
            rope_parameters=LONGROPE,
            bos_token_id=1,
            eos_token_id=32_000,
            pad_token_id=32_000,
        ),
        {"original_max_position_embeddings": BEYOND, "sliding_window": WINDOW},
    ),
    "qwen 2 without its window": (lambda: real("qwen2", use_sliding_window=False), {"sliding_window": None}),
    "qwen 2 with its window": (
        lambda: real("qwen2", use_sliding_window=True, sliding_window=4096, max_window_layers=16),
        {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2, "sliding_window": WINDOW},
    ),
    "gemma 2": (lambda: real("gemma2", head_dim=256), {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0}),
    "dense layers among experts": (
        lambda: real("qwen3_moe", mlp_only_layers=[0, 1, 5], num_experts=128, num_experts_per_tok=8),
        {"mlp_only_layers": [0, 1], "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "one expert a token": (
        lambda: real("mixtral", num_local_experts=16, num_experts_per_tok=1, sliding_window=None),
        {"num_experts_per_tok": 1, "sliding_window": None},
    ),
    "attention here and there": (
        lambda: real("bamba", attn_layer_indices=[9, 18, 27]),
        {"attn_layer_indices": [2, 3], "num_hidden_layers": 4},
    ),
    "scaled, tied, biased": (
        lambda: real("granite", embedding_multiplier=12.0, attention_bias=True, tie_word_embeddings=True),
        {"embedding_multiplier": 12.0, "attention_bias": True, "tie_word_embeddings": True, "vocab_size": VOCAB},
    ),
    "no clipping": (lambda: real("olmo", clip_qkv=None), {"clip_qkv": None}),
    "clipping": (lambda: real("olmo", clip_qkv=8.0), {"clip_qkv": 8.0}),
    "latent attention": (
        lambda: real("deepseek_v3", num_hidden_layers=61, q_lora_rank=None, n_group=8, topk_group=4),
        {"q_lora_rank": None, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
}


def at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("head_dim", [8, 16, 64])
@pytest.mark.parametrize("name", REAL)
def test_a_real_config(name: str, head_dim: int) -> None:
    """The small config keeps the traits, the original is unchanged, and the model runs past every threshold."""
    built, expected = REAL[name]
    config = built()
    before = config.to_dict()
    small = shrink(config, head_dim=head_dim)
    assert config.to_dict() == before
    assert type(small) is type(config)
    scaled = {"query_pre_attn_scalar": head_dim}
    assert {key: at(small, key) for key in expected} == {
        **expected,
        **{k: v for k, v in scaled.items() if k in expected},
    }
    model = build(model_class(config.model_type)._from_config, small, head_dim=head_dim, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) < 100_000 * head_dim
    (ids,) = make_sequences([LONGEST])
    assert model(input_ids=ids[None]).logits.isfinite().all()


def test_frequencies_are_as_many_as_a_small_head_has() -> None:
    small = shrink(REAL["phi 3.5"][0]()).rope_parameters
    assert (len(small["long_factor"]), len(small["short_factor"])) == (8, 8)
    assert {*small["long_factor"]} == {1.0, 9.0}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}
    axes = shrink(real("qwen3_5_text", head_dim=128, rope_parameters=rope))
    assert axes.rope_parameters["mrope_section"] == [3, 3, 2]


def test_longrope_changes_beyond_its_length() -> None:
    """Negative control of the small length: no token of a small model would be beyond the real length."""
    (ids,) = make_sequences([LONGEST])
    config = REAL["phi 3.5"][0]()
    small, far = shrink(config), shrink(config)
    far.rope_parameters["original_max_position_embeddings"] = far.original_max_position_embeddings = 4096
    first, other = (
        build(model_class("phi3")._from_config, c, dtype=torch.float32)(input_ids=ids[None]).logits
        for c in (small, far)
    )
    assert not torch.allclose(first, other, rtol=1e-2)


def test_every_default_can_be_shrunk() -> None:
    """Every default config gives a small config of the same class, with the same kinds of layers."""
    failed = {}
    for model_type in set(model_types()) - NOT_BUILT.keys():
        config = model_class(model_type).config_class()
        try:
            small = shrink(config)
        except Exception as error:  # noqa: BLE001 - one failure must not hide the others
            failed[model_type] = error
            continue
        kinds = {*(getattr(config, "layer_types", None) or ())}
        if {*(getattr(small, "layer_types", None) or ())} != kinds:
            failed[model_type] = ValueError(f"{kinds}, not {small.layer_types}")
    assert not failed
