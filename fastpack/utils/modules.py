"""A backbone's decoder layers, and the mode of a model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

TOWERS = ("visual", "vision", "image", "audio", "speech", "multi_modal", "multimodal")
"""Words in the names of modules that turn something else than text into embeddings."""


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """The longest list of modules right inside the backbone, or inside a child of its own; those of towers left out."""
    found = _inside(backbone)
    found += [inner for child in found if not isinstance(child, nn.ModuleList) for inner in _inside(child)]
    return list(max((module for module in found if isinstance(module, nn.ModuleList)), key=len, default=()))


def _inside(module: nn.Module) -> list[nn.Module]:
    return [child for name, child in module.named_children() if not any(word in name for word in TOWERS)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run without dropout; every module's mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
