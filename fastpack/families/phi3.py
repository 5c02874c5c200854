"""Phi 3 and 4: one projection for q, k and v, one for gate and up; often LongRoPE."""

from fastpack.families.spec import AttentionSpec, DecoderSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="phi3",
    backbone="Phi3Model",
    attention=("Phi3Attention",),
    fast={
        "Phi3Attention": AttentionSpec(qkv="qkv_proj", window="config.sliding_window"),
        "Phi3RMSNorm": NormSpec(),
        "Phi3MLP": MlpSpec(gate_up="gate_up_proj", activation="activation_fn"),
        "Phi3DecoderLayer": DecoderSpec(dropouts=("resid_attn_dropout", "resid_mlp_dropout")),
        "Phi3ForCausalLM": HeadSpec(),
    },
    proved={
        "Phi3Attention": ("e7bb78cc9078",),
        "Phi3RMSNorm": ("9635bcd843f3",),
        "Phi3MLP": ("e8d404cbecb9",),
        "Phi3DecoderLayer": ("df580f10cfd4",),
        "Phi3ForCausalLM": ("9581bf6d6970", "9778a263fc3a"),
    },
)
