"""Families of the varlen rung: their attention goes through :mod:`fastpack.attention_dispatch`, all else is stock.

A family belongs here when, read in its source and proved against each sequence alone (``tests/families``):

- every attention module calls transformers' attention interface, and hands its window, softcap, sinks and scale to it
  (a window that lives only in the mask, as in Qwen2-MoE, would be lost);
- nothing else mixes tokens: no convolution, recurrence, linear attention, token shift or n-gram embedding, no router
  with a capacity, no indexer that picks keys;
- positions come from ``position_ids`` as they are, without an offset of the family's own (RoBERTa);
- the mask is plain causal or windowed: no bias or mask of the family's own (Doge, prefixes), no chunks (Llama 4);
- its backbone class is always a decoder (BERT's is not), and is the module that the head calls (BART's is not).
"""

from fastpack.families.spec import Family

VARLEN_FAMILIES: tuple[Family, ...] = (
    Family("afmoe", "AfmoeModel", ("AfmoeAttention",)),
    Family("apertus", "ApertusModel", ("ApertusAttention",)),
    Family("arcee", "ArceeModel", ("ArceeAttention",)),
    Family("aria_text", "AriaTextModel", ("AriaTextAttention",), package="aria"),
    Family("axk1", "AXK1Model", ("AXK1Attention",)),
    Family("beam", "BeamModel", ("BeamAttention",)),
    Family("biogpt", "BioGptModel", ("BioGptAttention",)),
    Family("bitnet", "BitNetModel", ("BitNetAttention",)),
    Family("cohere2", "Cohere2Model", ("Cohere2Attention",)),
    Family("cohere2_moe", "Cohere2MoeModel", ("Cohere2MoeAttention",)),
    Family("cohere_compass_text", "CohereCompassTextModel", ("CohereCompassAttention",), package="cohere_compass"),
    Family("ctrl", "CTRLModel", ("MultiHeadAttention",)),
    Family("cwm", "CwmModel", ("CwmAttention",)),
    Family("dbrx", "DbrxModel", ("DbrxAttention",)),
    Family("deepseek_v2", "DeepseekV2Model", ("DeepseekV2Attention",)),
    Family("deepseek_v3", "DeepseekV3Model", ("DeepseekV3Attention",)),
    Family("diffllama", "DiffLlamaModel", ("DiffLlamaAttention",)),
    Family("dots1", "Dots1Model", ("Dots1Attention",)),
    Family("ernie4_5", "Ernie4_5Model", ("Ernie4_5Attention",)),
    Family("ernie4_5_moe", "Ernie4_5_MoeModel", ("Ernie4_5_MoeAttention",)),
    Family("exaone4", "Exaone4Model", ("Exaone4Attention",)),
    Family("exaone_moe", "ExaoneMoeModel", ("ExaoneMoeAttention",)),
    Family("flex_olmo", "FlexOlmoModel", ("FlexOlmoAttention",)),
    Family("flint", "FlintModel", ("FlintAttention",)),
    Family("glm", "GlmModel", ("GlmAttention",)),
    Family("glm4", "Glm4Model", ("Glm4Attention",)),
    Family("glm4_moe", "Glm4MoeModel", ("Glm4MoeAttention",)),
    Family("glm4_moe_lite", "Glm4MoeLiteModel", ("Glm4MoeLiteAttention",)),
    Family("gpt2", "GPT2Model", ("GPT2Attention",)),
    Family("gpt_bigcode", "GPTBigCodeModel", ("GPTBigCodeAttention",)),
    Family("gpt_neox", "GPTNeoXModel", ("GPTNeoXAttention",)),
    Family("gpt_oss", "GptOssModel", ("GptOssAttention",)),
    Family("granite_swa", "GraniteSWAModel", ("GraniteSWAAttention",)),
    Family("granitemoe", "GraniteMoeModel", ("GraniteMoeAttention",)),
    Family("granitemoe_swa", "GraniteMoeSWAModel", ("GraniteMoeSWAAttention",)),
    Family("granitemoeshared", "GraniteMoeSharedModel", ("GraniteMoeSharedAttention",)),
    Family("helium", "HeliumModel", ("HeliumAttention",)),
    Family("hunyuan_v1_dense", "HunYuanDenseV1Model", ("HunYuanDenseV1Attention",)),
    Family("hunyuan_v1_moe", "HunYuanMoEV1Model", ("HunYuanMoEV1Attention",)),
    Family("hy_v3", "HYV3Model", ("HYV3Attention",)),
    Family("hyperclovax", "HyperCLOVAXModel", ("HyperCLOVAXAttention",)),
    Family("jais2", "Jais2Model", ("Jais2Attention",)),
    Family("jetmoe", "JetMoeModel", ("JetMoeAttention",)),
    Family("kolibri1", "Kolibri1Model", ("Kolibri1Attention",)),
    Family("laguna", "LagunaModel", ("LagunaAttention",)),
    Family("longcat_flash", "LongcatFlashModel", ("LongcatFlashMLA",)),
    Family("mellum", "MellumModel", ("MellumAttention",)),
    Family("mimo_v2_flash", "MiMoV2FlashModel", ("MiMoV2FlashAttention",)),
    Family("minicpm3", "MiniCPM3Model", ("MiniCPM3Attention",)),
    Family("minimax_m2", "MiniMaxM2Model", ("MiniMaxM2Attention",)),
    Family("ministral", "MinistralModel", ("MinistralAttention",)),
    Family("ministral3", "Ministral3Model", ("Ministral3Attention",)),
    Family(
        "modernbert-decoder", "ModernBertDecoderModel", ("ModernBertDecoderAttention",), package="modernbert_decoder"
    ),
    Family("nanochat", "NanoChatModel", ("NanoChatAttention",)),
    Family("olmo", "OlmoModel", ("OlmoAttention",)),
    Family("olmo3", "Olmo3Model", ("Olmo3Attention",)),
    Family("olmoe", "OlmoeModel", ("OlmoeAttention",)),
    Family("persimmon", "PersimmonModel", ("PersimmonAttention",)),
    Family("phi", "PhiModel", ("PhiAttention",)),
    Family("seed_oss", "SeedOssModel", ("SeedOssAttention",)),
    Family("solar_open", "SolarOpenModel", ("SolarOpenAttention",)),
    Family("starcoder2", "Starcoder2Model", ("Starcoder2Attention",)),
    Family("vaultgemma", "VaultGemmaModel", ("VaultGemmaAttention",)),
    Family("youtu", "YoutuModel", ("YoutuAttention",)),
)
