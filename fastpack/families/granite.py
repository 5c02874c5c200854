"""Granite 3: Llama with multipliers (its scale is `attention_multiplier`)."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="granite",
    backbone="GraniteModel",
    attention=("GraniteAttention",),
    fast={
        "GraniteAttention": AttentionSpec(),
        "GraniteRMSNorm": NormSpec(),
        "GraniteMLP": MlpSpec(),
        "GraniteDecoderLayer": DecoderSpec(residual_scale="residual_multiplier"),
        "GraniteForCausalLM": HeadSpec(divisor="config.logits_scaling"),
    },
    proved={
        "GraniteAttention": ("60bfa9711f66",),
        "GraniteRMSNorm": ("9635bcd843f3",),
        "GraniteMLP": ("7d2027d4464e",),
        "GraniteDecoderLayer": ("bb8119d990e3",),
        "GraniteForCausalLM": ("d4465e7b06ff", "3c7c2ea75a62"),
    },
)
