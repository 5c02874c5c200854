"""Mistral: Llama with a window on every layer."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="mistral",
    backbone="MistralModel",
    attention=("MistralAttention",),
    fast={
        "MistralAttention": AttentionSpec(window="config.sliding_window"),
        "MistralRMSNorm": NormSpec(),
        "MistralMLP": MlpSpec(),
        "MistralDecoderLayer": DecoderSpec(),
        "MistralForCausalLM": HeadSpec(),
    },
    proved={
        "MistralAttention": ("e15b096902ed",),
        "MistralRMSNorm": ("9635bcd843f3",),
        "MistralMLP": ("7d2027d4464e",),
        "MistralDecoderLayer": ("1a8125909341",),
        "MistralForCausalLM": ("9581bf6d6970", "9778a263fc3a"),
    },
)
