"""Families of the fast tier: every attention module has a spec of :mod:`fastpack.families.shared_specs`.

They meet the conditions of :mod:`fastpack.families.varlen`. Norms, MLPs, whole layers, and heads with a fused loss are
fast too if they have a spec, as are blocks of experts.
"""

from collections.abc import Mapping
from dataclasses import replace

from fastpack.families.shared_specs import (
    AFMOE_ATTENTION,
    AFMOE_LAYER,
    ARIA_EXPERTS,
    COHERE,
    COHERE2_ATTENTION,
    DEEPSEEK_V3_ATTENTION,
    ERNIE4_5_ATTENTION,
    ERNIE4_5_VL_ATTENTION,
    EXAONE4_ATTENTION,
    GEMMA2,
    GEMMA2_LAYER,
    GEMMA3_ATTENTION,
    GEMMA4_ATTENTION,
    GEMMA4_NORM,
    GEMMA4_UNIFIED_ATTENTION,
    GEMMA_ATTENTION,
    GEMMA_NORM,
    GLM4_LAYER,
    GLM4_MOE_ATTENTION,
    GLM4V_ATTENTION,
    GLM_ATTENTION,
    GPT_OSS_ATTENTION,
    GPT_OSS_EXPERTS,
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_MLP,
    GRANITE_SWA_ATTENTION,
    HUNYUAN_ATTENTION,
    LLAMA,
    LLAMA_ATTENTION,
    LLAMA_LAYER,
    LLAMA_MLP,
    LLAMA_NORM,
    MINISTRAL3_ATTENTION,
    MISTRAL4_ATTENTION,
    MISTRAL_ATTENTION,
    MIXTRAL,
    MIXTRAL_EXPERTS,
    MIXTRAL_HEAD,
    MOLMO2_ATTENTION,
    MUSE_ATTENTION,
    OLMO2_ATTENTION,
    OLMO2_LAYER,
    OLMO2_NORM,
    OLMO3_ATTENTION,
    PHI3_ATTENTION,
    PHI3_LAYER,
    PHI3_MLP,
    QWEN2_ATTENTION,
    QWEN3_ATTENTION,
    SEED_OSS_ATTENTION,
    SEED_OSS_MLP,
    SMOLLM3_ATTENTION,
    STARCODER2_ATTENTION,
    STEP_ATTENTION,
    STEP_EXPERTS,
    like,
    named,
)
from fastpack.families.spec import Family, Spec


def _vision(
    model_type: str, name: str, package: str, backbone: str = "TextModel", router: str = "", **specs: Spec
) -> Family:
    """Return the row of a text model whose classes' names differ in their prefix; attention comes first in ``specs``.

    The rotary module merges the axes of positions, so that attention gets tables as in other families.

    Args:
        model_type: the name of the text model's config.
        name: the prefix of the classes' names.
        package: as in :class:`Family`.
        backbone: the text model's class, without prefix.
        router: the class that chooses experts, without prefix; empty for none.
        specs: the specs, by class name without prefix.
    """
    return Family(
        model_type,
        f"{name}{backbone}",
        (f"{name}{next(iter(specs))}",),
        package=package,
        routers=(f"{name}{router}",) if router else (),
        fast=named(name, **specs),
    )


def _qwen2_vl(model_type: str, name: str, package: str, backbone: str = "TextModel") -> Family:
    """Return the row of a text model like Qwen2-VL's, whose MLP has Qwen2's name."""
    row = _fast(
        model_type, name, Attention=QWEN2_ATTENTION, MLP=None, ForCausalLM=None, package=package, backbone=backbone
    )
    return replace(row, fast={**row.fast, "Qwen2MLP": LLAMA_MLP}, namesakes=("Qwen2MLP",))


def _fast(
    model_type: str,
    name: str,
    specs: Mapping[str, Spec] = LLAMA,
    *,
    package: str = "",
    backbone: str = "Model",
    mask_window: str | None = None,
    router: str = "",
    **others: Spec | None,
) -> Family:
    """Return the row of a family whose classes have names with one prefix, and specs like those of another family.

    Args:
        model_type: as in :class:`Family`.
        name: the prefix of the classes' names.
        specs: the specs of the other family, by class name without prefix.
        package: as in :class:`Family`.
        backbone: the backbone's class, without prefix.
        mask_window: as in :class:`Family`.
        router: the class that chooses experts, without prefix; empty for none. With it, the experts are like Mixtral's.
        others: other or further specs, by class name without prefix; None for a class that is not fast.
    """
    return Family(
        model_type,
        f"{name}{backbone}",
        (f"{name}Attention",),
        package=package,
        mask_window=mask_window,
        routers=(f"{name}{router}",) if router else (),
        fast=named(name, **like(like(specs, Experts=MIXTRAL_EXPERTS if router else None), **others)),
    )


