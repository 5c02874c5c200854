"""The table of families, by ``model_type``.

To add a family, add a row with its classes and their specs to one of the tables that are joined here.
"""

from __future__ import annotations

from torch import nn

from fastpack.families.fast import FAST_FAMILIES
from fastpack.families.mixers import MIXER_FAMILIES
from fastpack.families.repadded import REPADDED_FAMILIES
from fastpack.families.spec import Family
from fastpack.families.varlen import VARLEN_FAMILIES
from fastpack.utils.classes import stock_class

ALL_FAMILIES = (*FAST_FAMILIES, *VARLEN_FAMILIES, *MIXER_FAMILIES, *REPADDED_FAMILIES)
FAMILIES: dict[str, Family] = {family.model_type: family for family in ALL_FAMILIES}
UNSHIFTED = frozenset(family.unshifted for family in ALL_FAMILIES if family.unshifted)
"""Class names of heads whose own loss compares a token's logits with the label in the same place, not the next one."""


def family_named(model_type: str) -> Family | None:
    """Return the family of this name in transformers or, for a composite, that of its text model's config; else None.

    It builds no model. :func:`family_of` also finds the families of names that share another family's classes.
    """
    from transformers import CONFIG_MAPPING

    if model_type in FAMILIES or model_type not in CONFIG_MAPPING:
        return FAMILIES.get(model_type)
    config_class = CONFIG_MAPPING[model_type]
    if not config_class.sub_configs:
        return None
    return FAMILIES.get(config_class().get_text_config(decoder=True).model_type)


def family_of(backbone: nn.Module) -> Family | None:
    """Return the family with exactly this backbone class, or None."""
    cls = stock_class(backbone)
    for family in FAMILIES.values():
        if cls.__name__ == family.backbone and cls.__module__ == family.module:
            return family
    return None
