"""Llama 2, 3 and their many kin."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="llama",
    backbone="LlamaModel",
    attention=("LlamaAttention",),
    fast={
        "LlamaAttention": AttentionSpec(),
        "LlamaRMSNorm": NormSpec(),
        "LlamaMLP": MlpSpec(),
        "LlamaDecoderLayer": DecoderSpec(),
        "LlamaForCausalLM": HeadSpec(),
    },
    proved={
        "LlamaAttention": ("60bfa9711f66",),
        "LlamaRMSNorm": ("9635bcd843f3",),
        "LlamaMLP": ("7d2027d4464e",),
        "LlamaDecoderLayer": ("1a8125909341",),
        "LlamaForCausalLM": ("9581bf6d6970", "9778a263fc3a"),
    },
)
