"""Llama 2, 3 and their many kin."""

from fastpack.families.spec import AttentionSpec, Family, MlpSpec, NormSpec

FAMILY = Family(
    model_type="llama",
    backbone="LlamaModel",
    attention=("LlamaAttention",),
    fast={
        "LlamaAttention": AttentionSpec(),
        "LlamaRMSNorm": NormSpec(),
        "LlamaMLP": MlpSpec(),
    },
    proved={
        "LlamaAttention": ("60bfa9711f66",),
        "LlamaRMSNorm": ("9635bcd843f3",),
        "LlamaMLP": ("7d2027d4464e",),
    },
)
