"""SmolLM 3: every fourth layer without rotary positions."""

from fastpack.families.spec import AttentionSpec, Family, MlpSpec, NormSpec

FAMILY = Family(
    model_type="smollm3",
    backbone="SmolLM3Model",
    attention=("SmolLM3Attention",),
    fast={
        "SmolLM3Attention": AttentionSpec(rope_switch="use_rope", window="sliding_window"),
        "SmolLM3RMSNorm": NormSpec(),
        "SmolLM3MLP": MlpSpec(),
    },
    proved={
        "SmolLM3Attention": ("d7edfcd54c17",),
        "SmolLM3RMSNorm": ("9635bcd843f3",),
        "SmolLM3MLP": ("7d2027d4464e",),
    },
)
