"""Mixtral: Mistral's attention with sparse experts, whose stock block is kept."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, NormSpec

FAMILY = Family(
    model_type="mixtral",
    backbone="MixtralModel",
    attention=("MixtralAttention",),
    fast={
        "MixtralAttention": AttentionSpec(window="config.sliding_window"),
        "MixtralRMSNorm": NormSpec(),
        "MixtralDecoderLayer": DecoderSpec(),
        "MixtralForCausalLM": HeadSpec(experts=True),
    },
    proved={
        "MixtralAttention": ("e15b096902ed",),
        "MixtralRMSNorm": ("9635bcd843f3",),
        "MixtralDecoderLayer": ("d4699009e63a",),
        "MixtralForCausalLM": ("3c772b9780b8", "0ee99c787137"),
    },
)
