"""The specs that families share. A family's row names one for each of its classes.

Families copy each other, so most have Llama's specs except for a class or two. A spec is named after the family that
made it known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fastpack.families.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    GatedNormSpec,
    HeadSpec,
    LatentAttentionSpec,
    MlpSpec,
    NormSpec,
    SharedAttentionSpec,
    Spec,
)

# --- attention --------------------------------------------------------------------------------------------------------

LLAMA_ATTENTION = AttentionSpec()
QWEN2_ATTENTION = AttentionSpec(window="sliding_window")
MISTRAL_ATTENTION = AttentionSpec(window="config.sliding_window")
MINISTRAL3_ATTENTION = replace(MISTRAL_ATTENTION, scales_by_position=True)
STARCODER2_ATTENTION = AttentionSpec(window="config.sliding_window", out_dropout="residual_dropout")
SEED_OSS_ATTENTION = AttentionSpec(out_dropout="residual_dropout")
PHI3_ATTENTION = AttentionSpec(qkv="qkv_proj", window="config.sliding_window")
SMOLLM3_ATTENTION = AttentionSpec(rope_if=("use_rope",), window="sliding_window")
GEMMA_ATTENTION = AttentionSpec(two_way="whole")  # the blocks are PaliGemma's prefixes
GEMMA2_ATTENTION = AttentionSpec(window="sliding_window", softcap="attn_logit_softcapping", two_way="whole")
GRANITE_SWA_ATTENTION = AttentionSpec(window="sliding_window", sinks="sinks")
GPT_OSS_ATTENTION = AttentionSpec(window="sliding_window", sinks="sinks", rope_tables="once")
FALCON_H1_ATTENTION = AttentionSpec(key_scale="key_multiplier")

# queries and keys normalised
QWEN3_ATTENTION = AttentionSpec(qk_norm="head", window="sliding_window")
GEMMA3_ATTENTION = replace(QWEN3_ATTENTION, two_way="in_window")
GLM4_MOE_ATTENTION = AttentionSpec(qk_norm="head")
AFMOE_ATTENTION = replace(QWEN3_ATTENTION, rope_if=("is_local_attention",), gate="gate_proj")
MUSE_ATTENTION = replace(QWEN3_ATTENTION, norms=("qk_norm", "qk_norm"), query_scale="qk_scale_factor", gate="gate_proj")
STEP_ATTENTION = replace(QWEN3_ATTENTION, gate="g_proj")
QWEN3_NEXT_ATTENTION = AttentionSpec(qk_norm="head", gated=True)
LFM2_ATTENTION = AttentionSpec(qk_norm="head", norms=("q_layernorm", "k_layernorm"), out="out_proj", dropout=None)
EXAONE4_ATTENTION = AttentionSpec(
    qk_norm="head", rope_if=("is_sliding", "!sliding_window"), window="sliding_window", window_if="is_sliding"
)
HUNYUAN_ATTENTION = AttentionSpec(qk_norm="rotated", norms=("query_layernorm", "key_layernorm"))
OLMO2_ATTENTION = AttentionSpec(qk_norm="flat")
MOLMO2_ATTENTION = AttentionSpec(qk_norm="head", flat_if=("qk_norm_type", "olmo"), two_way="whole")
OLMO3_ATTENTION = AttentionSpec(qk_norm="flat", window="sliding_window")

# RoPE with adjacent pairs
COHERE_ATTENTION = AttentionSpec(qk_norm="head", rope_layout="interleaved", rope_in_float32=True)
COHERE2_ATTENTION = AttentionSpec(
    rope_layout="interleaved", rope_in_float32=True, rope_if=("sliding_window",), window="sliding_window"
)
GLM_ATTENTION = AttentionSpec(rope_layout="interleaved", rope_tables="repeated")
GLM4V_ATTENTION = AttentionSpec(rope_layout="interleaved")
ERNIE4_5_ATTENTION = replace(GLM_ATTENTION, rope_in_float32=True)
ERNIE4_5_VL_ATTENTION = replace(GLM4V_ATTENTION, rope_in_float32=True)

# latents, shared keys
DEEPSEEK_V3_ATTENTION = LatentAttentionSpec()
MISTRAL4_ATTENTION = LatentAttentionSpec(scales_by_position=True)
KIMI_ATTENTION = LatentAttentionSpec(rotates=False)
GEMMA4_ATTENTION = SharedAttentionSpec(two_way="in_window", two_way_if="sliding_window")
GEMMA4_UNIFIED_ATTENTION = SharedAttentionSpec(two_way="whole")

# --- norms ------------------------------------------------------------------------------------------------------------

LLAMA_NORM = NormSpec()
OLMO2_NORM = NormSpec(rounding="after")
GEMMA_NORM = NormSpec(eps="eps", rounding="after", unit_offset=True)
GEMMA4_NORM = NormSpec(eps="eps", rounding="after")
COHERE_NORM = NormSpec(kind="layer")
DELTA_NORM = GatedNormSpec()
LARA_NORM = GatedNormSpec(rounding="after")
KDA_NORM = GatedNormSpec(activation="sigmoid", rounding="after")
MAMBA2_NORM = GatedNormSpec(gate_first=True, group="group_size")
UNGROUPED_NORM = GatedNormSpec(gate_first=True)

# --- gated MLPs -------------------------------------------------------------------------------------------------------

LLAMA_MLP = MlpSpec()
PHI3_MLP = MlpSpec(gate_up=("gate_up_proj",), activation="activation_fn")
SEED_OSS_MLP = MlpSpec(out_dropout="residual_dropout")
GRANITE_MOE_MLP = MlpSpec(gate_up=("input_linear",), down="output_linear", activation="activation")
LFM2_MLP = MlpSpec(gate_up=("w1", "w3"), down="w2", activation=None)

# --- experts ----------------------------------------------------------------------------------------------------------

MIXTRAL_EXPERTS = ExpertsSpec()
ARIA_EXPERTS = ExpertsSpec(transposed=True)
GPT_OSS_EXPERTS = ExpertsSpec(
    transposed=True,
    bias=True,
    columns="interleaved",
    activation=None,
    alpha="alpha",
    limit="limit",
    offset=1.0,
    mxfp4="Mxfp4GptOssExperts",
)
STEP_EXPERTS = ExpertsSpec(limit="limit", clamps_after=True)
DEEPSEEK_V4_EXPERTS = ExpertsSpec(limit="limit")
GLM5_EXPERTS = ExpertsSpec(activation=None, limit="swiglu_limit")
MINIMAX_M3_EXPERTS = ExpertsSpec(activation=None, alpha="swiglu_alpha", limit="swiglu_limit", offset=1.0)
NEMOTRON_EXPERTS = ExpertsSpec(inner="up_proj", columns="plain")

# --- decoder layers ---------------------------------------------------------------------------------------------------

LLAMA_LAYER = DecoderSpec()
QWEN3_NEXT_LAYER = DecoderSpec(mixer="linear_attn")
KIMI_LAYER = DecoderSpec(mixer="self_attn")
LFM2_LAYER = DecoderSpec(pre_attention="operator_norm", pre_mlp="ffn_norm", mlp="feed_forward", mixer="conv")
OLMO2_LAYER = DecoderSpec(
    pre_attention=None,
    post_attention="post_attention_layernorm",
    pre_mlp=None,
    post_mlp="post_feedforward_layernorm",
)
GEMMA2_LAYER = DecoderSpec(
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)
AFMOE_LAYER = DecoderSpec(
    post_attention="post_attention_layernorm", pre_mlp="pre_mlp_layernorm", post_mlp="post_mlp_layernorm"
)
GLM4_LAYER = DecoderSpec(post_attention="post_self_attn_layernorm", post_mlp="post_mlp_layernorm")
GRANITE_LAYER = DecoderSpec(residual_scale="residual_multiplier")
GRANITE_MOE_LAYER = DecoderSpec(mlp="block_sparse_moe", residual_scale="residual_multiplier")
PHI3_LAYER = DecoderSpec(dropouts=("resid_attn_dropout", "resid_mlp_dropout"))

# --- heads ------------------------------------------------------------------------------------------------------------

LLAMA_HEAD = HeadSpec()
MIXTRAL_HEAD = HeadSpec(balanced=True)
COHERE_HEAD = HeadSpec(scale="logit_scale")
GRANITE_HEAD = HeadSpec(divisor="config.logits_scaling")
GRANITE_MOE_HEAD = HeadSpec(divisor="config.logits_scaling", balanced=True)
GEMMA2_HEAD = HeadSpec(softcap="config.final_logit_softcapping")

# --- whole families ---------------------------------------------------------------------------------------------------


def like(specs: Mapping[str, Spec], **others: Spec | None) -> dict[str, Spec]:
    """Return another family's specs with these changes; None removes a class."""
    return {name: spec for name, spec in {**specs, **others}.items() if spec is not None}


