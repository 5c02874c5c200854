"""Families with modules that mix tokens across boundaries: these run on one row for each sequence, others run packed.

Such a module is listed here if its result for a token depends only on the tokens before it, and not on the row's
length. The listed modules are recurrences, state spaces, linear attention and convolutions; attention that does not use
transformers' interface, that has a window, chunks or ALiBi only in its mask, or that picks its keys; and embeddings
that count positions.
"""

from dataclasses import replace

from fastpack.families.mixer_spec import DeltaNetSpec, GatedConvSpec, KimiDeltaSpec, Mamba2Spec, MixerSpec
from fastpack.families.shared_specs import (
    DEEPSEEK_V4_EXPERTS,
    DELTA_NORM,
    FALCON_H1_ATTENTION,
    GEMMA_NORM,
    GLM5_EXPERTS,
    GRANITE_MOE_HEAD,
    GRANITE_MOE_MLP,
    KDA_NORM,
    KIMI_ATTENTION,
    KIMI_LAYER,
    LARA_NORM,
    LFM2_MLP,
    LFM2_PARTS,
    LLAMA_ATTENTION,
    LLAMA_HEAD,
    LLAMA_MLP,
    LLAMA_NORM,
    LLAMA_PARTS,
    MAMBA2_NORM,
    MINIMAX_M3_EXPERTS,
    MISTRAL_ATTENTION,
    MIXTRAL_EXPERTS,
    MIXTRAL_HEAD,
    MIXTRAL_PARTS,
    NEMOTRON_EXPERTS,
    OLMO2_ATTENTION,
    OLMO2_LAYER,
    OLMO2_NORM,
    QWEN3_ATTENTION,
    QWEN3_NEXT,
    QWEN3_NEXT_LAYER,
    QWEN3_NEXT_MOE,
    UNGROUPED_NORM,
    named,
)
from fastpack.families.spec import Family

_STOCK = MixerSpec()
_MASKED = MixerSpec("added")
_TOP_KEYS = MixerSpec("added", carried="prev_topk_indices")
_POSITIONS = MixerSpec(left_out=("position_ids",), counts_from="padding_idx")
"""For an embedding that counts positions itself, from the padding id on."""

# mixers that kernels run on packed tokens
_CONV = MixerSpec(scan="conv", net=GatedConvSpec())
_SSD = MixerSpec(scan="ssd", net=Mamba2Spec())
_FALCON_H1 = replace(_SSD, net=Mamba2Spec(scale="ssm_in_multiplier", scales="mup_vector", norm_if="mamba_rms_norm"))
_DELTA = MixerSpec(scan="gated_delta")
_QWEN3_5 = replace(_DELTA, net=DeltaNetSpec())
_QWEN3_NEXT = replace(
    _DELTA, net=DeltaNetSpec(inner=("in_proj_qkvz", "in_proj_ba"), split="fix_query_key_value_ordering")
)
_OLMO_HYBRID = replace(
    _DELTA,
    net=DeltaNetSpec(
        inner=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
        norm="o_norm",
        out="o_proj",
        doubled_if="allow_neg_eigval",
    ),
)
_KDA = MixerSpec(scan="kda")
_KIMI = replace(_KDA, net=KimiDeltaSpec())


def _bart(model_type: str, name: str, positions: str = "LearnedPositionalEmbedding", package: str = "") -> Family:
    """Return the row of a decoder without its encoder: attention is packed, and positions count from 0 in each row."""
    return Family(
        model_type,
        f"{name}Decoder",
        (f"{name}Attention",),
        package=package,
        mixers={f"{name}{positions}": _STOCK},
        unshifted=f"{name}ForCausalLM",
    )


def _roberta(model_type: str, name: str, package: str = "", file: str = "") -> Family:
    """Return the row of a BERT whose positions count from the padding id on."""
    return Family(
        model_type,
        f"{name}Model",
        (f"{name}SelfAttention",),
        package=package,
        file=file,
        mixers={f"{name}Embeddings": _POSITIONS},
        causal_if_decoder=True,
    )


