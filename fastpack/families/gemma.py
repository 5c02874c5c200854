"""Gemma 1: norms scale by 1 + weight."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="gemma",
    backbone="GemmaModel",
    attention=("GemmaAttention",),
    fast={
        "GemmaAttention": AttentionSpec(),
        "GemmaRMSNorm": NormSpec(eps="eps", rounding="after", unit_offset=True),
        "GemmaMLP": MlpSpec(),
        "GemmaDecoderLayer": DecoderSpec(),
        "GemmaForCausalLM": HeadSpec(),
    },
    proved={
        "GemmaAttention": ("60bfa9711f66",),
        "GemmaRMSNorm": ("2dad5f576075",),
        "GemmaMLP": ("7d2027d4464e",),
        "GemmaDecoderLayer": ("1a8125909341",),
        "GemmaForCausalLM": ("9581bf6d6970", "9778a263fc3a"),
    },
)
