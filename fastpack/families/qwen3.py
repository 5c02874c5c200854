"""Qwen 3 (dense): q and k normalised in each head."""

from fastpack.families.spec import AttentionSpec, Family, MlpSpec, NormSpec

FAMILY = Family(
    model_type="qwen3",
    backbone="Qwen3Model",
    attention=("Qwen3Attention",),
    fast={
        "Qwen3Attention": AttentionSpec(qk_norm="head", window="sliding_window"),
        "Qwen3RMSNorm": NormSpec(),
        "Qwen3MLP": MlpSpec(),
    },
    proved={
        "Qwen3Attention": ("f5d07096b2f5",),
        "Qwen3RMSNorm": ("9635bcd843f3",),
        "Qwen3MLP": ("7d2027d4464e",),
    },
)
