"""SmolLM 3: every fourth layer without rotary positions."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="smollm3",
    backbone="SmolLM3Model",
    attention=("SmolLM3Attention",),
    fast={
        "SmolLM3Attention": AttentionSpec(rope_switch="use_rope", window="sliding_window"),
        "SmolLM3RMSNorm": NormSpec(),
        "SmolLM3MLP": MlpSpec(),
        "SmolLM3DecoderLayer": DecoderSpec(),
        "SmolLM3ForCausalLM": HeadSpec(),
    },
    proved={
        "SmolLM3Attention": ("d7edfcd54c17",),
        "SmolLM3RMSNorm": ("9635bcd843f3",),
        "SmolLM3MLP": ("7d2027d4464e",),
        "SmolLM3DecoderLayer": ("1a8125909341",),
        "SmolLM3ForCausalLM": ("9581bf6d6970", "9778a263fc3a"),
    },
)
