"""Families of the varlen rung: their attention goes through :mod:`fastpack.attention_dispatch` in its stock forward.

Norms and MLPs whose forms are known are fast, all else is stock.

A family belongs here when, read in its source and proved against each sequence alone (``tests/families``):

- every attention module calls transformers' attention interface, and hands its window, softcap, sinks and scale to it
  (a window that lives only in the mask, as in Qwen2-MoE, would be lost);
- nothing else mixes tokens: no convolution, recurrence, linear attention, token shift or n-gram embedding, no router
  with a capacity, no indexer that picks keys;
- positions come from ``position_ids`` as they are, without an offset of the family's own (RoBERTa);
- the mask is plain causal or windowed: no bias or mask of the family's own (Doge, prefixes), no chunks (Llama 4);
- its backbone class is always a decoder (BERT's is not), and is the module that the head calls (BART's is not).
"""

from fastpack.families.spec import Family, names

VARLEN_FAMILIES: tuple[Family, ...] = (
    Family(
        "afmoe",
        "AfmoeModel",
        ("AfmoeAttention",),
        fast=names("Afmoe", "RMSNorm MLP"),
        routers=("AfmoeTokenChoiceRouter",),
    ),
    Family("axk1", "AXK1Model", ("AXK1Attention",), fast=names("AXK1", "RMSNorm MLP"), routers=("AXK1TopkRouter",)),
    Family("beam", "BeamModel", ("BeamAttention",), fast=names("Beam", "RMSNorm"), routers=("BeamTopKRouter",)),
    Family("biogpt", "BioGptModel", ("BioGptAttention",)),
    Family("bitnet", "BitNetModel", ("BitNetAttention",), fast=names("BitNet", "RMSNorm")),
    Family(
        "cohere2_moe",
        "Cohere2MoeModel",
        ("Cohere2MoeAttention",),
        fast=names("Cohere2Moe", "RMSNorm LayerNorm MLP"),
        routers=("Cohere2MoeTopKRouter",),
    ),
    Family(
        "cohere_compass_text",
        "CohereCompassTextModel",
        ("CohereCompassAttention",),
        package="cohere_compass",
        fast=names("CohereCompass", "MLP LayerNorm"),
    ),
    Family("ctrl", "CTRLModel", ("MultiHeadAttention",)),
    Family("dbrx", "DbrxModel", ("DbrxAttention",), uncounted=True, routers=("DbrxFFN",)),
    Family(
        "deepseek_v2",
        "DeepseekV2Model",
        ("DeepseekV2Attention",),
        fast=names("DeepseekV2", "MLP RMSNorm"),
        routers=("DeepseekV2TopkRouter",),
    ),
    Family(
        "diffllama", "DiffLlamaModel", ("DiffLlamaAttention",), uncounted=True, fast=names("DiffLlama", "MLP RMSNorm")
    ),
    Family("dory", "DoryModel", ("DoryAttention",), uncounted=True),
    Family(
        "flint", "FlintModel", ("FlintAttention",), fast=names("Flint", "RMSNorm MLP"), routers=("FlintTopKRouter",)
    ),
    Family("gpt2", "GPT2Model", ("GPT2Attention",)),
    Family("gpt_bigcode", "GPTBigCodeModel", ("GPTBigCodeAttention",)),
    Family("gpt_neox", "GPTNeoXModel", ("GPTNeoXAttention",)),
    Family(
        "jetmoe", "JetMoeModel", ("JetMoeAttention",), fast=names("JetMoe", "RMSNorm"), routers=("JetMoeTopKGating",)
    ),
    Family(
        "laguna",
        "LagunaModel",
        ("LagunaAttention",),
        fast=names("Laguna", "RMSNorm MLP"),
        routers=("LagunaTopKRouter",),
    ),
    Family(
        "longcat_flash",
        "LongcatFlashModel",
        ("LongcatFlashMLA",),
        uncounted=True,
        fast=names("LongcatFlash", "RMSNorm MLP"),
        routers=("LongcatFlashTopkRouter",),
    ),
    Family(
        "mimo_v2_flash",
        "MiMoV2FlashModel",
        ("MiMoV2FlashAttention",),
        fast=names("MiMoV2Flash", "RMSNorm MLP"),
        routers=("MiMoV2FlashTopkRouter",),
    ),
    Family("minicpm3", "MiniCPM3Model", ("MiniCPM3Attention",), fast=names("MiniCPM3", "RMSNorm MLP")),
    Family("ministral3", "Ministral3Model", ("Ministral3Attention",), fast=names("Ministral3", "MLP RMSNorm")),
    Family(
        "modernbert-decoder", "ModernBertDecoderModel", ("ModernBertDecoderAttention",), package="modernbert_decoder"
    ),
    Family("nanochat", "NanoChatModel", ("NanoChatAttention",)),
    Family("olmo", "OlmoModel", ("OlmoAttention",), fast=names("Olmo", "MLP")),
    Family(
        "olmoe", "OlmoeModel", ("OlmoeAttention",), fast=names("Olmoe", "RMSNorm MLP"), routers=("OlmoeTopKRouter",)
    ),
    Family("persimmon", "PersimmonModel", ("PersimmonAttention",)),
    Family("phi", "PhiModel", ("PhiAttention",)),
)
