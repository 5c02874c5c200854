"""OLMo 2: norms after attention and MLP; q and k normalised over all heads at once."""

from fastpack.families.spec import AttentionSpec, Family, MlpSpec, NormSpec

FAMILY = Family(
    model_type="olmo2",
    backbone="Olmo2Model",
    attention=("Olmo2Attention",),
    fast={
        "Olmo2Attention": AttentionSpec(qk_norm="flat"),
        "Olmo2RMSNorm": NormSpec(rounding="after"),
        "Olmo2MLP": MlpSpec(),
    },
    proved={
        "Olmo2Attention": ("e2c485ded65d",),
        "Olmo2RMSNorm": ("eef4e978a32a",),
        "Olmo2MLP": ("7d2027d4464e",),
    },
)
