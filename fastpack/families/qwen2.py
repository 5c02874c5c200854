"""Qwen 2 and 2.5: biases on q, k and v, a window on some layers."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="qwen2",
    backbone="Qwen2Model",
    attention=("Qwen2Attention",),
    fast={
        "Qwen2Attention": AttentionSpec(window="sliding_window"),
        "Qwen2RMSNorm": NormSpec(),
        "Qwen2MLP": MlpSpec(),
        "Qwen2DecoderLayer": DecoderSpec(),
        "Qwen2ForCausalLM": HeadSpec(),
    },
    proved={
        "Qwen2Attention": ("9f1d93b84cf2",),
        "Qwen2RMSNorm": ("9635bcd843f3",),
        "Qwen2MLP": ("7d2027d4464e",),
        "Qwen2DecoderLayer": ("1a8125909341",),
        "Qwen2ForCausalLM": ("9581bf6d6970", "9778a263fc3a"),
    },
)
