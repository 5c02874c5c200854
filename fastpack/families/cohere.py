"""Command R: interleaved rotary pairs in float32, LayerNorm without bias, optional q/k norm."""

from fastpack.families.spec import AttentionSpec, Family, HeadSpec, MlpSpec, NormSpec

FAMILY = Family(
    model_type="cohere",
    backbone="CohereModel",
    attention=("CohereAttention",),
    fast={
        "CohereAttention": AttentionSpec(qk_norm="head", rope_layout="interleaved", rope_in_float32=True),
        "CohereLayerNorm": NormSpec(kind="layer"),
        "CohereMLP": MlpSpec(),
        "CohereForCausalLM": HeadSpec(scale="logit_scale"),
    },
    proved={
        "CohereAttention": ("6783e45bc80a",),
        "CohereLayerNorm": ("ec976d1bff62",),
        "CohereMLP": ("7d2027d4464e",),
        "CohereForCausalLM": ("3911d8ea6a36", "8bd49d934a6e"),
    },
)
