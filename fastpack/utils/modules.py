"""Find a backbone's decoder layers and its experts, and put a model in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

TOWERS = ("visual", "vision", "image", "audio", "speech", "multi_modal", "multimodal")
"""Words in the names of towers: modules that embed something other than text."""

CACHED_POSITIONS = "rope_deltas"
"""The attribute in which a composite model keeps the positions of its last batch, to continue generating."""


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """Return the longest list of modules among the backbone's children and grandchildren, without those of towers."""
    modules = _inside(backbone)
    modules += [inner for child in modules if not isinstance(child, nn.ModuleList) for inner in _inside(child)]
    return list(max((module for module in modules if isinstance(module, nn.ModuleList)), key=len, default=()))


ROUTED = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token", "top_k_experts")
"""The names of the config's setting that says how many experts a token takes."""


def experts_per_token(config: object) -> int | None:
    """Return the number of experts that each token takes, or None for a dense model."""
    counts = (getattr(config, name, None) for name in ROUTED)
    return next((count for count in counts if isinstance(count, int)), None)


def share_per_token(weight: Tensor, config: object) -> float:
    """Return the share of a weight that a token multiplies: of a stack, the experts that it takes; else 1."""
    taken = experts_per_token(config) if weight.ndim == 3 else None
    return 1.0 if taken is None else min(1.0, taken / len(weight))


def _inside(module: nn.Module) -> list[nn.Module]:
    return [child for name, child in module.named_children() if not any(word in name for word in TOWERS)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and restore every module's mode and cached positions at the end."""
    modes = [(module, module.training) for module in model.modules()]
    with keeping_positions(model):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def keeping_positions(model: nn.Module) -> Iterator[None]:
    """Restore the positions that composites cache of their last batch (:data:`CACHED_POSITIONS`) at the end."""
    cached = [(m, vars(m)[CACHED_POSITIONS]) for m in model.modules() if CACHED_POSITIONS in vars(m)]
    try:
        yield
    finally:
        for module, positions in cached:
            setattr(module, CACHED_POSITIONS, positions)
