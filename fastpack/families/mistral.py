"""Mistral: Llama with a window on every layer."""

from fastpack.families.spec import AttentionSpec, Family, MlpSpec, NormSpec

FAMILY = Family(
    model_type="mistral",
    backbone="MistralModel",
    attention=("MistralAttention",),
    fast={
        "MistralAttention": AttentionSpec(window="config.sliding_window"),
        "MistralRMSNorm": NormSpec(),
        "MistralMLP": MlpSpec(),
    },
    proved={
        "MistralAttention": ("e15b096902ed",),
        "MistralRMSNorm": ("9635bcd843f3",),
        "MistralMLP": ("7d2027d4464e",),
    },
)
