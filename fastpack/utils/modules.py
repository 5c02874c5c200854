"""Which modules of a backbone are its decoder layers."""

from __future__ import annotations

from torch import nn

TOWERS = ("visual", "vision", "image", "audio", "speech", "multi_modal", "multimodal")
"""In the names of what turns something else than text into embeddings."""


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """The longest list of modules right inside the backbone, or inside a child of its own; those of towers left out."""
    found = _inside(backbone)
    found += [inner for child in found if not isinstance(child, nn.ModuleList) for inner in _inside(child)]
    return list(max((module for module in found if isinstance(module, nn.ModuleList)), key=len, default=()))


def _inside(module: nn.Module) -> list[nn.Module]:
    return [child for name, child in module.named_children() if not any(word in name for word in TOWERS)]
