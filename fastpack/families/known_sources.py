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
    (AttentionSpec(), ("0b4840046acc", "440de75021a8", "b18528886288", "e30156661700")),  # Llama, three hybrids
    (AttentionSpec(window="sliding_window"), ("a4fab25e6272",)),  # Qwen 2
    (AttentionSpec(window="config.sliding_window"), ("d554e6ff404d",)),  # Mistral
    (AttentionSpec(window="config.sliding_window", out_dropout="residual_dropout"), ("01b22449120b",)),  # StarCoder 2
    (AttentionSpec(out_dropout="residual_dropout"), ("8a438ac68d93",)),  # Seed-OSS
    (AttentionSpec(qkv="qkv_proj", window="config.sliding_window"), ("2dc14f585803",)),  # Phi 3
    (AttentionSpec(rope_if=("use_rope",), window="sliding_window"), ("8b67d93467ff",)),  # SmolLM 3
    (AttentionSpec(window="sliding_window", softcap="attn_logit_softcapping"), ("e99531ab4ca8",)),  # Gemma 2
    (AttentionSpec(window="sliding_window", sinks="sinks"), ("f819dd9a4646",)),  # Granite with windows
    (AttentionSpec(window="sliding_window", sinks="sinks", rope_tables="once"), ("18118692580a",)),  # gpt-oss
    (AttentionSpec(key_scale="key_multiplier"), ("cc4d920292c7",)),  # Falcon-H1
    # queries and keys normalised
    (
        AttentionSpec(qk_norm="head", window="sliding_window"),
        ("4440c3461474", "531d88608eca", "8a515cde41d5"),
    ),  # Qwen 3, Gemma 3, Lara
    (AttentionSpec(qk_norm="head"), ("30b3208aa557", "68696db3e03b")),  # Apertus, GLM-4-MoE
    (AttentionSpec(qk_norm="head", gated=True), ("9457e652dd44",)),  # Qwen3-Next
    (
        AttentionSpec(qk_norm="head", norms=("q_layernorm", "k_layernorm"), out="out_proj", dropout=None),
        ("991e9a795f77",),
    ),  # LFM 2
    (_EXAONE, ("ee3f08fc35f7",)),
    (AttentionSpec(qk_norm="turned", norms=("query_layernorm", "key_layernorm")), ("e08b84826e8f",)),  # HunYuan
    (
        AttentionSpec(qk_norm="flat"),
        ("702b24b8bdf1", "5629e9f59aaa", "4e7713e7b03c"),
    ),  # OLMo 2, MiniMax-M2, OLMo hybrid
    (AttentionSpec(qk_norm="flat", window="sliding_window"), ("b6506f56b1da",)),  # OLMo 3
    # pairs side by side
    (AttentionSpec(qk_norm="head", rope_layout="interleaved", rope_in_float32=True), ("908c1f6350e7",)),  # Cohere
    (
        AttentionSpec(
            rope_layout="interleaved", rope_in_float32=True, rope_if=("sliding_window",), window="sliding_window"
        ),
        ("30422eb9ce17",),
    ),  # Cohere 2
    (_GLM, ("577afc660ee5", "99e03e4faee3")),  # GLM 4, Helium
    (replace(_GLM, rope_in_float32=True), ("b8d5afba8ae3",)),  # ERNIE 4.5
    # latents, shared keys
    (LatentAttentionSpec(), ("35678718b422",)),  # DeepSeek-V3
    (SharedAttentionSpec(), ("405cdd05f4f2", "2092b47095dd")),  # Gemma 4
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
    (DecoderSpec(), ("223a3cfccaa8", "70926ca58d4f", "c7483dd7d756")),  # Llama, Mixtral, gpt-oss
    (_AFTER, ("db20e2fe7a4c",)),  # OLMo 2
    (_AROUND, ("e663eabb52c0",)),  # Gemma 2
    (DecoderSpec(post_attention="post_self_attn_layernorm", post_mlp="post_mlp_layernorm"), ("3fd14898857e",)),  # GLM 4
    (DecoderSpec(mlp="block_sparse_moe", residual_scale="residual_multiplier"), ("70eb65a6e623",)),  # GraniteMoE
    (DecoderSpec(residual_scale="residual_multiplier"), ("635b29c3ed76",)),  # Granite
    (DecoderSpec(dropouts=("resid_attn_dropout", "resid_mlp_dropout")), ("ecfa3793899b",)),  # Phi 3
)

_HEADS: tuple[tuple[HeadSpec, tuple[str, ...]], ...] = (
    (HeadSpec(), ("3eb801727fee", "967f97843440")),  # Llama
    (HeadSpec(experts="balanced"), ("52aa9995fe96", "e3b31a0902bc")),  # Mixtral
    (HeadSpec(experts="routed"), ("0c37c200897b",)),  # DeepSeek-V3
    (HeadSpec(experts="balanced", divisor="config.logits_scaling"), ("f8763433c940", "be112c3302b2")),  # GraniteMoE
    (HeadSpec(scale="logit_scale"), ("0257768f42cb", "405d4204f0bb")),  # Cohere
    (HeadSpec(divisor="config.logits_scaling"), ("0173b06ffbe3", "daf447c13c2f")),  # Granite
    (HeadSpec(softcap="config.final_logit_softcapping"), ("92f6d5c80b9c", "41f5f509623b")),  # Gemma 2
)

FORMS: dict[str, Spec] = {
    found: spec for spec, hashes in (*_ATTENTION, *_NORMS, *_MLPS, *_DECODERS, *_HEADS) for found in hashes
}
