"""Families with modules that mix tokens and know no boundaries: those run on one row a sequence, all else packed.

A module belongs here when its result for a token depends on nothing to the right of it, and not on the row's length:
recurrences, state spaces, linear attention and convolutions; attention that does not go through transformers'
interface, or has a window, chunks or ALiBi in its mask alone, or picks its keys; positions that an embedding counts by
itself.
"""

from fastpack.families.spec import Family, MixerSpec

_STOCK = MixerSpec()
_MASKED = MixerSpec("added")
_POSITIONS = MixerSpec(left_out=("position_ids",))
"""An embedding that counts positions itself, from 0 or from the padding id on."""


def _bart(model_type: str, name: str, positions: str = "LearnedPositionalEmbedding", package: str = "") -> Family:
    """A decoder without its encoder: attention is packed, positions are counted from 0 in each row."""
    return Family(
        model_type, f"{name}Decoder", (f"{name}Attention",), package=package, mixers={f"{name}{positions}": _STOCK}
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
    """BERT whose attention is its own."""
    return Family(model_type, f"{name}Model", package=package, mixers={f"{name}SelfAttention": _MASKED}, by_choice=True)


MIXER_FAMILIES: tuple[Family, ...] = (
    # recurrences, state spaces, linear attention and convolutions, mostly with attention in other layers
    Family(
        "bailing_hybrid",
        "BailingHybridModel",
        ("BailingHybridAttention",),
        mixers={"BailingHybridDeltaAttention": _STOCK},
    ),
    Family("bamba", "BambaModel", ("BambaAttention",), mixers={"BambaMixer": _STOCK}),
    Family("falcon_h1", "FalconH1Model", ("FalconH1Attention",), mixers={"FalconH1Mixer": _STOCK}),
    Family("falcon_mamba", "FalconMambaModel", mixers={"FalconMambaMixer": _STOCK}),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridModel",
        ("GraniteMoeHybridAttention",),
        mixers={"GraniteMoeHybridMambaLayer": _STOCK},
    ),
    Family("jamba", "JambaModel", ("JambaAttention",), mixers={"JambaMambaMixer": _STOCK}),
    Family("kimi_linear", "KimiLinearModel", ("KimiLinearAttention",), mixers={"KimiLinearDeltaAttention": _STOCK}),
    Family("lfm2", "Lfm2Model", ("Lfm2Attention",), mixers={"Lfm2ShortConv": _STOCK}),
    Family("lfm2_moe", "Lfm2MoeModel", ("Lfm2MoeAttention",), mixers={"Lfm2MoeShortConv": _STOCK}),
    Family("lfm3", "Lfm3Model", ("Lfm3Attention",), mixers={"Lfm3ShortConv": _STOCK}),
    Family("mamba", "MambaModel", mixers={"MambaMixer": _STOCK}),
    Family("mamba2", "Mamba2Model", mixers={"Mamba2Mixer": _STOCK}),
    Family("minimax", "MiniMaxModel", ("MiniMaxAttention",), mixers={"MiniMaxLightningAttention": MixerSpec(states=1)}),
    Family("nemotron_h", "NemotronHModel", ("NemotronHAttention",), mixers={"NemotronHMamba2Mixer": _STOCK}),
    Family("olmo_hybrid", "OlmoHybridModel", ("OlmoHybridAttention",), mixers={"OlmoHybridGatedDeltaNet": _STOCK}),
    Family(
        "qwen3_5_text",
        "Qwen3_5TextModel",
        ("Qwen3_5Attention",),
        package="qwen3_5",
        mixers={"Qwen3_5GatedDeltaNet": _STOCK},
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeTextModel",
        ("Qwen3_5MoeAttention",),
        package="qwen3_5_moe",
        mixers={"Qwen3_5MoeGatedDeltaNet": _STOCK},
    ),
    Family("qwen3_next", "Qwen3NextModel", ("Qwen3NextAttention",), mixers={"Qwen3NextGatedDeltaNet": _STOCK}),
    Family(
        "recurrent_gemma",
        "RecurrentGemmaModel",
        ("RecurrentGemmaAttention",),
        mixers={"RecurrentGemmaRecurrentBlock": _STOCK},
    ),
    Family("rwkv", "RwkvModel", mixers={"RwkvSelfAttention": _STOCK, "RwkvFeedForward": _STOCK}),
    Family("xlstm", "xLSTMModel", mixers={"xLSTMLayer": MixerSpec(states=1)}),
    Family("zamba", "ZambaModel", ("ZambaAttention",), mixers={"ZambaMambaMixer": _STOCK}),
    Family("zamba2", "Zamba2Model", ("Zamba2Attention",), mixers={"Zamba2MambaMixer": _STOCK}),
    # attention with a window or chunks that only its mask knows of, or that picks its keys
    Family("axk2", "AXK2Model", mixers={"AXK2Attention": _MASKED}),
    Family("deepseek_v32", "DeepseekV32Model", mixers={"DeepseekV32Attention": _MASKED}),
    Family("doge", "DogeModel", mixers={"DogeAttention": _MASKED}),
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
        "minimax_m3_vl_text", "MiniMaxM3VLTextModel", package="minimax_m3_vl", mixers={"MiniMaxM3VLAttention": _MASKED}
    ),
    Family("phimoe", "PhimoeModel", mixers={"PhimoeAttention": MixerSpec("added", window="config.sliding_window")}),
    Family(
        "qwen2_moe", "Qwen2MoeModel", mixers={"Qwen2MoeAttention": MixerSpec("added", window="config.sliding_window")}
    ),
    # attention of the family's own
    Family(
        "bigbird_pegasus",
        "BigBirdPegasusDecoder",
        mixers={"BigBirdPegasusDecoderAttention": _MASKED, "BigBirdPegasusLearnedPositionalEmbedding": _STOCK},
    ),
    Family(
        "bloom",
        "BloomModel",
        mixers={"BloomAttention": MixerSpec("added", alibi="alibi")},
        alibi="build_alibi_tensor",
    ),
    Family("codegen", "CodeGenModel", mixers={"CodeGenAttention": _MASKED}),
    Family("falcon", "FalconModel", mixers={"FalconAttention": _MASKED}, repadded_if="alibi"),
    Family("gpt_neo", "GPTNeoModel", mixers={"GPTNeoSelfAttention": _MASKED}),
    Family("gpt_neox_japanese", "GPTNeoXJapaneseModel", mixers={"GPTNeoXJapaneseAttention": _MASKED}),
    Family("gptj", "GPTJModel", mixers={"GPTJAttention": _MASKED}),
    Family("mpt", "MptModel", mixers={"MptAttention": MixerSpec("hidden", kept=("position_bias",))}),
    Family("mvp", "MvpDecoder", mixers={"MvpAttention": _MASKED, "MvpLearnedPositionalEmbedding": _STOCK}),
    Family("openai-gpt", "OpenAIGPTModel", package="openai", mixers={"Attention": _STOCK}, unmasked=True),
    Family(
        "trocr",
        "TrOCRDecoder",
        mixers={
            "TrOCRAttention": _MASKED,
            "TrOCRLearnedPositionalEmbedding": _STOCK,
            "TrOCRSinusoidalPositionalEmbedding": _STOCK,
        },
    ),
    Family("xglm", "XGLMModel", mixers={"XGLMAttention": _MASKED}),
    _old_bert("megatron-bert", "MegatronBert", package="megatron_bert"),
    _old_bert("rembert", "RemBert"),
    _old_bert("roformer", "RoFormer"),
    # positions that an embedding counts by itself
    _bart("bart", "Bart"),
    _bart("blenderbot", "Blenderbot"),
    _bart("blenderbot-small", "BlenderbotSmall", package="blenderbot_small"),
    _bart("marian", "Marian", "SinusoidalPositionalEmbedding"),
    _bart("mbart", "MBart"),
    _bart("musicgen", "Musicgen", "SinusoidalPositionalEmbedding"),
    _bart("musicgen_melody", "MusicgenMelody", "SinusoidalPositionalEmbedding"),
    _bart("pegasus", "Pegasus", "SinusoidalPositionalEmbedding"),
    _bart("plbart", "PLBart"),
    _bart("whisper", "Whisper", "PositionalEmbedding"),
    _roberta("camembert", "Camembert"),
    _roberta("data2vec-text", "Data2VecText", package="data2vec", file="data2vec_text"),
    _roberta("roberta", "Roberta"),
    _roberta("roberta-prelayernorm", "RobertaPreLayerNorm", package="roberta_prelayernorm"),
    _roberta("xlm-roberta", "XLMRoberta", package="xlm_roberta"),
    _roberta("xlm-roberta-xl", "XLMRobertaXL", package="xlm_roberta_xl"),
    _roberta("xmod", "Xmod"),
)
