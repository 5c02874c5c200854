"""Families of the varlen tier: their attention goes through :mod:`fastpack.attention_dispatch` in its stock forward.

Norms, MLPs and blocks of experts that have a spec are fast, and the rest is stock.

A family belongs here if it meets all of these conditions. They were checked in the family's source, and tests compare
packed batches with each sequence alone (``tests/families``):

- every attention module calls transformers' attention interface, and hands its window, softcap, sinks and scale to it
  (a window that only the mask applies, as in Qwen2-MoE, would be lost);
- nothing else mixes tokens: no convolution, recurrence, linear attention, token shift or n-gram embedding, no router
  with a capacity, no indexer that picks keys;
- positions are those of ``position_ids``, without an offset of the family's own (RoBERTa has one);
- the mask is plain causal or windowed: no bias or mask of the family's own (Doge, prefixes), no chunks (Llama 4);
- its backbone class is always a decoder (BERT's is not), and is the module that the head calls (BART's is not).
"""

from fastpack.families.shared_specs import (
    COHERE_NORM,
    GEMMA4_NORM,
    LLAMA_MLP,
    LLAMA_NORM,
    LLAMA_PARTS,
    MIXTRAL_EXPERTS,
    MIXTRAL_PARTS,
    OLMO2_NORM,
    like,
    named,
)
from fastpack.families.spec import BlockSpec, Family

