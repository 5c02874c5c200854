"""Granite 3: Llama with multipliers (its scale is `attention_multiplier`)."""

from fastpack.families.spec import AttentionSpec, Family, MlpSpec, NormSpec

FAMILY = Family(
    model_type="granite",
    backbone="GraniteModel",
    attention=("GraniteAttention",),
    fast={
        "GraniteAttention": AttentionSpec(),
        "GraniteRMSNorm": NormSpec(),
        "GraniteMLP": MlpSpec(),
    },
    proved={
        "GraniteAttention": ("60bfa9711f66",),
        "GraniteRMSNorm": ("9635bcd843f3",),
        "GraniteMLP": ("7d2027d4464e",),
    },
)
