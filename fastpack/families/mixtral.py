"""Mixtral: Mistral's attention with sparse experts, whose stock block is kept."""

from fastpack.families.spec import AttentionSpec, Family, NormSpec

FAMILY = Family(
    model_type="mixtral",
    backbone="MixtralModel",
    attention=("MixtralAttention",),
    fast={
        "MixtralAttention": AttentionSpec(window="config.sliding_window"),
        "MixtralRMSNorm": NormSpec(),
    },
    proved={
        "MixtralAttention": ("e15b096902ed",),
        "MixtralRMSNorm": ("9635bcd843f3",),
    },
)
