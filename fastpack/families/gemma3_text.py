"""Gemma 3, the text model: q and k normalised in each head, windows on five layers of six."""

from fastpack.families.spec import AttentionSpec, Family, MlpSpec, NormSpec

FAMILY = Family(
    model_type="gemma3_text",
    package="gemma3",
    backbone="Gemma3TextModel",
    attention=("Gemma3Attention",),
    fast={
        "Gemma3Attention": AttentionSpec(qk_norm="head", window="sliding_window"),
        "Gemma3RMSNorm": NormSpec(eps="eps", rounding="after", unit_offset=True),
        "Gemma3MLP": MlpSpec(),
    },
    proved={
        "Gemma3Attention": ("9ec6782074d9",),
        "Gemma3RMSNorm": ("2dad5f576075",),
        "Gemma3MLP": ("7d2027d4464e",),
    },
)
