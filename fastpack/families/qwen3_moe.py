"""Qwen 3 MoE: Qwen 3's attention; sparse expert blocks are kept, dense MLP layers are fast."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="qwen3_moe",
    backbone="Qwen3MoeModel",
    attention=("Qwen3MoeAttention",),
    fast={
        "Qwen3MoeAttention": AttentionSpec(qk_norm="head", window="sliding_window"),
        "Qwen3MoeRMSNorm": NormSpec(),
        "Qwen3MoeMLP": MlpSpec(),
        "Qwen3MoeDecoderLayer": DecoderSpec(),
        "Qwen3MoeForCausalLM": HeadSpec(experts=True),
    },
    proved={
        "Qwen3MoeAttention": ("f5d07096b2f5",),
        "Qwen3MoeRMSNorm": ("9635bcd843f3",),
        "Qwen3MoeMLP": ("7d2027d4464e",),
        "Qwen3MoeDecoderLayer": ("1a8125909341",),
        "Qwen3MoeForCausalLM": ("3c772b9780b8", "0ee99c787137"),
    },
)
