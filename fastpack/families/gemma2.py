"""Gemma 2: softcapped scores, a window on every other layer."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="gemma2",
    backbone="Gemma2Model",
    attention=("Gemma2Attention",),
    fast={
        "Gemma2Attention": AttentionSpec(window="sliding_window", softcap="attn_logit_softcapping"),
        "Gemma2RMSNorm": NormSpec(eps="eps", rounding="after", unit_offset=True),
        "Gemma2MLP": MlpSpec(),
        "Gemma2DecoderLayer": DecoderSpec(
            post_attention="post_attention_layernorm",
            pre_mlp="pre_feedforward_layernorm",
            post_mlp="post_feedforward_layernorm",
        ),
        "Gemma2ForCausalLM": HeadSpec(softcap="config.final_logit_softcapping"),
    },
    proved={
        "Gemma2Attention": ("89052b19a329",),
        "Gemma2RMSNorm": ("2dad5f576075",),
        "Gemma2MLP": ("7d2027d4464e",),
        "Gemma2DecoderLayer": ("eb03c623c021",),
        "Gemma2ForCausalLM": ("f26244fd430f", "9ebc825e0c75"),
    },
)
