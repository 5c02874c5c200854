"""Settings of tiny configs, by family, that the general rules in :mod:`fastpack.exactness.tiny` don't cover.

:data:`NEEDS`, by a config's ``model_type``, holds shapes that depend on each other. Every small config gets them.
:data:`TRAITS`, by the name in the causal-LM mapping, holds traits that the default config leaves out. A small copy of a
user's config doesn't get them: it keeps the user's traits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Fixed(int):
    """A width that does not grow with the heads, since another library's architecture has it."""


VOCAB = 97
HIDDEN, FFN = 64, 128
HEADS, KV_HEADS, HEAD_DIM, ROPE_DIM = 4, 2, 16, 8
EXPERTS, ACTIVE = 4, 2
RANK = 32
STATE = 16
WINDOW = 8
POSITIONS = 256
BEYOND = 16
"""The length in tokens beyond which RoPE is scaled, if a family scales it."""
INDEX_HEADS = 32
"""The number of heads of an indexer, which sums scores, clipped at 0, over its heads. With few heads, several keys
would score exactly 0, and the sort would decide which of these keys is kept."""

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def layers(*kinds: str, name: str = "layer_types", **more: Any) -> dict[str, Any]:
    """Return the settings for exactly these layers."""
    return {"num_hidden_layers": len(kinds), name: list(kinds), **more}


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
STATIC_NTK: dict[str, Any] = {"rope_parameters": {**ROPE, "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
MROPE: dict[str, Any] = {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
SCALED_QUERIES: dict[str, Any] = {**ROPE, "original_max_position_embeddings": BEYOND, "llama_4_scaling_beta": 0.5}
MIXED = layers(SLIDING, FULL, SLIDING, FULL)
MIXED_BY_CHOICE: dict[str, Any] = {**MIXED, "use_sliding_window": True, "sliding_window": WINDOW}
DENSE_FIRST: dict[str, Any] = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
"""For families whose sdpa attention in transformers 5.17 can't be the oracle: it drops the softcap or is not causal."""
ONE_CODEBOOK: dict[str, Any] = {"num_codebooks": 1}
"""With one codebook, each row of ids is a sequence; with several, the model sums several rows of ids into one."""

GEMMA4_EXPERTS: dict[str, Any] = {
    **MIXED,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": EXPERTS,
    "top_k_experts": ACTIVE,
}
GEMMA4_UNIFIED: dict[str, Any] = {**MIXED, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
KOSMOS: dict[str, Any] = {"embed_dim": HIDDEN // 2, "layers": 4}
"""Wider models have larger rounding errors in the gradients of key biases, which are 0; Kosmos-2 can't run in float64,
to measure them."""
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,  # three attend in chunks with RoPE, one attends to all tokens without RoPE
    "interleave_moe_layer_step": 2,
}
DOTS3: dict[str, Any] = {
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_q_lora_rank": RANK,
    "swa_kv_lora_rank": RANK,
    "swa_head_dim": 3 * ROPE_DIM,
    "swa_qk_nope_head_dim": 2 * ROPE_DIM,
    "swa_v_head_dim": HEAD_DIM,
    "head_dim": 3 * ROPE_DIM,
}
QWEN4: dict[str, Any] = {
    "indexer_n_heads": INDEX_HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": WINDOW,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],  # n-grams of token ids, which reach back beyond a sequence's first token
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 2,
}

NEEDS: Mapping[str, Mapping[str, Any]] = {
    "big_bird": {
        "block_size": 4,
        "num_random_blocks": 1,
    },  # a row of up to 28 tokens switches the model to full attention for good
    "blt": {
        "use_cache": False,  # the default fails: it makes a cache from a config without layers
        "patching_threshold": 3.85,  # with random weights, the default makes every patch one byte long
        "encoder_hash_byte_group_vocab": 101,
        "encoder_config": {"num_key_value_heads": HEADS},
        "decoder_config": {"num_key_value_heads": HEADS},
    },
    "chameleon": {
        "vocabulary_map": {
            "<image>": VOCAB - 1,
            **{f"IMGIMG{code}Z": VOCAB - 9 + i for i, code in enumerate("ABCDEFGH")},
        },
        "vq_config": {
            "embed_dim": HEAD_DIM,
            "num_embeddings": 8,
            "latent_channels": 32,
            "resolution": 16,
            "base_channels": 32,  # its groups
            "channel_multiplier": [1, 1, 1, 1],
            "num_res_blocks": 1,
        },
    },
    "cpmant": {"init_std": 0.02, "prompt_length": 4, "prompt_types": 4, "segment_types": 4},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_topk": 2,
        "qk_rope_head_dim": ROPE_DIM,
        "num_key_value_heads": 1,
    },
    "doge": EAGER,
    "dory": {
        "initializer_range": 0.1
    },  # with the default, the inputs of its norms are so small that the stock model is off by 1e-4
    "dots3_note": DOTS3,
    "dots3_note_text": DOTS3,
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [64, 32]},
    "gemma2": EAGER,
    "gemma4_text": {"global_head_dim": 2 * HEAD_DIM},
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD_DIM},
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 2},
    "got_ocr2": {"vision_config": {"image_size": 64, "mlp_dim": FFN, "output_channels": HEAD_DIM}},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "jamba": {
        "num_hidden_layers": 4,  # both mixers, each with experts and without
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
    },
    "kosmos_2_text_model": KOSMOS,
    "kosmos_2_5_text_model": KOSMOS,
    "mamba2": {"num_heads": 2 * HIDDEN // HEAD_DIM},
    "minimax_m3_vl_text": {"index_n_heads": KV_HEADS, "index_block_size": 2, "index_topk_blocks": 3},
    "moshi": ONE_CODEBOOK,
    "musicgen_decoder": ONE_CODEBOOK,
    "musicgen_melody_decoder": ONE_CODEBOOK,
    "phi4_multimodal": {"audio_config": {"nemo_conv_channels": HEAD_DIM, "ext_pw_out_channel": HIDDEN}},
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 4, "block_types": ["recurrent", "attention"]},
    "reformer": {
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_embds": False,  # axial embeddings need rows of one length
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "unlimited_ocr_text": {"num_key_value_heads": HEADS},  # its eager attention can't share keys
    "vaultgemma": EAGER,
    "xlstm": {
        "hidden_size": 2 * HIDDEN,  # the width of all queries is rounded up to a multiple of 64
        "embedding_dim": 2 * HIDDEN,
        "use_cache": False,  # the cache is written in place, so rows longer than a chunk have no backward
    },
    "zamba": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD_DIM, "n_mamba_heads": 2},
}
"""Shapes that depend on each other, and other settings that a small model of the family needs to run."""

