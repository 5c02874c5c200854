"""Families of the fast rung: every attention module has a form that :mod:`fastpack.families.known_sources` knows.

They fulfil what :mod:`fastpack.families.varlen` asks for. What else of them has a form is fast as well: norms, MLPs,
whole layers, and heads where their loss is to be fused. Blocks of experts keep their stock forward.
"""

from fastpack.families.spec import Family, names

_LAYER = "Attention RMSNorm MLP DecoderLayer ForCausalLM"
_EXPERTS = "Attention RMSNorm DecoderLayer ForCausalLM"
"""Where no MLP stands beside the experts."""


def _fast(
    model_type: str,
    name: str,
    fast: str = _LAYER,
    package: str = "",
    backbone: str = "Model",
    mask_window: str | None = None,
    router: str = "",
) -> Family:
    """A family whose classes are called ``name`` and what ``fast`` and ``router`` list."""
    return Family(
        model_type,
        f"{name}{backbone}",
        (f"{name}Attention",),
        package=package,
        mask_window=mask_window,
        routers=names(name, router),
        fast=names(name, fast),
    )


FAST_FAMILIES: tuple[Family, ...] = (
    _fast("aria_text", "AriaText", "Attention RMSNorm DecoderLayer", package="aria", router="TopKRouter"),
    _fast("arcee", "Arcee", "Attention RMSNorm DecoderLayer ForCausalLM"),
    _fast("apertus", "Apertus", "Attention RMSNorm ForCausalLM"),
    _fast("apertus1p5_text", "Apertus1p5Text", "Attention RMSNorm", package="apertus1p5"),
    _fast("cohere", "Cohere", "Attention LayerNorm MLP ForCausalLM"),
    _fast("cohere2", "Cohere2", "Attention LayerNorm MLP ForCausalLM"),
    _fast("cwm", "Cwm"),
    _fast("deepseek_v3", "DeepseekV3", router="TopkRouter"),
    _fast("dots1", "Dots1", router="TopkRouter"),
    _fast("ernie4_5", "Ernie4_5"),
    _fast("ernie4_5_moe", "Ernie4_5_Moe", router="TopKRouter"),
    _fast("exaone4", "Exaone4"),
    _fast("exaone_moe", "ExaoneMoe", router="TopkRouter"),
    _fast("flex_olmo", "FlexOlmo", "Attention RMSNorm MLP ForCausalLM", router="TopKRouter"),
    _fast("gemma", "Gemma"),
    _fast("gemma2", "Gemma2"),
    _fast("gemma3_text", "Gemma3", package="gemma3", backbone="TextModel"),
    _fast("glm", "Glm"),
    _fast("glm4", "Glm4"),
    _fast("glm4_moe", "Glm4Moe", router="TopkRouter"),
    _fast("glm4_moe_lite", "Glm4MoeLite", router="TopkRouter"),
    _fast("gpt_oss", "GptOss", _EXPERTS, router="TopKRouter"),
    _fast("granite", "Granite"),
    _fast("granite_swa", "GraniteSWA"),
    _fast("granitemoe", "GraniteMoe", _EXPERTS, router="TopKRouter"),
    _fast("granitemoe_swa", "GraniteMoeSWA", "Attention RMSNorm MLP ForCausalLM", router="TopKRouter"),
    _fast("granitemoeshared", "GraniteMoeShared", "Attention RMSNorm MLP ForCausalLM", router="TopKRouter"),
    _fast("helium", "Helium"),
    _fast("hunyuan_v1_dense", "HunYuanDenseV1"),
    _fast("hunyuan_v1_moe", "HunYuanMoEV1", router="Gate"),
    _fast("hy_v3", "HYV3", "Attention RMSNorm MLP DecoderLayer", router="TopKRouter"),
    _fast("hyperclovax", "HyperCLOVAX", "Attention RMSNorm MLP"),
    _fast("jais2", "Jais2", "Attention DecoderLayer ForCausalLM"),
    _fast("kolibri1", "Kolibri1", router="TopKRouter"),
    _fast("llama", "Llama"),
    _fast("mellum", "Mellum", router="TopKRouter"),
    _fast("minimax_m2", "MiniMaxM2", _EXPERTS, router="TopKRouter"),
    _fast("ministral", "Ministral"),
    _fast("mistral", "Mistral"),
    _fast("mixtral", "Mixtral", _EXPERTS, router="TopKRouter"),
    _fast("olmo2", "Olmo2"),
    _fast("olmo3", "Olmo3"),
    _fast("phi3", "Phi3"),
    _fast("phimoe", "Phimoe", "Attention DecoderLayer ForCausalLM", mask_window="sliding_window", router="TopKRouter"),
    _fast("qwen2", "Qwen2"),
    _fast("qwen2_moe", "Qwen2Moe", mask_window="sliding_window", router="TopKRouter"),
    _fast("qwen3", "Qwen3"),
    _fast("qwen3_moe", "Qwen3Moe", router="TopKRouter"),
    _fast("seed_oss", "SeedOss"),
    _fast("smollm3", "SmolLM3"),
    _fast("solar_open", "SolarOpen", router="TopkRouter"),
    _fast("starcoder2", "Starcoder2", "Attention DecoderLayer ForCausalLM"),
    _fast("vaultgemma", "VaultGemma", "Attention RMSNorm MLP ForCausalLM"),
    _fast("youtu", "Youtu"),
)
