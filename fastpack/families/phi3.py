"""Phi 3 and 4: one projection for q, k and v, one for gate and up; often LongRoPE."""

from fastpack.families.spec import AttentionSpec, Family, MlpSpec, NormSpec

FAMILY = Family(
    model_type="phi3",
    backbone="Phi3Model",
    attention=("Phi3Attention",),
    fast={
        "Phi3Attention": AttentionSpec(qkv="qkv_proj", window="config.sliding_window"),
        "Phi3RMSNorm": NormSpec(),
        "Phi3MLP": MlpSpec(gate_up="gate_up_proj", activation="activation_fn"),
    },
    proved={
        "Phi3Attention": ("e7bb78cc9078",),
        "Phi3RMSNorm": ("9635bcd843f3",),
        "Phi3MLP": ("e8d404cbecb9",),
    },
)
