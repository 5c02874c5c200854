"""Tiny text models of vision-language models, which the causal-LM mapping does not have."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fastpack.exactness.tiny import build, tiny_config
from fastpack.families.registry import FAMILIES


def text_model(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Return a family's backbone alone, in training mode; settings are those of its config."""
    family = FAMILIES[name]
    cls = getattr(importlib.import_module(family.module), family.backbone)
    return build(cls._from_config, tiny_config(name, **settings), dtype=dtype).train()