def _old_bert(model_type: str, name: str, package: str = "") -> Family:
    """Return the row of a BERT with its own attention, which was bidirectional in older releases."""
    return Family(
        model_type,
        f"{name}Model",
        package=package,
        mixers={f"{name}SelfAttention": _MASKED},
        causal_if_decoder=True,
        since=((5, 23), "attends in both directions, even if its config has is_decoder=True"),
    )


MIXER_FAMILIES: tuple[Family, ...] = (
    # recurrences, state spaces, linear attention and convolutions, mostly with attention in other layers
    Family(
        "bailing_hybrid",
        "BailingHybridModel",
        ("BailingHybridAttention",),
        mixers={"BailingHybridDeltaAttention": _KDA},
        fast=named("BailingHybrid", **MIXTRAL_PARTS, RMSNormGated=KDA_NORM),
    ),
    Family(
        "bamba",
        "BambaModel",
        ("BambaAttention",),
        mixers={"BambaMixer": _SSD},
        fast=named("Bamba", Attention=LLAMA_ATTENTION, RMSNorm=LLAMA_NORM, RMSNormGated=MAMBA2_NORM, MLP=LLAMA_MLP),
        earlier=named("Bamba", RMSNormGated=UNGROUPED_NORM),
    ),
    Family(
        "falcon_h1",
        "FalconH1Model",
        ("FalconH1Attention",),
        mixers={"FalconH1Mixer": _FALCON_H1},
        fast=named("FalconH1", Attention=FALCON_H1_ATTENTION, RMSNorm=LLAMA_NORM),
    ),
    Family(
        "falcon_mamba",
        "FalconMambaModel",
        mixers={"FalconMambaMixer": _STOCK},
        fast=named("FalconMamba", RMSNorm=LLAMA_NORM),
    ),
    Family(
        "glm5_next_text",
        "Glm5NextTextModel",
        package="glm5_next",
        mixers={
            "Glm5NextTextAttention": MixerSpec("real", carried="prev_topk_indices"),
            "Glm5NextTextLinearAttention": _KDA,
        },
        fast=named(  # its MLP clamps
            "Glm5NextText", RMSNorm=LLAMA_NORM, RMSNormGated=KDA_NORM, Experts=GLM5_EXPERTS
        ),
        routers=("Glm5NextTextTopkRouter",),
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridModel",
        ("GraniteMoeHybridAttention",),
        mixers={"GraniteMoeHybridMambaLayer": _SSD},
        fast=named(
            "GraniteMoeHybrid",
            Attention=LLAMA_ATTENTION,
            RMSNorm=LLAMA_NORM,
            RMSNormGated=MAMBA2_NORM,
            MLP=GRANITE_MOE_MLP,
            Experts=MIXTRAL_EXPERTS,
            ForCausalLM=GRANITE_MOE_HEAD,
        ),
        earlier=named("GraniteMoeHybrid", RMSNormGated=UNGROUPED_NORM),
    ),
    Family(
        "jamba",
        "JambaModel",
        ("JambaAttention",),
        mixers={"JambaMambaMixer": _STOCK},
        fast=named("Jamba", **MIXTRAL_PARTS, Attention=LLAMA_ATTENTION, ForCausalLM=MIXTRAL_HEAD),
    ),
    Family(
        "kimi_linear",
        "KimiLinearModel",
        ("KimiLinearAttention",),
        mixers={"KimiLinearDeltaAttention": _KIMI},
        fast=named(
            "KimiLinear",
            **MIXTRAL_PARTS,
            Attention=KIMI_ATTENTION,
            RMSNormGated=KDA_NORM,
            DecoderLayer=KIMI_LAYER,
        ),
    ),
    Family(
        "lara_mini",
        "LaraMiniModel",
        ("LaraMiniAttention",),
        mixers={"LaraMiniGatedDeltaNet": _DELTA},
        fast=named(
            "LaraMini",
            Attention=QWEN3_ATTENTION,
            RMSNorm=OLMO2_NORM,
            RMSNormGated=LARA_NORM,
            MLP=LLAMA_MLP,
            Experts=MIXTRAL_EXPERTS,
            ForCausalLM=MIXTRAL_HEAD,
        ),
    ),
    Family(
        "lfm2",
        "Lfm2Model",
        ("Lfm2Attention",),
        mixers={"Lfm2ShortConv": _CONV},
        fast=named("Lfm2", **LFM2_PARTS, ForCausalLM=LLAMA_HEAD),
    ),
    Family(
        "lfm2_moe",
        "Lfm2MoeModel",
        ("Lfm2MoeAttention",),
        mixers={"Lfm2MoeShortConv": _CONV},
        fast=named("Lfm2Moe", **LFM2_PARTS, Experts=MIXTRAL_EXPERTS),
    ),
    Family(
        "lfm3",
        "Lfm3Model",
        ("Lfm3Attention",),
        mixers={"Lfm3ShortConv": _CONV},
        fast=named("Lfm3", RMSNorm=LLAMA_NORM, MLP=LFM2_MLP, ForCausalLM=LLAMA_HEAD),
    ),
    Family("mamba", "MambaModel", mixers={"MambaMixer": _STOCK}, fast=named("Mamba", RMSNorm=LLAMA_NORM)),
    Family(
        "mamba2",
        "Mamba2Model",
        mixers={"Mamba2Mixer": _SSD},
        fast={**named("Mamba2", RMSNorm=LLAMA_NORM), **named("Mamba", RMSNormGated=MAMBA2_NORM)},
        earlier=named("Mamba", RMSNormGated=UNGROUPED_NORM),
    ),
    Family(
        "minimax",
        "MiniMaxModel",
        ("MiniMaxAttention",),
        mixers={"MiniMaxLightningAttention": MixerSpec(states=1)},
        fast=named("MiniMax", Attention=MISTRAL_ATTENTION, RMSNorm=LLAMA_NORM, Experts=MIXTRAL_EXPERTS),
    ),
    Family(
        "nemotron_h",
        "NemotronHModel",
        ("NemotronHAttention",),
        mixers={"NemotronHMamba2Mixer": _SSD},
        fast=named(
            "NemotronH",
            Attention=LLAMA_ATTENTION,
            RMSNorm=OLMO2_NORM,
            RMSNormGated=MAMBA2_NORM,
            Experts=NEMOTRON_EXPERTS,
        ),
        earlier=named("NemotronH", RMSNorm=LLAMA_NORM),
    ),
    Family(
        "olmo_hybrid",
        "OlmoHybridModel",
        ("OlmoHybridAttention",),
        mixers={"OlmoHybridGatedDeltaNet": _OLMO_HYBRID},
        fast=named(
            "OlmoHybrid",
            Attention=OLMO2_ATTENTION,
            RMSNorm=OLMO2_NORM,
            RMSNormGated=DELTA_NORM,
            MLP=LLAMA_MLP,
            AttentionDecoderLayer=OLMO2_LAYER,
            LinearAttentionDecoderLayer=QWEN3_NEXT_LAYER,
            ForCausalLM=LLAMA_HEAD,
        ),
    ),
    Family(
        "qwen3_5_text",
        "Qwen3_5TextModel",
        ("Qwen3_5Attention",),
        package="qwen3_5",
        mixers={"Qwen3_5GatedDeltaNet": _QWEN3_5},
        fast=named("Qwen3_5", **QWEN3_NEXT),
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeTextModel",
        ("Qwen3_5MoeAttention",),
        package="qwen3_5_moe",
        mixers={"Qwen3_5MoeGatedDeltaNet": _QWEN3_5},
        fast=named("Qwen3_5Moe", **QWEN3_NEXT_MOE),
    ),
    Family(
        "qwen3_next",
        "Qwen3NextModel",
        ("Qwen3NextAttention",),
        mixers={"Qwen3NextGatedDeltaNet": _QWEN3_NEXT},
        fast=named("Qwen3Next", **QWEN3_NEXT_MOE),
    ),
    Family(
        "recurrent_gemma",
        "RecurrentGemmaModel",
        ("RecurrentGemmaAttention",),
        mixers={"RecurrentGemmaRecurrentBlock": _STOCK},
        fast=named("RecurrentGemma", RMSNorm=GEMMA_NORM),
        since=((5, 13), "has attention that no interface serves"),
    ),
    Family("rwkv", "RwkvModel", mixers={"RwkvSelfAttention": _STOCK, "RwkvFeedForward": _STOCK}),
    Family("xlstm", "xLSTMModel", mixers={"xLSTMLayer": MixerSpec(states=1)}),
    Family(
        "zamba",
        "ZambaModel",
        ("ZambaAttention",),
        mixers={"ZambaMambaMixer": _STOCK},
        fast=named("Zamba", **LLAMA_PARTS),
    ),
    Family(
        "zamba2",
        "Zamba2Model",
        ("Zamba2Attention",),
        mixers={"Zamba2MambaMixer": _SSD},
        fast=named("Zamba2", RMSNorm=LLAMA_NORM, RMSNormGated=MAMBA2_NORM),
    ),
    # attention that picks its keys, or has a window or chunks only in its mask
    Family("axk2", "AXK2Model", mixers={"AXK2Attention": _MASKED}, fast=named("AXK2", **MIXTRAL_PARTS)),
    Family(
        "deepseek_v32",
        "DeepseekV32Model",
        mixers={"DeepseekV32Attention": _MASKED},
        fast=named("DeepseekV32", **MIXTRAL_PARTS),
    ),
    Family(
        "deepseek_v4",
        "DeepseekV4Model",
        mixers={"DeepseekV4Attention": MixerSpec("added", window="sliding_window", in_every_layer=True)},
        fast=named("DeepseekV4", Experts=DEEPSEEK_V4_EXPERTS),
    ),
    Family(
        "glm_moe_dsa",
        "GlmMoeDsaModel",
        mixers={"GlmMoeDsaAttention": _TOP_KEYS},
        fast=named("GlmMoeDsa", **MIXTRAL_PARTS),
        since=((5, 11), "attends to later tokens if it gets no mask"),
    ),
    Family("hy_v4", "HYV4Model", mixers={"HYV4Attention": _TOP_KEYS}, fast=named("HYV4", Experts=GLM5_EXPERTS)),
    Family(
        "hy_v4_vl_text",
        "HYV4VLTextModel",
        package="hy_v4_vl",
        mixers={"HYV4VLAttention": _TOP_KEYS},
        fast=named("HYV4VL", **LLAMA_PARTS, Experts=GLM5_EXPERTS),
        routers=("HYV4VLTopkRouter",),
    ),
    Family(
        "doge",
        "DogeModel",
        mixers={"DogeAttention": _MASKED},
        fast=named("Doge", **LLAMA_PARTS),
        repadded_if=("sliding_window",),  # only upstream's mask applies it
        refused_if={"is_moe": "its routing mixes the tokens of a whole batch, whatever rows they are in"},
    ),
    Family(
        "dots3_note_text",
        "Dots3NoteTextModel",
        package="dots3_note",
        mixers={"Dots3NoteTextAttention": MixerSpec("added", window="sliding_window")},
        fast=named("Dots3Note", Experts=MIXTRAL_EXPERTS),
    ),
    Family(
        "llama4_text",
        "Llama4TextModel",
        package="llama4",
        mixers={"Llama4TextAttention": MixerSpec("added", chunk="config.attention_chunk_size")},
    ),
    Family(
        "minimax_m3_vl_text",
        "MiniMaxM3VLTextModel",
        package="minimax_m3_vl",
        mixers={"MiniMaxM3VLAttention": _MASKED},
        fast=named("MiniMaxM3VL", RMSNorm=GEMMA_NORM, Experts=MINIMAX_M3_EXPERTS),
    ),
    Family(
        "mistral_large4_text",
        "MistralLarge4TextModel",
        package="mistral_large4",
        mixers={"MistralLarge4TextAttention": replace(_TOP_KEYS, shared="shared_kv_states")},
        shares_states=True,
        fast=named("MistralLarge4", RMSNorm=LLAMA_NORM, TextMLP=LLAMA_MLP, TextExperts=MIXTRAL_EXPERTS),
        routers=("MistralLarge4TextTopkRouter",),
    ),
    # attention of the family's own
    Family(
        "bigbird_pegasus",
        "BigBirdPegasusDecoder",
        mixers={"BigBirdPegasusDecoderAttention": _MASKED, "BigBirdPegasusLearnedPositionalEmbedding": _STOCK},
        unshifted="BigBirdPegasusForCausalLM",
    ),
    Family(
        "bloom",
        "BloomModel",
        mixers={"BloomAttention": MixerSpec("added", alibi="alibi")},
        alibi="build_alibi_tensor",
    ),
    Family("codegen", "CodeGenModel", mixers={"CodeGenAttention": _MASKED}),
    Family("falcon", "FalconModel", mixers={"FalconAttention": _MASKED}, repadded_if=("alibi",)),
    Family("gpt_neo", "GPTNeoModel", mixers={"GPTNeoSelfAttention": _MASKED}),
    Family("gpt_neox_japanese", "GPTNeoXJapaneseModel", mixers={"GPTNeoXJapaneseAttention": _MASKED}),
    Family("gptj", "GPTJModel", mixers={"GPTJAttention": _MASKED}),
    Family("mpt", "MptModel", mixers={"MptAttention": MixerSpec("hidden", unchanged=("position_bias",))}),
    Family(
        "mvp",
        "MvpDecoder",
        mixers={"MvpAttention": _MASKED, "MvpLearnedPositionalEmbedding": _STOCK},
        unshifted="MvpForCausalLM",
    ),
    Family("openai-gpt", "OpenAIGPTModel", package="openai", mixers={"Attention": _STOCK}, unmasked=True),
    Family(
        "trocr",
        "TrOCRDecoder",
        mixers={
            "TrOCRAttention": _MASKED,
            "TrOCRLearnedPositionalEmbedding": _STOCK,
            "TrOCRSinusoidalPositionalEmbedding": _STOCK,
        },
        unshifted="TrOCRForCausalLM",
    ),
    Family("xglm", "XGLMModel", mixers={"XGLMAttention": _MASKED}),
    _old_bert("megatron-bert", "MegatronBert", package="megatron_bert"),
    _old_bert("rembert", "RemBert"),
    # the length of its rotary tables depends on the number of positions, and values may be rotated too
    replace(_old_bert("roformer", "RoFormer"), mixers={}, repadded=True),
    # positions that an embedding counts by itself
    _bart("bart", "Bart"),
    _bart("blenderbot", "Blenderbot"),
    _bart("blenderbot-small", "BlenderbotSmall", package="blenderbot_small"),
    _bart("marian", "Marian", "SinusoidalPositionalEmbedding"),
    _bart("mbart", "MBart"),
    replace(_bart("musicgen", "Musicgen", "SinusoidalPositionalEmbedding"), unshifted=""),
    replace(_bart("musicgen_melody", "MusicgenMelody", "SinusoidalPositionalEmbedding"), unshifted=""),
    _bart("pegasus", "Pegasus", "SinusoidalPositionalEmbedding"),
    _bart("plbart", "PLBart"),
    _bart("whisper", "Whisper", "PositionalEmbedding"),
    Family(
        "kosmos_2_text_model",
        "Kosmos2TextTransformer",
        ("KosmosTextAttention",),
        package="kosmos2",
        mixers={"Kosmos2TextSinusoidalPositionalEmbedding": _POSITIONS},
        masks_by="_prepare_decoder_attention_mask",
        media=("image_embeds",),
    ),
    Family(
        "kosmos_2_5_text_model",
        "Kosmos2_5TextTransformer",
        ("Kosmos2_5TextAttention",),
        package="kosmos2_5",
        mixers={"Kosmos2_5TextSinusoidalPositionalEmbedding": _POSITIONS},
        media=("image_embeds",),
    ),
    _roberta("camembert", "Camembert"),
    _roberta("data2vec-text", "Data2VecText", package="data2vec", file="data2vec_text"),
    _roberta("roberta", "Roberta"),
    _roberta("roberta-prelayernorm", "RobertaPreLayerNorm", package="roberta_prelayernorm"),
    _roberta("xlm-roberta", "XLMRoberta", package="xlm_roberta"),
    _roberta("xlm-roberta-xl", "XLMRobertaXL", package="xlm_roberta_xl"),
    replace(_roberta("xmod", "Xmod"), row_arguments=("lang_ids",)),
)
