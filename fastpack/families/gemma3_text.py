"""Gemma 3, the text model: q and k normalised in each head, windows on five layers of six."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="gemma3_text",
    package="gemma3",
    backbone="Gemma3TextModel",
    attention=("Gemma3Attention",),
    fast={
        "Gemma3Attention": AttentionSpec(qk_norm="head", window="sliding_window"),
        "Gemma3RMSNorm": NormSpec(eps="eps", rounding="after", unit_offset=True),
        "Gemma3MLP": MlpSpec(),
        "Gemma3DecoderLayer": DecoderSpec(
            post_attention="post_attention_layernorm",
            pre_mlp="pre_feedforward_layernorm",
            post_mlp="post_feedforward_layernorm",
        ),
        "Gemma3ForCausalLM": HeadSpec(softcap="config.final_logit_softcapping"),
    },
    proved={
        "Gemma3Attention": ("9ec6782074d9",),
        "Gemma3RMSNorm": ("2dad5f576075",),
        "Gemma3MLP": ("7d2027d4464e",),
        "Gemma3DecoderLayer": ("eb03c623c021",),
        "Gemma3ForCausalLM": ("f26244fd430f", "9ebc825e0c75"),
    },
)
