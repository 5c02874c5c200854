"""Qwen 3 (dense): q and k normalised in each head."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="qwen3",
    backbone="Qwen3Model",
    attention=("Qwen3Attention",),
    fast={
        "Qwen3Attention": AttentionSpec(qk_norm="head", window="sliding_window"),
        "Qwen3RMSNorm": NormSpec(),
        "Qwen3MLP": MlpSpec(),
        "Qwen3DecoderLayer": DecoderSpec(),
        "Qwen3ForCausalLM": HeadSpec(),
    },
    proved={
        "Qwen3Attention": ("f5d07096b2f5",),
        "Qwen3RMSNorm": ("9635bcd843f3",),
        "Qwen3MLP": ("7d2027d4464e",),
        "Qwen3DecoderLayer": ("1a8125909341",),
        "Qwen3ForCausalLM": ("9581bf6d6970", "9778a263fc3a"),
    },
)
