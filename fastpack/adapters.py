"""What a projection is made of: a plain, 4-bit or 8-bit base weight, with or without LoRA.

Layers call projections as modules, so every kind works; this module only tells them apart, for reports.
"""

from __future__ import annotations

from collections import Counter

from torch import nn


def describe_projection(module: nn.Module) -> str | None:
    """``linear``, ``4-bit``, ``8-bit``, each perhaps ``+ lora``; None for what is not a projection."""
    base = getattr(module, "base_layer", None)
    if base is not None and hasattr(module, "lora_A"):
        inner = describe_projection(base)
        return None if inner is None else f"{inner} + lora"
    names = {cls.__name__ for cls in type(module).__mro__}
    if "Linear4bit" in names:
        return "4-bit"
    if "Linear8bitLt" in names:
        return "8-bit"
    return "linear" if isinstance(module, nn.Linear) else None


def count_projections(model: nn.Module) -> dict[str, int]:
    """How many projections of each kind a model has, the most frequent first. LoRA's own A and B don't count."""
    inside = {
        id(child)
        for module in model.modules()
        if hasattr(module, "lora_A")
        for child in module.modules()
        if child is not module
    }
    kinds = (describe_projection(module) for module in model.modules() if id(module) not in inside)
    return dict(Counter(kind for kind in kinds if kind is not None).most_common())
