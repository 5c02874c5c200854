"""Families with modules that mix tokens and know no boundaries: those run on one row a sequence, all else packed.

A module belongs here when its result for a token depends on nothing to the right of it, and not on the row's length:
recurrences, state spaces, linear attention and convolutions; attention that does not go through transformers'
interface, or has a window, chunks or ALiBi in its mask alone, or picks its keys; positions that an embedding counts by
itself.
"""

from dataclasses import replace

from fastpack.families.spec import Family, MixerSpec, names

_STOCK = MixerSpec()
_MASKED = MixerSpec("added")
_POSITIONS = MixerSpec(left_out=("position_ids",), counts_from="padding_idx")
"""An embedding that counts positions itself, from the padding id on."""

# those that kernels run on packed tokens, with the forwards of transformers 5.17 and 5.23, 5.24
_CONV = MixerSpec(scan="conv", proved=("ebd1bbf414fa", "33e615ce2156"))
_SSD = MixerSpec(scan="ssd", proved=("7b4c0ee386e0", "23e4965d27ab", "6f61df50423e", "f33768edcbff"))
_DELTA = MixerSpec(
    scan="gated_delta",
    proved=("61054d2ee201", "8a8dd6b95ae5", "3abeeb7fd248", "3be85a0f8201", "7c9024a50436", "7e99305a17d7"),
)
_KDA = MixerSpec(scan="kda", proved=("15383149c8ec", "d70003af88e6", "50d5246573fe"))


def _bart(model_type: str, name: str, positions: str = "LearnedPositionalEmbedding", package: str = "") -> Family:
    """A decoder without its encoder: attention is packed, positions are counted from 0 in each row."""
    return Family(
        model_type,
        f"{name}Decoder",
        (f"{name}Attention",),
        package=package,
        mixers={f"{name}{positions}": _STOCK},
        unshifted=f"{name}ForCausalLM",
    )


def _roberta(model_type: str, name: str, package: str = "", file: str = "") -> Family:
    """BERT with positions that are counted from the padding id on."""
    return Family(
        model_type,
        f"{name}Model",
        (f"{name}SelfAttention",),
        package=package,
        file=file,
        mixers={f"{name}Embeddings": _POSITIONS},
        by_choice=True,
    )


def _old_bert(model_type: str, name: str, package: str = "") -> Family:
    """BERT whose attention is its own, and in older releases bidirectional whatever its config says."""
    return Family(
        model_type,
        f"{name}Model",
        package=package,
        mixers={f"{name}SelfAttention": _MASKED},
        by_choice=True,
        since=(5, 23),
    )


