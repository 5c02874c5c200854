"""Gemma 1: norms scale by 1 + weight."""

from fastpack.families.spec import AttentionSpec, Family, MlpSpec, NormSpec

FAMILY = Family(
    model_type="gemma",
    backbone="GemmaModel",
    attention=("GemmaAttention",),
    fast={
        "GemmaAttention": AttentionSpec(),
        "GemmaRMSNorm": NormSpec(eps="eps", rounding="after", unit_offset=True),
        "GemmaMLP": MlpSpec(),
    },
    proved={
        "GemmaAttention": ("60bfa9711f66",),
        "GemmaRMSNorm": ("2dad5f576075",),
        "GemmaMLP": ("7d2027d4464e",),
    },
)
