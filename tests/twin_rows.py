"""Wrong rows for the twin: a spec of a family's class with one field changed, and the check that must notice it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from fastpack.exactness.family_settings import GEMMA4_EXPERTS

SeenBy = Literal["float32", "dropout", "bfloat16", "windows", "fails", "rounding", "no effect"]
"""The check that notices the change: an error in float32, an error with dropout, other bits in bfloat16, windows that
are not the config's, or an exception. Two changes are not noticed: a different rounding that the rule of exactness
allows, and a field that does nothing in a model of this config."""


class Wrong(NamedTuple):
    """One field of one spec, changed.

    Attributes:
        cls: The class's name without the family's prefix; "" for the family's own row.
    """

    family: str
    cls: str
    changed: dict[str, Any]
    verdict: SeenBy

    @property
    def name(self) -> str:
        fields = (f"{name}={value}" for name, value in self.changed.items())
        return " ".join([self.family, self.cls or "family", *fields])


ATTENTION, NORM, MLP, LAYER, HEAD = "Attention", "RMSNorm", "MLP", "DecoderLayer", "ForCausalLM"
EXPERTS, GATED_NORM = "Experts", "RMSNormGated"

CONFIGS: dict[str, dict[str, Any]] = {
    "granite": {"residual_multiplier": 0.22, "logits_scaling": 8.0},
    "granitemoe": {"residual_multiplier": 0.22, "logits_scaling": 8.0},
    "cohere2": {"logit_scale": 0.25},
    "falcon_h1": {"key_multiplier": 0.5},
    "gemma4_text": GEMMA4_EXPERTS,
}
"""Settings of the user's config, where the family's defaults have no effect."""

WRONG: tuple[Wrong, ...] = (
    # Llama: nothing but the plain form
    Wrong("llama", ATTENTION, {"qkv": "qkv_proj"}, "fails"),
    Wrong("llama", ATTENTION, {"out": "out_proj"}, "fails"),
    Wrong("llama", ATTENTION, {"gated": True}, "fails"),
    Wrong("llama", ATTENTION, {"qk_norm": "head"}, "no effect"),
    Wrong("llama", ATTENTION, {"key_scale": "scaling"}, "float32"),
    Wrong("llama", ATTENTION, {"rope_layout": "interleaved"}, "float32"),
    Wrong("llama", ATTENTION, {"rope_in_float32": True}, "rounding"),
    Wrong("llama", ATTENTION, {"rope_tables": "repeated"}, "float32"),
    Wrong("llama", ATTENTION, {"rope_tables": "once"}, "fails"),
    Wrong("llama", ATTENTION, {"rope_if": ("is_causal",)}, "no effect"),
    Wrong("llama", ATTENTION, {"rope_if": ("!is_causal",)}, "float32"),
    Wrong("llama", ATTENTION, {"window": "num_key_value_groups"}, "float32"),
    Wrong("llama", ATTENTION, {"window": "config.max_position_embeddings"}, "no effect"),
    Wrong("llama", ATTENTION, {"softcap": "scaling"}, "float32"),
    Wrong("llama", ATTENTION, {"sinks": "sinks"}, "fails"),
    Wrong("llama", ATTENTION, {"dropout": None}, "dropout"),
    Wrong("llama", ATTENTION, {"out_dropout": "attention_dropout"}, "dropout"),
    Wrong("llama", ATTENTION, {"two_way": "whole"}, "no effect"),  # a twin's batch has no images
    Wrong("llama", NORM, {"kind": "layer"}, "float32"),
    Wrong("llama", NORM, {"eps": "eps"}, "fails"),
    Wrong("llama", NORM, {"rounding": "after"}, "bfloat16"),
    Wrong("llama", NORM, {"unit_offset": True}, "float32"),
    Wrong("qwen3_next", GATED_NORM, {"gate_first": True}, "float32"),
    Wrong("qwen3_next", GATED_NORM, {"activation": "sigmoid"}, "float32"),
    Wrong("qwen3_next", GATED_NORM, {"rounding": "after"}, "bfloat16"),
    Wrong("qwen3_next", GATED_NORM, {"group": "group_size"}, "fails"),
    Wrong("llama", MLP, {"gate_up": ("up_proj", "gate_proj")}, "float32"),
    Wrong("llama", MLP, {"gate_up": ("gate_up_proj",)}, "fails"),
    Wrong("llama", MLP, {"down": "up_proj"}, "fails"),
    Wrong("llama", MLP, {"activation": None}, "no effect"),
    Wrong("llama", MLP, {"out_dropout": "dropout"}, "fails"),
    Wrong("llama", LAYER, {"pre_attention": None}, "float32"),
    Wrong("llama", LAYER, {"pre_attention": "post_attention_layernorm"}, "float32"),
    Wrong("llama", LAYER, {"post_attention": "post_attention_layernorm"}, "float32"),
    Wrong("llama", LAYER, {"pre_mlp": "input_layernorm"}, "float32"),
    Wrong("llama", LAYER, {"pre_mlp": None}, "float32"),
    Wrong("llama", LAYER, {"post_mlp": "post_attention_layernorm"}, "float32"),
    Wrong("llama", LAYER, {"residual_scale": "residual_multiplier"}, "fails"),
    Wrong("llama", LAYER, {"dropouts": ("resid_attn_dropout", "resid_mlp_dropout")}, "fails"),
    Wrong("llama", LAYER, {"mlp": "block_sparse_moe"}, "fails"),
    Wrong("llama", HEAD, {"scale": "config.attention_dropout"}, "float32"),
    Wrong("llama", HEAD, {"divisor": "config.num_hidden_layers"}, "float32"),
    Wrong("llama", HEAD, {"softcap": "config.num_hidden_layers"}, "float32"),
    Wrong("llama", HEAD, {"balanced": True}, "fails"),
    # Qwen 2 and 3: windows, norms of heads
    Wrong("qwen2", ATTENTION, {"window": None}, "windows"),
    Wrong("qwen2", ATTENTION, {"window": "config.sliding_window"}, "windows"),
    Wrong("qwen2", ATTENTION, {"rope_layout": "interleaved"}, "float32"),
    Wrong("qwen3", ATTENTION, {"qk_norm": None}, "float32"),
    Wrong("qwen3", ATTENTION, {"qk_norm": "flat"}, "fails"),
    Wrong("qwen3", ATTENTION, {"qk_norm": "rotated"}, "float32"),
    Wrong("qwen3", ATTENTION, {"norms": ("k_norm", "q_norm")}, "float32"),
    Wrong("qwen3", ATTENTION, {"norms": ("q_layernorm", "k_layernorm")}, "float32"),
    Wrong("qwen3", NORM, {"rounding": "after"}, "bfloat16"),
    # Gemma 2 and 3: softcaps, four norms, an offset
    Wrong("gemma2", ATTENTION, {"softcap": None}, "float32"),
    Wrong("gemma2", ATTENTION, {"window": None}, "windows"),
    Wrong("gemma2", NORM, {"unit_offset": False}, "float32"),
    Wrong("gemma2", NORM, {"rounding": "before"}, "bfloat16"),
    Wrong("gemma2", NORM, {"eps": "variance_epsilon"}, "fails"),
    Wrong("gemma2", MLP, {"activation": None}, "float32"),
    Wrong("gemma2", LAYER, {"post_attention": None}, "float32"),
    Wrong("gemma2", LAYER, {"post_mlp": None}, "float32"),
    Wrong("gemma2", LAYER, {"pre_mlp": "post_attention_layernorm"}, "float32"),
    Wrong("gemma2", HEAD, {"softcap": None}, "float32"),
    Wrong("gemma3_text", ATTENTION, {"qk_norm": None}, "float32"),
    Wrong("gemma3_text", ATTENTION, {"window": None}, "windows"),
    # Cohere 2: layer norms, layers without positions
    Wrong("cohere2", ATTENTION, {"rope_if": ()}, "float32"),
    Wrong("cohere2", ATTENTION, {"rope_layout": "half"}, "float32"),
    Wrong("cohere2", ATTENTION, {"rope_in_float32": False}, "rounding"),
    Wrong("cohere2", ATTENTION, {"rope_tables": "repeated"}, "float32"),
    Wrong("cohere2", ATTENTION, {"window": None}, "windows"),
    Wrong("cohere2", "LayerNorm", {"kind": "rms"}, "float32"),
    Wrong("cohere2", "LayerNorm", {"rounding": "after"}, "no effect"),
    Wrong("cohere2", HEAD, {"scale": None}, "float32"),
    # gpt-oss: sinks, tables of half the width
    Wrong("gpt_oss", ATTENTION, {"sinks": None}, "float32"),
    Wrong("gpt_oss", ATTENTION, {"rope_tables": "whole"}, "float32"),
    Wrong("gpt_oss", ATTENTION, {"window": None}, "windows"),
    Wrong("gpt_oss", LAYER, {"mlp": "self_attn"}, "fails"),
    Wrong("gpt_oss", HEAD, {"balanced": False}, "float32"),
    # Phi 3: one projection, dropouts behind each branch
    Wrong("phi3", ATTENTION, {"qkv": None}, "fails"),
    Wrong("phi3", ATTENTION, {"window": None}, "float32"),
    Wrong("phi3", MLP, {"activation": None}, "no effect"),
    Wrong("phi3", LAYER, {"dropouts": None}, "dropout"),
    Wrong("phi3", LAYER, {"dropouts": ("resid_mlp_dropout", "resid_attn_dropout")}, "no effect"),
    # Granite: factors
    Wrong("granite", LAYER, {"residual_scale": None}, "float32"),
    Wrong("granite", HEAD, {"divisor": None}, "float32"),
    Wrong("granite", HEAD, {"divisor": None, "scale": "config.logits_scaling"}, "float32"),
    Wrong("granitemoe", HEAD, {"balanced": False}, "float32"),
    # DeepSeek-V3: latents
    Wrong("deepseek_v3", ATTENTION, {"rotates": False}, "float32"),
    Wrong("deepseek_v3", ATTENTION, {"out": "kv_b_proj"}, "fails"),
    Wrong("deepseek_v3", ATTENTION, {"dropout": None}, "dropout"),
    Wrong("deepseek_v3", ATTENTION, {"out_dropout": "attention_dropout"}, "dropout"),
    # OLMo 2: norms behind the branches, of whole projections
    Wrong("olmo2", ATTENTION, {"qk_norm": "head"}, "fails"),
    Wrong("olmo2", ATTENTION, {"qk_norm": None}, "float32"),
    Wrong("olmo2", NORM, {"rounding": "before"}, "bfloat16"),
    Wrong("olmo2", LAYER, {"post_mlp": None, "pre_mlp": "post_feedforward_layernorm"}, "float32"),
    # GLM 4: pairs side by side
    Wrong("glm4", ATTENTION, {"rope_tables": "whole"}, "float32"),
    Wrong("glm4", ATTENTION, {"rope_layout": "half"}, "float32"),
    Wrong("glm4", LAYER, {"post_attention": None}, "float32"),
    # AFMoE and Step 3.7: gates of elements, and of heads
    Wrong("afmoe", ATTENTION, {"gate": None}, "float32"),
    Wrong("afmoe", ATTENTION, {"gate": "q_proj"}, "float32"),
    Wrong("afmoe", ATTENTION, {"rope_if": ()}, "float32"),
    Wrong("step3p5", ATTENTION, {"gate": None}, "float32"),
    # Muse Glimmer: norms without weights, scaled queries
    Wrong("muse_glimmer_text", "TextAttention", {"query_scale": None}, "float32"),
    Wrong("muse_glimmer_text", "TextAttention", {"qk_norm": None}, "float32"),
    Wrong("muse_glimmer_text", "TextAttention", {"window": None}, "windows"),
    # Ministral 3 and Mistral 4: queries grow with positions
    Wrong("ministral3", ATTENTION, {"scales_by_position": False}, "float32"),
    Wrong("ministral3", ATTENTION, {"window": None}, "float32"),
    Wrong("mistral4", ATTENTION, {"scales_by_position": False}, "float32"),
    # Molmo 2: norms of heads, or of whole projections
    Wrong("molmo2_text", ATTENTION, {"qk_norm": None}, "float32"),
    Wrong("molmo2_text", ATTENTION, {"flat_if": ("qk_norm_type", "qwen3")}, "fails"),
    Wrong("molmo2_text", ATTENTION, {"flat_if": None}, "no effect"),
    # others, for fields that none of these has
    Wrong("exaone4", ATTENTION, {"window_if": None}, "windows"),
    Wrong("exaone4", ATTENTION, {"rope_if": ()}, "float32"),
    Wrong("smollm3", ATTENTION, {"rope_if": ()}, "float32"),
    Wrong("seed_oss", ATTENTION, {"out_dropout": None}, "dropout"),
    Wrong("seed_oss", MLP, {"out_dropout": None}, "dropout"),
    Wrong("hunyuan_v1_dense", ATTENTION, {"qk_norm": "head"}, "float32"),
    Wrong("mixtral", HEAD, {"balanced": False}, "float32"),
    # experts: the plain form, then others
    Wrong("mixtral", EXPERTS, {"inner": "down_proj"}, "fails"),
    Wrong("mixtral", EXPERTS, {"down": "gate_up_proj"}, "fails"),
    Wrong("mixtral", EXPERTS, {"transposed": True}, "fails"),
    Wrong("mixtral", EXPERTS, {"bias": True}, "fails"),
    Wrong("mixtral", EXPERTS, {"columns": "interleaved"}, "float32"),
    Wrong("mixtral", EXPERTS, {"columns": "plain"}, "fails"),
    Wrong("mixtral", EXPERTS, {"activation": None}, "no effect"),
    Wrong("mixtral", EXPERTS, {"alpha": "num_experts"}, "float32"),
    Wrong("mixtral", EXPERTS, {"limit": "num_experts"}, "float32"),
    Wrong("mixtral", EXPERTS, {"offset": 1.0}, "float32"),
    Wrong("mixtral", EXPERTS, {"clamps_after": True}, "no effect"),
    Wrong("mixtral", EXPERTS, {"mxfp4": "MixtralExperts"}, "no effect"),  # a twin is not quantised
    Wrong("gpt_oss", EXPERTS, {"transposed": False}, "fails"),
    Wrong("gpt_oss", EXPERTS, {"bias": False}, "no effect"),
    Wrong("gpt_oss", EXPERTS, {"columns": "halves"}, "float32"),
    Wrong("gpt_oss", EXPERTS, {"alpha": None}, "float32"),
    Wrong("gpt_oss", EXPERTS, {"limit": None}, "float32"),
    Wrong("gpt_oss", EXPERTS, {"offset": 0.0}, "float32"),
    Wrong("gpt_oss", EXPERTS, {"clamps_after": True}, "float32"),
    Wrong("step3p5", EXPERTS, {"limit": None}, "float32"),
    Wrong("step3p5", EXPERTS, {"clamps_after": False}, "float32"),
    Wrong("minimax_m3_vl_text", EXPERTS, {"alpha": None}, "float32"),
    Wrong("deepseek_v4", EXPERTS, {"limit": None}, "float32"),
    Wrong("glm5_next_text", EXPERTS, {"limit": None}, "float32"),
    Wrong("nemotron_h", EXPERTS, {"columns": "halves"}, "fails"),
    Wrong("nemotron_h", EXPERTS, {"activation": None}, "float32"),
    Wrong("aria_text", EXPERTS, {"transposed": False}, "fails"),
    Wrong("gemma4_text", EXPERTS, {"activation": None}, "float32"),
    Wrong("falcon_h1", ATTENTION, {"key_scale": None}, "float32"),
    Wrong("qwen3_next", ATTENTION, {"gated": False}, "fails"),
    Wrong("lfm2", ATTENTION, {"norms": ("q_norm", "k_norm")}, "float32"),
    Wrong("lfm2", MLP, {"gate_up": ("w3", "w1")}, "float32"),
    Wrong("gemma4_text", ATTENTION, {"out": "q_proj"}, "fails"),
    Wrong("gemma4_text", ATTENTION, {"dropout": None}, "dropout"),
    Wrong("gemma4_text", ATTENTION, {"out_dropout": "attention_dropout"}, "dropout"),
    Wrong("gemma4_text", ATTENTION, {"two_way": None}, "no effect"),
    Wrong("gemma4_text", ATTENTION, {"two_way_if": None}, "no effect"),
    Wrong("gemma4_text", NORM, {"rounding": "before"}, "bfloat16"),
    Wrong("starcoder2", LAYER, {"post_mlp": "input_layernorm"}, "float32"),
    Wrong("qwen3_5_text", LAYER, {"mixer": None}, "rounding"),  # its layers keep their own forward
    Wrong("phimoe", "", {"mask_window": None}, "float32"),
    Wrong("qwen2_moe", "", {"mask_window": None}, "windows"),
    Wrong("mistral", "", {"mask_window": "sliding_window"}, "no effect"),
    Wrong("llama", "", {"mask_window": "max_position_embeddings"}, "fails"),
)
"""On some 30 families, of every field of every spec that fast rows have."""
