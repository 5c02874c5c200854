"""Find a backbone's decoder layers, and put a model in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

TOWERS = ("visual", "vision", "image", "audio", "speech", "multi_modal", "multimodal")
"""Words in the names of towers: modules that embed something other than text."""


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """Return the longest list of modules among the backbone's children and grandchildren, without those of towers."""
    modules = _inside(backbone)
    modules += [inner for child in modules if not isinstance(child, nn.ModuleList) for inner in _inside(child)]
    return list(max((module for module in modules if isinstance(module, nn.ModuleList)), key=len, default=()))


def _inside(module: nn.Module) -> list[nn.Module]:
    return [child for name, child in module.named_children() if not any(word in name for word in TOWERS)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and restore every module's mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
