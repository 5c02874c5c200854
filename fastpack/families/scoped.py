"""Further families of the fast and varlen rungs, whose own modules, or heads, drop the packing on its way to attention.

They fulfil what :mod:`fastpack.families.varlen` asks for, but for that: the packing reaches their attention through a
:class:`fastpack.packing.context.PackingContext`. BERT and its kin are decoders only where their config says so.
"""

from fastpack.families.spec import Family, names

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
    Family("emu3", "Emu3TextModel", ("Emu3Attention",), scoped=True, fast=names("Emu3", "Attention RMSNorm MLP")),
    Family("ernie", "ErnieModel", ("ErnieSelfAttention",), scoped=True, by_choice=True),
    Family(
        "gemma3",
        "Gemma3Model",
        ("Gemma3Attention",),
        scoped=True,
        two_way_marks="token_type_ids",
        fast=names("Gemma3", "Attention RMSNorm MLP DecoderLayer"),
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
        fast=names("Gemma4", "TextAttention RMSNorm TextMLP"),
    ),
    Family(
        "gemma4_text",
        "Gemma4TextModel",
        ("Gemma4TextAttention",),
        package="gemma4",
        scoped=True,
        shares_states=True,
        routers=("Gemma4TextRouter",),
        fast=names("Gemma4", "TextAttention RMSNorm TextMLP"),
    ),
    Family(
        "gemma4_unified",
        "Gemma4UnifiedModel",
        ("Gemma4UnifiedTextAttention",),
        scoped=True,
        two_way_marks="mm_token_type_ids",
        two_way_if=("use_bidirectional_attention", "vision"),
        fast=names("Gemma4Unified", "TextAttention RMSNorm TextMLP"),
    ),
    Family(
        "gemma4_unified_text",
        "Gemma4UnifiedTextModel",
        ("Gemma4UnifiedTextAttention",),
        package="gemma4_unified",
        scoped=True,
        fast=names("Gemma4Unified", "TextAttention RMSNorm TextMLP"),
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
    Family("nemotron", "NemotronModel", ("NemotronAttention",), scoped=True),
    Family("opt", "OPTDecoder", ("OPTAttention",), scoped=True),
    Family(
        "phi4_multimodal",
        "Phi4MultimodalModel",
        ("Phi4MultimodalAttention",),
        scoped=True,
        fast=names("Phi4Multimodal", "Attention RMSNorm MLP DecoderLayer"),
    ),
    Family("roc_bert", "RoCBertModel", ("RoCBertSelfAttention",), scoped=True, by_choice=True),
    Family("stablelm", "StableLmModel", ("StableLmAttention",), scoped=True, fast=("StableLmMLP",)),
)