def named(prefix: str, /, **specs: Spec) -> dict[str, Spec]:
    """Return the specs by full class name: the prefix, then the name."""
    return {f"{prefix}{name}": spec for name, spec in specs.items()}


LLAMA: dict[str, Spec] = {
    "Attention": LLAMA_ATTENTION,
    "RMSNorm": LLAMA_NORM,
    "MLP": LLAMA_MLP,
    "DecoderLayer": LLAMA_LAYER,
    "ForCausalLM": LLAMA_HEAD,
}
LLAMA_PARTS: dict[str, Spec] = {"RMSNorm": LLAMA_NORM, "MLP": LLAMA_MLP}
"""For families with attention and decoder layers of their own."""
MIXTRAL_PARTS: dict[str, Spec] = {**LLAMA_PARTS, "Experts": MIXTRAL_EXPERTS}
"""For such families that have experts."""
LFM2_PARTS: dict[str, Spec] = {
    "Attention": LFM2_ATTENTION,
    "RMSNorm": LLAMA_NORM,
    "MLP": LFM2_MLP,
    "DecoderLayer": LFM2_LAYER,
}
"""For families with short convolutions between attention layers."""
MIXTRAL = like(LLAMA, MLP=None, ForCausalLM=MIXTRAL_HEAD)
"""For families of experts without an MLP."""
GEMMA2 = like(LLAMA, Attention=GEMMA2_ATTENTION, RMSNorm=GEMMA_NORM, DecoderLayer=GEMMA2_LAYER, ForCausalLM=GEMMA2_HEAD)
QWEN3_NEXT = like(
    LLAMA,
    Attention=QWEN3_NEXT_ATTENTION,
    RMSNorm=GEMMA_NORM,
    RMSNormGated=DELTA_NORM,
    DecoderLayer=QWEN3_NEXT_LAYER,
)
QWEN3_NEXT_MOE = like(QWEN3_NEXT, Experts=MIXTRAL_EXPERTS, ForCausalLM=MIXTRAL_HEAD)
COHERE = like(
    LLAMA,
    Attention=COHERE_ATTENTION,
    RMSNorm=None,
    LayerNorm=COHERE_NORM,
    DecoderLayer=None,
    ForCausalLM=COHERE_HEAD,
)
GRANITE = like(LLAMA, DecoderLayer=GRANITE_LAYER, ForCausalLM=GRANITE_HEAD)
GRANITE_MOE = like(MIXTRAL, DecoderLayer=GRANITE_MOE_LAYER, ForCausalLM=GRANITE_MOE_HEAD)