MIXER_FAMILIES: tuple[Family, ...] = (
    # recurrences, state spaces, linear attention and convolutions, mostly with attention in other layers
    Family(
        "bailing_hybrid",
        "BailingHybridModel",
        ("BailingHybridAttention",),
        mixers={"BailingHybridDeltaAttention": _KDA},
        fast=names("BailingHybrid", "RMSNorm MLP"),
    ),
    Family(
        "bamba",
        "BambaModel",
        ("BambaAttention",),
        mixers={"BambaMixer": _SSD},
        fast=names("Bamba", "Attention RMSNorm MLP"),
    ),
    Family(
        "falcon_h1",
        "FalconH1Model",
        ("FalconH1Attention",),
        mixers={"FalconH1Mixer": _SSD},
        fast=names("FalconH1", "Attention RMSNorm"),
    ),
    Family(
        "falcon_mamba", "FalconMambaModel", mixers={"FalconMambaMixer": _STOCK}, fast=names("FalconMamba", "RMSNorm")
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridModel",
        ("GraniteMoeHybridAttention",),
        mixers={"GraniteMoeHybridMambaLayer": _SSD},
        fast=names("GraniteMoeHybrid", "Attention RMSNorm MLP ForCausalLM"),
    ),
    Family(
        "jamba",
        "JambaModel",
        ("JambaAttention",),
        mixers={"JambaMambaMixer": _STOCK},
        fast=names("Jamba", "Attention RMSNorm MLP ForCausalLM"),
    ),
    Family(
        "kimi_linear",
        "KimiLinearModel",
        ("KimiLinearAttention",),
        mixers={"KimiLinearDeltaAttention": _KDA},
        fast=names("KimiLinear", "RMSNorm MLP"),
    ),
    Family(
        "lara_mini",
        "LaraMiniModel",
        ("LaraMiniAttention",),
        mixers={"LaraMiniGatedDeltaNet": _DELTA},
        fast=names("LaraMini", "Attention RMSNorm MLP ForCausalLM"),
    ),
    Family(
        "lfm2",
        "Lfm2Model",
        ("Lfm2Attention",),
        mixers={"Lfm2ShortConv": _CONV},
        fast=names("Lfm2", "Attention RMSNorm MLP ForCausalLM"),
    ),
    Family(
        "lfm2_moe",
        "Lfm2MoeModel",
        ("Lfm2MoeAttention",),
        mixers={"Lfm2MoeShortConv": _CONV},
        fast=names("Lfm2Moe", "Attention RMSNorm MLP"),
    ),
    Family(
        "lfm3",
        "Lfm3Model",
        ("Lfm3Attention",),
        mixers={"Lfm3ShortConv": _CONV},
        fast=names("Lfm3", "RMSNorm MLP ForCausalLM"),
    ),
    Family("mamba", "MambaModel", mixers={"MambaMixer": _STOCK}, fast=names("Mamba", "RMSNorm")),
    Family("mamba2", "Mamba2Model", mixers={"Mamba2Mixer": _SSD}, fast=names("Mamba2", "RMSNorm")),
    Family(
        "minimax",
        "MiniMaxModel",
        ("MiniMaxAttention",),
        mixers={"MiniMaxLightningAttention": MixerSpec(states=1)},
        fast=names("MiniMax", "Attention RMSNorm"),
    ),
    Family(
        "nemotron_h",
        "NemotronHModel",
        ("NemotronHAttention",),
        mixers={"NemotronHMamba2Mixer": _SSD},
        fast=names("NemotronH", "Attention RMSNorm"),
    ),
    Family(
        "olmo_hybrid",
        "OlmoHybridModel",
        ("OlmoHybridAttention",),
        mixers={"OlmoHybridGatedDeltaNet": _DELTA},
        fast=names("OlmoHybrid", "Attention RMSNorm MLP AttentionDecoderLayer ForCausalLM"),
    ),
    Family(
        "qwen3_5_text",
        "Qwen3_5TextModel",
        ("Qwen3_5Attention",),
        package="qwen3_5",
        mixers={"Qwen3_5GatedDeltaNet": _DELTA},
        fast=names("Qwen3_5", "Attention RMSNorm MLP ForCausalLM"),
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeTextModel",
        ("Qwen3_5MoeAttention",),
        package="qwen3_5_moe",
        mixers={"Qwen3_5MoeGatedDeltaNet": _DELTA},
        fast=names("Qwen3_5Moe", "Attention RMSNorm MLP ForCausalLM"),
    ),
    Family(
        "qwen3_next",
        "Qwen3NextModel",
        ("Qwen3NextAttention",),
        mixers={"Qwen3NextGatedDeltaNet": _DELTA},
        fast=names("Qwen3Next", "Attention RMSNorm MLP ForCausalLM"),
    ),
    Family(
        "recurrent_gemma",
        "RecurrentGemmaModel",
        ("RecurrentGemmaAttention",),
        mixers={"RecurrentGemmaRecurrentBlock": _STOCK},
        fast=names("RecurrentGemma", "RMSNorm"),
    ),
    Family("rwkv", "RwkvModel", mixers={"RwkvSelfAttention": _STOCK, "RwkvFeedForward": _STOCK}),
    Family("xlstm", "xLSTMModel", mixers={"xLSTMLayer": MixerSpec(states=1)}),
    Family(
        "zamba",
        "ZambaModel",
        ("ZambaAttention",),
        mixers={"ZambaMambaMixer": _STOCK},
        fast=names("Zamba", "RMSNorm MLP"),
    ),
    Family(
        "zamba2",
        "Zamba2Model",
        ("Zamba2Attention",),
        mixers={"Zamba2MambaMixer": _SSD},
        fast=names("Zamba2", "RMSNorm"),
    ),
    # attention with a window or chunks that only its mask knows of, or that picks its keys
    Family("axk2", "AXK2Model", mixers={"AXK2Attention": _MASKED}, fast=names("AXK2", "RMSNorm MLP")),
    Family(
        "deepseek_v32",
        "DeepseekV32Model",
        mixers={"DeepseekV32Attention": _MASKED},
        fast=names("DeepseekV32", "RMSNorm MLP"),
    ),
    Family(
        "deepseek_v4",
        "DeepseekV4Model",
        mixers={"DeepseekV4Attention": MixerSpec("added", window="sliding_window", in_every_layer=True)},
    ),
    Family(
        "glm_moe_dsa",
        "GlmMoeDsaModel",
        mixers={"GlmMoeDsaAttention": MixerSpec("added", carried="prev_topk_indices")},
        fast=names("GlmMoeDsa", "RMSNorm MLP"),
    ),
    Family("hy_v4", "HYV4Model", mixers={"HYV4Attention": MixerSpec("added", carried="prev_topk_indices")}),
    Family(
        "doge",
        "DogeModel",
        mixers={"DogeAttention": _MASKED},
        fast=names("Doge", "RMSNorm MLP"),
        repadded_if=("sliding_window",),  # which is in upstream's mask alone
        refused_if={"is_moe": "its routing mixes the tokens of a whole batch, whatever rows they are in"},
    ),
    Family(
        "dots3_note_text",
        "Dots3NoteTextModel",
        package="dots3_note",
        mixers={"Dots3NoteTextAttention": MixerSpec("added", window="sliding_window")},
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
        fast=names("MiniMaxM3VL", "RMSNorm"),
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
    Family("mpt", "MptModel", mixers={"MptAttention": MixerSpec("hidden", kept=("position_bias",))}),
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
    # its rotary tables are as long as its positions are many, and values may be rotated with them
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
    _roberta("camembert", "Camembert"),
    _roberta("data2vec-text", "Data2VecText", package="data2vec", file="data2vec_text"),
    _roberta("roberta", "Roberta"),
    _roberta("roberta-prelayernorm", "RobertaPreLayerNorm", package="roberta_prelayernorm"),
    _roberta("xlm-roberta", "XLMRoberta", package="xlm_roberta"),
    _roberta("xlm-roberta-xl", "XLMRobertaXL", package="xlm_roberta_xl"),
    replace(_roberta("xmod", "Xmod"), of_rows=("lang_ids",)),
)