VARLEN_FAMILIES: tuple[Family, ...] = (
    Family("axk1", "AXK1Model", ("AXK1Attention",), fast=named("AXK1", **MIXTRAL_PARTS), routers=("AXK1TopkRouter",)),
    Family(
        "beam",
        "BeamModel",
        ("BeamAttention",),
        fast=named("Beam", RMSNorm=OLMO2_NORM, Experts=MIXTRAL_EXPERTS),
        routers=("BeamTopKRouter",),
    ),
    Family("biogpt", "BioGptModel", ("BioGptAttention",)),
    Family("bitnet", "BitNetModel", ("BitNetAttention",), fast=named("BitNet", RMSNorm=LLAMA_NORM)),
    Family(  # norms of heads have a weight for each head; it embeds images itself
        "chameleon",
        "ChameleonModel",
        ("ChameleonAttention",),
        fast=named("Chameleon", **LLAMA_PARTS),
        media=("pixel_values", "mm_encoder_outputs"),
    ),
    Family(
        "cohere2_moe",
        "Cohere2MoeModel",
        ("Cohere2MoeAttention",),
        fast=named("Cohere2Moe", **MIXTRAL_PARTS, LayerNorm=COHERE_NORM),
        routers=("Cohere2MoeTopKRouter",),
    ),
    Family(
        "cohere_compass_text",
        "CohereCompassTextModel",
        ("CohereCompassAttention",),
        package="cohere_compass",
        fast=named("CohereCompass", MLP=LLAMA_MLP, LayerNorm=COHERE_NORM),
    ),
    Family("ctrl", "CTRLModel", ("MultiHeadAttention",)),
    Family(
        "dbrx",
        "DbrxModel",
        ("DbrxAttention",),
        routers=("DbrxFFN",),
        uncounted=True,
        since=((5, 15), "has a router as wide as its experts, and can't run"),
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2Model",
        ("DeepseekV2Attention",),
        fast=named("DeepseekV2", **MIXTRAL_PARTS),
        routers=("DeepseekV2TopkRouter",),
    ),
    Family(
        "diffllama",
        "DiffLlamaModel",
        ("DiffLlamaAttention",),
        uncounted=True,
        fast=named("DiffLlama", **LLAMA_PARTS),
    ),
    Family("dory", "DoryModel", ("DoryAttention",), uncounted=True),
    Family(
        "flint",
        "FlintModel",
        ("FlintAttention",),
        fast=named("Flint", **like(MIXTRAL_PARTS, RMSNorm=OLMO2_NORM)),
        routers=("FlintTopKRouter",),
    ),
    Family("gpt2", "GPT2Model", ("GPT2Attention",)),
    Family("gpt_bigcode", "GPTBigCodeModel", ("GPTBigCodeAttention",)),
    Family("gpt_neox", "GPTNeoXModel", ("GPTNeoXAttention",)),
    Family(
        "hunyuan_vl_text",  # the two elements of a pair may be rotated by positions of different axes
        "HunYuanVLTextModel",
        ("HunYuanVLDenseV1Attention",),
        package="hunyuan_vl",
        fast=named("HunYuanVL", **LLAMA_PARTS),
    ),
    Family(
        "jetmoe",
        "JetMoeModel",
        ("JetMoeAttention",),
        fast=named("JetMoe", RMSNorm=LLAMA_NORM),
        routers=("JetMoeTopKGating",),
    ),
    Family(
        "laguna",
        "LagunaModel",
        ("LagunaAttention",),
        fast=named("Laguna", **MIXTRAL_PARTS),
        routers=("LagunaTopKRouter",),
    ),
    Family(
        "longcat_flash",
        "LongcatFlashModel",
        ("LongcatFlashMLA",),
        uncounted=True,
        fast=named("LongcatFlash", **LLAMA_PARTS),
        routers=("LongcatFlashTopkRouter",),
    ),
    Family(
        "mimo_v2_flash",
        "MiMoV2FlashModel",
        ("MiMoV2FlashAttention",),
        fast=named("MiMoV2Flash", **MIXTRAL_PARTS),
        routers=("MiMoV2FlashTopkRouter",),
    ),
    Family("minicpm3", "MiniCPM3Model", ("MiniCPM3Attention",), fast=named("MiniCPM3", **LLAMA_PARTS)),
    Family(
        "modernbert-decoder", "ModernBertDecoderModel", ("ModernBertDecoderAttention",), package="modernbert_decoder"
    ),
    Family(
        "muse_spark_text",
        "MuseSparkTextModel",
        ("MuseSparkTextAttention",),
        package="muse_spark",
        fast=named("MuseSpark", RMSNorm=GEMMA4_NORM, TextMLP=LLAMA_MLP),
        routers=("MuseSparkTopkRouter",),
    ),
    Family("nanochat", "NanoChatModel", ("NanoChatAttention",)),
    Family("olmo", "OlmoModel", ("OlmoAttention",), fast=named("Olmo", MLP=LLAMA_MLP)),
    Family(
        "olmoe", "OlmoeModel", ("OlmoeAttention",), fast=named("Olmoe", **MIXTRAL_PARTS), routers=("OlmoeTopKRouter",)
    ),
    Family("persimmon", "PersimmonModel", ("PersimmonAttention",)),
    Family("phi", "PhiModel", ("PhiAttention",)),
    # a module, or the head, drops the keyword packed_seq_lens
    Family("bert", "BertModel", ("BertSelfAttention",), drops_packing=True, causal_if_decoder=True),
    Family(
        "bert-generation",
        "BertGenerationEncoder",
        ("BertGenerationSelfAttention",),
        package="bert_generation",
        drops_packing=True,
        causal_if_decoder=True,
    ),
    Family("electra", "ElectraModel", ("ElectraSelfAttention",), drops_packing=True, causal_if_decoder=True),
    Family("ernie", "ErnieModel", ("ErnieSelfAttention",), drops_packing=True, causal_if_decoder=True),
    Family(
        "gemma3n_text",
        "Gemma3nTextModel",
        ("Gemma3nTextAttention",),
        package="gemma3n",
        drops_packing=True,
        shares_states=True,
        uncounted=True,
    ),
    Family(
        "hrm_text",
        "HrmTextModel",
        ("HrmTextAttention",),
        drops_packing=True,
        uncounted=True,
        blocks=BlockSpec("token_type_ids", setting=("prefix_lm", True), one_each=True),
        two_way="whole",
    ),
    Family("moshi", "MoshiModel", ("MoshiAttention",), drops_packing=True),
    Family(
        "nemotron",
        "NemotronModel",
        ("NemotronAttention",),
        drops_packing=True,
        since=((5, 13), "has attention that no interface serves"),
    ),
    Family("opt", "OPTDecoder", ("OPTAttention",), drops_packing=True),
    Family("roc_bert", "RoCBertModel", ("RoCBertSelfAttention",), drops_packing=True, causal_if_decoder=True),
    Family("stablelm", "StableLmModel", ("StableLmAttention",), drops_packing=True, fast={"StableLmMLP": LLAMA_MLP}),
)
