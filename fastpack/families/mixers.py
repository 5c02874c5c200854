"""Families with other modules that mix tokens across boundaries: these run on one row for each sequence.

Such a module is listed here if its result for a token depends only on the tokens before it, and not on the row's
length: attention that does not use transformers' interface, that has a window, chunks or ALiBi only in its mask, or
that picks its keys; and embeddings that count positions. For recurrences see :mod:`fastpack.families.hybrids`.
"""

from dataclasses import replace

from fastpack.families.hybrids import HYBRID_FAMILIES
from fastpack.families.mixer_spec import MixerSpec
from fastpack.families.shared_specs import (
    DEEPSEEK_V4_EXPERTS,
    GEMMA_NORM,
    GLM5_EXPERTS,
    LLAMA_MLP,
    LLAMA_NORM,
    LLAMA_PARTS,
    MINIMAX_M3_EXPERTS,
    MIXTRAL_EXPERTS,
    MIXTRAL_PARTS,
    named,
)
from fastpack.families.spec import Family

_STOCK = MixerSpec()
_MASKED = MixerSpec("added")
_TOP_KEYS = MixerSpec("added", carried="prev_topk_indices")
_POSITIONS = MixerSpec(left_out=("position_ids",), counts_from="padding_idx")
"""For an embedding that counts positions itself, from the padding id on."""


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
    *HYBRID_FAMILIES,
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