FAST_FAMILIES: tuple[Family, ...] = (
    _fast(
        "afmoe",
        "Afmoe",
        Attention=AFMOE_ATTENTION,
        RMSNorm=OLMO2_NORM,
        DecoderLayer=AFMOE_LAYER,
        router="TokenChoiceRouter",
    ),
    _fast("arcee", "Arcee", MLP=None),
    _fast("apertus", "Apertus", Attention=GLM4_MOE_ATTENTION, MLP=None, DecoderLayer=None),
    _fast(
        "apertus1p5_text",
        "Apertus1p5Text",
        MIXTRAL,
        Attention=GLM4_MOE_ATTENTION,
        DecoderLayer=None,
        ForCausalLM=None,
        package="apertus1p5",
    ),
    _fast("cohere", "Cohere", COHERE),
    _fast("cohere2", "Cohere2", COHERE, Attention=COHERE2_ATTENTION),
    _fast("cwm", "Cwm", Attention=QWEN2_ATTENTION),
    _fast("deepseek_v3", "DeepseekV3", Attention=DEEPSEEK_V3_ATTENTION, router="TopkRouter"),
    _fast("dots1", "Dots1", Attention=QWEN3_ATTENTION, router="TopkRouter"),
    _fast("ernie4_5", "Ernie4_5", Attention=ERNIE4_5_ATTENTION),
    _fast("ernie4_5_moe", "Ernie4_5_Moe", Attention=ERNIE4_5_ATTENTION, ForCausalLM=MIXTRAL_HEAD, router="TopKRouter"),
    _fast("exaone4", "Exaone4", Attention=EXAONE4_ATTENTION, DecoderLayer=OLMO2_LAYER),
    _fast("exaone_moe", "ExaoneMoe", Attention=EXAONE4_ATTENTION, router="TopkRouter"),
    _fast(
        "flex_olmo",
        "FlexOlmo",
        Attention=OLMO2_ATTENTION,
        RMSNorm=OLMO2_NORM,
        DecoderLayer=None,
        ForCausalLM=MIXTRAL_HEAD,
        router="TopKRouter",
    ),
    _fast("gemma", "Gemma", Attention=GEMMA_ATTENTION, RMSNorm=GEMMA_NORM),
    _fast("gemma2", "Gemma2", GEMMA2),
    _fast("gemma3_text", "Gemma3", GEMMA2, Attention=GEMMA3_ATTENTION, package="gemma3", backbone="TextModel"),
    _fast("glm", "Glm", Attention=GLM_ATTENTION, MLP=PHI3_MLP),
    _fast("glm4", "Glm4", Attention=GLM_ATTENTION, MLP=PHI3_MLP, DecoderLayer=GLM4_LAYER),
    _fast("glm4_moe", "Glm4Moe", Attention=GLM4_MOE_ATTENTION, router="TopkRouter"),
    _fast("glm4_moe_lite", "Glm4MoeLite", Attention=DEEPSEEK_V3_ATTENTION, router="TopkRouter"),
    _fast(
        "gpt_oss",
        "GptOss",
        MIXTRAL,
        Attention=GPT_OSS_ATTENTION,
        RMSNorm=OLMO2_NORM,
        Experts=GPT_OSS_EXPERTS,
        router="TopKRouter",
    ),
    _fast("granite", "Granite", GRANITE),
    _fast("granite_swa", "GraniteSWA", GRANITE, Attention=GRANITE_SWA_ATTENTION),
    _fast("granitemoe", "GraniteMoe", GRANITE_MOE, router="TopKRouter"),
    _fast(
        "granitemoe_swa",
        "GraniteMoeSWA",
        GRANITE_MOE,
        Attention=GRANITE_SWA_ATTENTION,
        MLP=GRANITE_MOE_MLP,
        DecoderLayer=None,
        router="TopKRouter",
    ),
    _fast(
        "granitemoeshared",
        "GraniteMoeShared",
        GRANITE_MOE,
        MLP=GRANITE_MOE_MLP,
        DecoderLayer=None,
        router="TopKRouter",
    ),
    _fast("helium", "Helium", Attention=GLM_ATTENTION, RMSNorm=OLMO2_NORM),
    _fast("hunyuan_v1_dense", "HunYuanDenseV1", Attention=HUNYUAN_ATTENTION),
    _fast("hunyuan_v1_moe", "HunYuanMoEV1", Attention=HUNYUAN_ATTENTION, router="Gate"),
    _fast("hy_v3", "HYV3", Attention=GLM4_MOE_ATTENTION, ForCausalLM=None, router="TopKRouter"),
    _fast("hyperclovax", "HyperCLOVAX", DecoderLayer=None, ForCausalLM=None),
    _fast("jais2", "Jais2", RMSNorm=None, MLP=None),
    _fast("kolibri1", "Kolibri1", Attention=EXAONE4_ATTENTION, DecoderLayer=GLM4_LAYER, router="TopKRouter"),
    _fast("llama", "Llama"),
    _fast("mellum", "Mellum", Attention=QWEN3_ATTENTION, ForCausalLM=MIXTRAL_HEAD, router="TopKRouter"),
    _fast("minimax_m2", "MiniMaxM2", MIXTRAL, Attention=OLMO2_ATTENTION, router="TopKRouter"),
    _fast("ministral", "Ministral", Attention=QWEN2_ATTENTION),
    _fast("ministral3", "Ministral3", Attention=MINISTRAL3_ATTENTION),
    _fast("mistral", "Mistral", Attention=MISTRAL_ATTENTION),
    _fast("mistral4", "Mistral4", Attention=MISTRAL4_ATTENTION, router="TopkRouter"),
    _fast("mixtral", "Mixtral", MIXTRAL, Attention=MISTRAL_ATTENTION, router="TopKRouter"),
    _fast("olmo2", "Olmo2", Attention=OLMO2_ATTENTION, RMSNorm=OLMO2_NORM, DecoderLayer=OLMO2_LAYER),
    _fast("olmo3", "Olmo3", Attention=OLMO3_ATTENTION, RMSNorm=OLMO2_NORM, DecoderLayer=OLMO2_LAYER),
    _fast("phi3", "Phi3", Attention=PHI3_ATTENTION, MLP=PHI3_MLP, DecoderLayer=PHI3_LAYER),
    _fast("phimoe", "Phimoe", MIXTRAL, RMSNorm=None, mask_window="sliding_window", router="TopKRouter"),
    _fast("qwen2", "Qwen2", Attention=QWEN2_ATTENTION),
    _fast("qwen2_moe", "Qwen2Moe", ForCausalLM=MIXTRAL_HEAD, mask_window="sliding_window", router="TopKRouter"),
    _fast("qwen3", "Qwen3", Attention=QWEN3_ATTENTION),
    _fast("qwen3_moe", "Qwen3Moe", Attention=QWEN3_ATTENTION, ForCausalLM=MIXTRAL_HEAD, router="TopKRouter"),
    _fast("seed_oss", "SeedOss", Attention=SEED_OSS_ATTENTION, MLP=SEED_OSS_MLP),
    _fast("smollm3", "SmolLM3", Attention=SMOLLM3_ATTENTION),
    _fast("solar_open", "SolarOpen", router="TopkRouter"),
    _fast("starcoder2", "Starcoder2", Attention=STARCODER2_ATTENTION, RMSNorm=None, MLP=None),
    _fast("vaultgemma", "VaultGemma", GEMMA2, DecoderLayer=None),
    _fast("youtu", "Youtu", Attention=DEEPSEEK_V3_ATTENTION),
    # the text models of vision-language models
    _vision(
        "aria_text",
        "Aria",
        "aria",
        router="TextTopKRouter",
        TextAttention=LLAMA_ATTENTION,
        TextRMSNorm=LLAMA_NORM,
        TextDecoderLayer=LLAMA_LAYER,
        Experts=ARIA_EXPERTS,
    ),
    _vision(
        "ernie4_5_vl_moe_text",  # its layer tells its experts which tokens are of images
        "Ernie4_5_VLMoe",
        "ernie4_5_vl_moe",
        router="MoeTopKRouter",
        TextAttention=ERNIE4_5_VL_ATTENTION,
        MoeExperts=MIXTRAL_EXPERTS,
        RMSNorm=LLAMA_NORM,
        MLP=LLAMA_MLP,
    ),
    _vision(
        "glm4v_text",
        "Glm4v",
        "glm4v",
        TextAttention=GLM4V_ATTENTION,
        RMSNorm=LLAMA_NORM,
        TextMLP=PHI3_MLP,
        TextDecoderLayer=GLM4_LAYER,
    ),
    _vision(
        "glm4v_moe_text",
        "Glm4vMoe",
        "glm4v_moe",
        router="TextTopkRouter",
        TextAttention=LLAMA_ATTENTION,
        TextExperts=MIXTRAL_EXPERTS,
        RMSNorm=LLAMA_NORM,
        TextRMSNorm=LLAMA_NORM,
        TextMLP=LLAMA_MLP,
        TextDecoderLayer=LLAMA_LAYER,
    ),
    _vision(
        "glm_ocr_text",
        "GlmOcr",
        "glm_ocr",
        TextAttention=GLM4V_ATTENTION,
        RMSNorm=LLAMA_NORM,
        TextMLP=PHI3_MLP,
        TextDecoderLayer=GLM4_LAYER,
    ),
    _fast("cosmos3_edge_text", "Cosmos3EdgeText", MLP=None, ForCausalLM=None, package="cosmos3_edge"),
    _fast("deepseek_ocr2_text", "DeepseekOcr2Text", ForCausalLM=None, package="deepseek_ocr2", router="TopkRouter"),
    _fast("granite4_vision_text", "Granite4VisionText", GRANITE, ForCausalLM=None, package="granite4_vision"),
    _fast("granite_docling_text", "GraniteDoclingText", GRANITE, ForCausalLM=None, package="granite_docling"),
    _fast(  # its layers have their norms before or behind each branch, as a setting says
        "molmo2_text",
        "Molmo2",
        Attention=MOLMO2_ATTENTION,
        DecoderLayer=None,
        ForCausalLM=None,
        package="molmo2",
        backbone="TextModel",
    ),
    _vision(
        "muse_glimmer_text",
        "MuseGlimmer",
        "muse_glimmer",
        TextAttention=MUSE_ATTENTION,
        RMSNorm=GEMMA4_NORM,
        TextCenteredRMSNorm=GEMMA_NORM,
        TextMLP=LLAMA_MLP,
        TextDecoderLayer=GEMMA2_LAYER,
    ),
    _fast(
        "paddleocr_vl_text",
        "PaddleOCR",
        Attention=QWEN2_ATTENTION,
        ForCausalLM=None,
        package="paddleocr_vl",
        backbone="TextModel",
    ),
    _qwen2_vl("qwen2_vl_text", "Qwen2VL", "qwen2_vl"),
    _qwen2_vl("qwen2_5_vl_text", "Qwen2_5_VL", "qwen2_5_vl"),
    _qwen2_vl("qwen2_5_omni_text", "Qwen2_5Omni", "qwen2_5_omni", "ThinkerTextModel"),
    _fast("qwen3_vl_text", "Qwen3VLText", Attention=GLM4_MOE_ATTENTION, ForCausalLM=None, package="qwen3_vl"),
    _fast(
        "qwen3_vl_moe_text",
        "Qwen3VLMoeText",
        Attention=GLM4_MOE_ATTENTION,
        ForCausalLM=None,
        package="qwen3_vl_moe",
        router="TopKRouter",
    ),
    _vision(
        "qwen3_omni_moe_text",
        "Qwen3OmniMoe",
        "qwen3_omni_moe",
        "ThinkerTextModel",
        router="ThinkerTextTopKRouter",
        ThinkerTextAttention=QWEN3_ATTENTION,
        ThinkerTextExperts=MIXTRAL_EXPERTS,
        ThinkerTextRMSNorm=LLAMA_NORM,
        TextRMSNorm=LLAMA_NORM,
        ThinkerTextMLP=LLAMA_MLP,
        ThinkerTextDecoderLayer=LLAMA_LAYER,
    ),
    _fast(  # its MLP may clamp
        "step3p5",
        "Step3p7",
        Attention=STEP_ATTENTION,
        RMSNorm=GEMMA_NORM,
        MLP=None,
        Experts=STEP_EXPERTS,
        ForCausalLM=None,
        package="step3p7",
        backbone="TextModel",
        router="TopKRouter",
    ),
    # its window limits tokens that are generated, not those of a prompt
    _fast("unlimited_ocr_text", "UnlimitedOcrText", ForCausalLM=None, package="unlimited_ocr", router="TopkRouter"),
    # a module, or the head, drops the keyword packed_seq_lens
    Family(
        "emu3",
        "Emu3TextModel",
        ("Emu3Attention",),
        drops_packing=True,
        fast=named("Emu3", Attention=LLAMA_ATTENTION, RMSNorm=LLAMA_NORM, MLP=LLAMA_MLP),
    ),
    Family(
        "gemma4_text",
        "Gemma4TextModel",
        ("Gemma4TextAttention",),
        package="gemma4",
        drops_packing=True,
        shares_states=True,
        routers=("Gemma4TextRouter",),
        fast=named(
            "Gemma4",
            TextAttention=GEMMA4_ATTENTION,
            RMSNorm=GEMMA4_NORM,
            TextMLP=LLAMA_MLP,
            TextExperts=MIXTRAL_EXPERTS,
        ),
    ),
    Family(
        "gemma4_unified_text",
        "Gemma4UnifiedTextModel",
        ("Gemma4UnifiedTextAttention",),
        package="gemma4_unified",
        drops_packing=True,
        fast=named("Gemma4Unified", TextAttention=GEMMA4_UNIFIED_ATTENTION, RMSNorm=GEMMA4_NORM, TextMLP=LLAMA_MLP),
    ),
    Family(
        "phi4_multimodal",
        "Phi4MultimodalModel",
        ("Phi4MultimodalAttention",),
        drops_packing=True,
        fast=named(
            "Phi4Multimodal", Attention=PHI3_ATTENTION, RMSNorm=LLAMA_NORM, MLP=PHI3_MLP, DecoderLayer=PHI3_LAYER
        ),
    ),
)
