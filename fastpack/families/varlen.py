"""Families of the varlen rung: their attention goes through :mod:`fastpack.attention_dispatch`, all else is stock."""

from fastpack.families.spec import Family

VARLEN_FAMILIES: tuple[Family, ...] = (Family("starcoder2", "Starcoder2Model", ("Starcoder2Attention",)),)
