"""OLMo 2: norms after attention and MLP; q and k normalised over all heads at once."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="olmo2",
    backbone="Olmo2Model",
    attention=("Olmo2Attention",),
    fast={
        "Olmo2Attention": AttentionSpec(qk_norm="flat"),
        "Olmo2RMSNorm": NormSpec(rounding="after"),
        "Olmo2MLP": MlpSpec(),
        "Olmo2DecoderLayer": DecoderSpec(
            pre_attention=None,
            post_attention="post_attention_layernorm",
            pre_mlp=None,
            post_mlp="post_feedforward_layernorm",
        ),
        "Olmo2ForCausalLM": HeadSpec(),
    },
    proved={
        "Olmo2Attention": ("e2c485ded65d",),
        "Olmo2RMSNorm": ("eef4e978a32a",),
        "Olmo2MLP": ("7d2027d4464e",),
        "Olmo2DecoderLayer": ("47f108ddd245",),
        "Olmo2ForCausalLM": ("9581bf6d6970", "9778a263fc3a"),
    },
)
