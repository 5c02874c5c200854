"""Further families of the fast and varlen tiers, whose own modules, or heads, drop the packing on its way to attention.

They fulfil what :mod:`fastpack.families.varlen` asks for, but for that: the packing reaches their attention through a
:class:`fastpack.packing.context.PackingContext`. BERT and its kin are decoders only where their config says so.
"""

from fastpack.families.forms import (
    GEMMA2_LAYER,
    GEMMA4_ATTENTION,
    GEMMA4_NORM,
    GEMMA_NORM,
    LLAMA_ATTENTION,
    LLAMA_MLP,
    LLAMA_NORM,
    PHI3_ATTENTION,
    PHI3_LAYER,
    PHI3_MLP,
    QWEN3_ATTENTION,
    named,
)
from fastpack.families.spec import Family

SCOPED_FAMILIES: tuple[Family, ...] = (
    Family("bert", "BertModel", ("BertSelfAttention",), scoped=True, by_choice=True),
    Family(
        "bert-generation",
        "BertGenerationEncoder",
        ("BertGenerationSelfAttention",),
        package="bert_generation",
        scoped=True,
        by_choice=True,
    ),
    Family("electra", "ElectraModel", ("ElectraSelfAttention",), scoped=True, by_choice=True),
    Family(
        "emu3",
        "Emu3TextModel",
        ("Emu3Attention",),
        scoped=True,
        fast=named("Emu3", Attention=LLAMA_ATTENTION, RMSNorm=LLAMA_NORM, MLP=LLAMA_MLP),
    ),
    Family("ernie", "ErnieModel", ("ErnieSelfAttention",), scoped=True, by_choice=True),
    Family(
        "gemma3",
        "Gemma3Model",
        ("Gemma3Attention",),
        scoped=True,
        two_way_marks="token_type_ids",
        fast=named("Gemma3", Attention=QWEN3_ATTENTION, RMSNorm=GEMMA_NORM, MLP=LLAMA_MLP, DecoderLayer=GEMMA2_LAYER),
    ),
    Family(
        "gemma3n_text",
        "Gemma3nTextModel",
        ("Gemma3nTextAttention",),
        package="gemma3n",
        scoped=True,
        shares_states=True,
        uncounted=True,
    ),
    Family(
        "gemma4",
        "Gemma4Model",
        ("Gemma4TextAttention",),
        scoped=True,
        two_way_marks="mm_token_type_ids",
        two_way_if=("use_bidirectional_attention", "vision"),
        routers=("Gemma4TextRouter",),
        fast=named("Gemma4", TextAttention=GEMMA4_ATTENTION, RMSNorm=GEMMA4_NORM, TextMLP=LLAMA_MLP),
    ),
    Family(
        "gemma4_text",
        "Gemma4TextModel",
        ("Gemma4TextAttention",),
        package="gemma4",
        scoped=True,
        shares_states=True,
        routers=("Gemma4TextRouter",),
        fast=named("Gemma4", TextAttention=GEMMA4_ATTENTION, RMSNorm=GEMMA4_NORM, TextMLP=LLAMA_MLP),
    ),
    Family(
        "gemma4_unified",
        "Gemma4UnifiedModel",
        ("Gemma4UnifiedTextAttention",),
        scoped=True,
        two_way_marks="mm_token_type_ids",
        two_way_if=("use_bidirectional_attention", "vision"),
        fast=named("Gemma4Unified", TextAttention=GEMMA4_ATTENTION, RMSNorm=GEMMA4_NORM, TextMLP=LLAMA_MLP),
    ),
    Family(
        "gemma4_unified_text",
        "Gemma4UnifiedTextModel",
        ("Gemma4UnifiedTextAttention",),
        package="gemma4_unified",
        scoped=True,
        fast=named("Gemma4Unified", TextAttention=GEMMA4_ATTENTION, RMSNorm=GEMMA4_NORM, TextMLP=LLAMA_MLP),
    ),
    Family(
        "hrm_text",
        "HrmTextModel",
        ("HrmTextAttention",),
        scoped=True,
        uncounted=True,
        two_way_marks="token_type_ids",
        two_way_if=("prefix_lm", True),
    ),
    Family("moshi", "MoshiModel", ("MoshiAttention",), scoped=True),
    Family(
        "nemotron",
        "NemotronModel",
        ("NemotronAttention",),
        scoped=True,
        since=((5, 13), "has attention that no interface serves"),
    ),
    Family("opt", "OPTDecoder", ("OPTAttention",), scoped=True),
    Family(
        "phi4_multimodal",
        "Phi4MultimodalModel",
        ("Phi4MultimodalAttention",),
        scoped=True,
        fast=named(
            "Phi4Multimodal", Attention=PHI3_ATTENTION, RMSNorm=LLAMA_NORM, MLP=PHI3_MLP, DecoderLayer=PHI3_LAYER
        ),
    ),
    Family("roc_bert", "RoCBertModel", ("RoCBertSelfAttention",), scoped=True, by_choice=True),
    Family("stablelm", "StableLmModel", ("StableLmAttention",), scoped=True, fast={"StableLmMLP": LLAMA_MLP}),
)
