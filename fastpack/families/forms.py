"""What upstream's sources compute: the forms that fast forwards know, by :func:`fastpack.families.source_hash`.

Families copy each other, so one form stands for many classes. A hash belongs here once the fast forward was proved
equal to a class of that source (``tests/families``); a source that changes upstream has another hash, and its classes
keep their stock forwards until that is proved as well.
"""

from __future__ import annotations

from dataclasses import replace

from fastpack.families.spec import (
    AnyAttentionSpec,
    AttentionSpec,
    DecoderSpec,
    HeadSpec,
    LatentAttentionSpec,
    MlpSpec,
    NormSpec,
    SharedAttentionSpec,
    Spec,
)

_EXAONE = AttentionSpec(
    qk_norm="head", rope_if=("is_sliding", "!sliding_window"), window="sliding_window", window_if="is_sliding"
)
_GLM = AttentionSpec(rope_layout="interleaved", rope_tables="repeated")

_ATTENTION: tuple[tuple[AnyAttentionSpec, tuple[str, ...]], ...] = (
    (AttentionSpec(), ("0f7bde9ab6b6", "5d5bba4a5949", "10620fc2b2c4", "d770eefe6ceb")),  # Llama, three hybrids
    (AttentionSpec(window="sliding_window"), ("d9db6f3597d3",)),  # Qwen 2
    (AttentionSpec(window="config.sliding_window"), ("da1ce3eb9aca",)),  # Mistral
    (AttentionSpec(window="config.sliding_window", out_dropout="residual_dropout"), ("ff8850670fe7",)),  # StarCoder 2
    (AttentionSpec(out_dropout="residual_dropout"), ("212f84e09b5d",)),  # Seed-OSS
    (AttentionSpec(qkv="qkv_proj", window="config.sliding_window"), ("14ac7faaf345",)),  # Phi 3
    (AttentionSpec(rope_if=("use_rope",), window="sliding_window"), ("f9d24781c323",)),  # SmolLM 3
    (AttentionSpec(window="sliding_window", softcap="attn_logit_softcapping"), ("532ed964adf0",)),  # Gemma 2
    (AttentionSpec(window="sliding_window", sinks="sinks"), ("ba70f9c0f7a7",)),  # Granite with windows
    (AttentionSpec(window="sliding_window", sinks="sinks", rope_tables="once"), ("9cb3c5b1b509",)),  # gpt-oss
    (AttentionSpec(key_scale="key_multiplier"), ("7d60f53f2ab9",)),  # Falcon-H1
    # queries and keys normalised
    (AttentionSpec(qk_norm="head", window="sliding_window"), ("2b1c310f880d", "ff3f5ad6dd36")),  # Qwen 3, Gemma 3
    (AttentionSpec(qk_norm="head"), ("80ed1e24c43d", "eb29cd21eae2")),  # Apertus, GLM-4-MoE
    (AttentionSpec(qk_norm="head", gated=True), ("b9979ad5c4f2",)),  # Qwen3-Next
    (
        AttentionSpec(qk_norm="head", norms=("q_layernorm", "k_layernorm"), out="out_proj", dropout=None),
        ("a53ff40276a9",),
    ),  # LFM 2
    (_EXAONE, ("20a08880b10c",)),
    (AttentionSpec(qk_norm="turned", norms=("query_layernorm", "key_layernorm")), ("2f784a9d4da6",)),  # HunYuan
    (
        AttentionSpec(qk_norm="flat"),
        ("8aeeb7518f8d", "c67c3a719ba8", "aeb23411ae58"),
    ),  # OLMo 2, MiniMax-M2, OLMo hybrid
    (AttentionSpec(qk_norm="flat", window="sliding_window"), ("e73c930ade2a",)),  # OLMo 3
    # pairs side by side
    (AttentionSpec(qk_norm="head", rope_layout="interleaved", rope_in_float32=True), ("e0719482e0ec",)),  # Cohere
    (
        AttentionSpec(
            rope_layout="interleaved", rope_in_float32=True, rope_if=("sliding_window",), window="sliding_window"
        ),
        ("a4efa118753b",),
    ),  # Cohere 2
    (_GLM, ("7115afe3cb5e", "e5d90d8f81ff")),  # GLM 4, Helium
    (replace(_GLM, rope_in_float32=True), ("c1f6540f2a3e",)),  # ERNIE 4.5
    # latents, shared keys
    (LatentAttentionSpec(), ("ca4bcec8f389",)),  # DeepSeek-V3
    (SharedAttentionSpec(), ("06d8af24a3ef", "9e3958f5f3cb")),  # Gemma 4
)