TRAITS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "cohere": {"use_qk_norm": True},
    "cohere_compass_text": {**MIXED, "rope_parameters": {SLIDING: {**ROPE, "mrope_section": [3, 3, 2]}, FULL: None}},
    "dbrx": {"attn_config": {"clip_qkv": 0.5, "rope_theta": 10_000.0}},
    "cosmos3_edge_text": MROPE,
    "deepseek_ocr2_text": DENSE_FIRST,
    "dots1": {**MIXED, "n_shared_experts": 1},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}},
    "gemma2": {"attn_logit_softcapping": 2.0},
    "gemma3n_text": {**MIXED, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4": {"text_config": GEMMA4_EXPERTS},
    "gemma4_text": {**MIXED, "num_kv_shared_layers": 2},
    "gemma4_unified": {"text_config": GEMMA4_UNIFIED},
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "glm4v_text": MROPE,
    "glm4v_moe_text": {"rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0}},
    "glm5_next_text": layers(
        LINEAR,
        FULL,
        FULL,
        LINEAR,
        indexer_types=["full", "full", "shared", "full"],
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        swiglu_limit=2.0,
    ),
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full", "shared"]},
    "glm_ocr_text": MROPE,
    "granitemoehybrid": layers(LINEAR, FULL, LINEAR, FULL),
    "hunyuan_v1_dense": STATIC_NTK,
    "hunyuan_v1_moe": STATIC_NTK,
    "hy_v4_vl_text": {
        "indexer_types": ["full", "shared"],
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]},
    },
    "hunyuan_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [2, 2, 2, 2]}},
    "laguna": layers(
        FULL,
        SLIDING,
        FULL,
        SLIDING,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        num_attention_heads_per_layer=[HEADS, 2 * HEADS, HEADS, 2 * HEADS],
    ),
    "lfm2": layers("conv", FULL, "conv", FULL),
    "lfm2_moe": layers("conv", FULL, "conv", FULL),
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
    "longcat_flash": {"zero_expert_num": 2},
    "mellum": MIXED,
    "mimo_v2_flash": {"v_head_dim": HEAD_DIM - 4},
    "minimax_m3_vl_text": layers(
        FULL,
        FULL,
        "minimax_m3_sparse",
        "minimax_m3_sparse",
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    ),
    "ministral3": {"sliding_window": WINDOW, "rope_parameters": SCALED_QUERIES},
    "mistral4": {
        "rope_parameters": {
            **SCALED_QUERIES,
            "rope_type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "partial_rotary_factor": ROPE_DIM / (HEAD_DIM + ROPE_DIM),
        },
        "first_k_dense_replace": 1,
    },
    "mistral_large4_text": {
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["indexed_attention"] * 4,
        "indexer_types": ["full", "shared", "full", "shared"],
        "no_rope_layers": [1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1],
    },
    "mixtral": {"sliding_window": WINDOW},
    "molmo2_text": {
        "rope_scaling_layers": [0],
        "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0},
    },
    # with the default, scores are so large that the stock model is off by 1e-5
    "muse_glimmer_text": {"qk_scale_factor": 1.5},
    "muse_spark_text": {
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "qk_scale_factor": 1.5,
    },
    "mllama": {"num_hidden_layers": 3, "cross_attention_layers": [1]},  # skipped without an image
    "nemotron_h": layers(LINEAR, "moe", FULL, "mlp", LINEAR, FULL, name="layers_block_type"),
    "olmo": {"clip_qkv": 0.5},
    "olmoe": {"clip_qkv": 0.5},
    "paddleocr_vl_text": MROPE,
    "phi": {"qk_layernorm": True},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {"sliding_window": WINDOW},
    "qwen2": MIXED_BY_CHOICE,
    "qwen2_5_omni_text": {**MIXED_BY_CHOICE, **MROPE},
    "qwen2_5_vl_text": {**MIXED_BY_CHOICE, **MROPE},
    "qwen2_moe": {**MIXED_BY_CHOICE, "mlp_only_layers": [1]},
    "qwen2_vl_text": {**MIXED_BY_CHOICE, **MROPE},
    "qwen3": MIXED_BY_CHOICE,
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_omni_moe_text": {**MROPE, "mlp_only_layers": [1]},
    "qwen3_vl_moe_text": {**MROPE, "mlp_only_layers": [1]},
    "qwen3_vl_text": MROPE,
    "qwen3_next": {"mlp_only_layers": [1]},
    "starcoder2": {"sliding_window": WINDOW},
    "step3p5": {
        **MIXED,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_sliding_attention_heads": 2 * HEADS,
        "sliding_window": WINDOW,
        "swiglu_limits": [0.0, 0.0, 2.0, 2.0],
        "swiglu_limits_shared": [2.0, 0.0, 0.0, 2.0],
        "share_expert_dim": HIDDEN,
        "query_pre_attn_scalar": HEAD_DIM,
        "rope_parameters": {FULL: {**ROPE, "partial_rotary_factor": 0.5}, SLIDING: ROPE},
    },
    "vaultgemma": {"attn_logit_softcapping": 2.0},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_mem_blocks": 2},
    "zaya": {
        **layers("hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"),
        "sliding_window": WINDOW,
        "num_experts_per_tok": 1,
    },
}
"""Traits of a family that its default config does not show."""

DRAFT = "a draft head: its forward needs the hidden states, keys and values of the model that it drafts for"
NOT_BUILT: Mapping[str, str] = {
    "gemma3n": "its image tower is timm's, which fastpack does not install; gemma3n_text has the same language model",
    "gemma4_assistant": DRAFT,
    "gemma4_unified_assistant": DRAFT,
}
"""The families that can't be built tiny, or can't run on token ids alone, and why."""