_NORMS: tuple[tuple[NormSpec, tuple[str, ...]], ...] = (
    (NormSpec(), ("9635bcd843f3",)),  # Llama
    (NormSpec(rounding="after"), ("eef4e978a32a", "b6d7ab076811")),  # OLMo 2, Helium
    (NormSpec(eps="eps", rounding="after"), ("e0fd214fdd79",)),  # Gemma 4
    (NormSpec(eps="eps", rounding="after", unit_offset=True), ("e5559c7750c3",)),  # Gemma
    (NormSpec(kind="layer"), ("ec976d1bff62",)),  # Cohere
)

_MLPS: tuple[tuple[MlpSpec, tuple[str, ...]], ...] = (
    (MlpSpec(), ("7d2027d4464e",)),  # Llama
    (MlpSpec(gate_up=("gate_up_proj",), activation="activation_fn"), ("e8d404cbecb9",)),  # Phi 3
    (MlpSpec(out_dropout="residual_dropout"), ("24ed32eb8cb3",)),  # Seed-OSS
    (MlpSpec(gate_up=("input_linear",), down="output_linear", activation="activation"), ("7c9083fca1b5",)),  # Granite
    (MlpSpec(gate_up=("w1", "w3"), down="w2", activation=None), ("5b77919a3bcb",)),  # LFM 2
)

_AFTER = DecoderSpec(
    pre_attention=None,
    post_attention="post_attention_layernorm",
    pre_mlp=None,
    post_mlp="post_feedforward_layernorm",
)
_AROUND = DecoderSpec(
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)

_DECODERS: tuple[tuple[DecoderSpec, tuple[str, ...]], ...] = (
    (DecoderSpec(), ("1a8125909341", "d4699009e63a", "a6e4ee9acdf9")),  # Llama, Mixtral, gpt-oss
    (_AFTER, ("47f108ddd245",)),  # OLMo 2
    (_AROUND, ("eb03c623c021",)),  # Gemma 2
    (DecoderSpec(post_attention="post_self_attn_layernorm", post_mlp="post_mlp_layernorm"), ("9469804e4de4",)),  # GLM 4
    (DecoderSpec(mlp="block_sparse_moe", residual_scale="residual_multiplier"), ("e59328f52816",)),  # GraniteMoE
    (DecoderSpec(residual_scale="residual_multiplier"), ("bb8119d990e3",)),  # Granite
    (DecoderSpec(dropouts=("resid_attn_dropout", "resid_mlp_dropout")), ("df580f10cfd4",)),  # Phi 3
)

_HEADS: tuple[tuple[HeadSpec, tuple[str, ...]], ...] = (
    (HeadSpec(), ("9778a263fc3a", "9581bf6d6970")),  # Llama
    (HeadSpec(experts="balanced"), ("657f0083b198", "73260769457b")),  # Mixtral
    (HeadSpec(experts="routed"), ("aabacb233a84",)),  # DeepSeek-V3
    (HeadSpec(experts="balanced", divisor="config.logits_scaling"), ("976a1fe7de1c", "917a74befdbf")),  # GraniteMoE
    (HeadSpec(scale="logit_scale"), ("8bd49d934a6e", "3911d8ea6a36")),  # Cohere
    (HeadSpec(divisor="config.logits_scaling"), ("3c7c2ea75a62", "d4465e7b06ff")),  # Granite
    (HeadSpec(softcap="config.final_logit_softcapping"), ("9ebc825e0c75", "f26244fd430f")),  # Gemma 2
)

FORMS: dict[str, Spec] = {
    found: spec for spec, hashes in (*_ATTENTION, *_NORMS, *_MLPS, *_DECODERS, *_HEADS) for found in hashes
}
