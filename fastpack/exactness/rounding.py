"""Running a model again so that rounding alone differs, which tells how far apart two right results are.

The other way of computing is transformers' other attention (sdpa or eager), in half precision from inputs that are one
rounding off, since fused kernels round elsewhere too. Inputs alone, nearly all of them a rounding off, tell it where
there is no other attention, or it is another function; in full precision; and where a model rounds more coarsely inside
than its stream of hidden states does (4-bit weights that compute in bfloat16 under a float32 stream).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def other_attention_of(model: nn.Module) -> str | None:
    """Return the other implementation of attention that all of a transformers model has, or None."""
    current = {config._attn_implementation for config in _configs(model)}
    if not current or None in current:
        return None
    if current != {"eager"}:
        return "eager"
    models = [module for module in model.modules() if hasattr(module, "_supports_sdpa")]
    return "sdpa" if models and all(module._supports_sdpa for module in models) else None


@contextmanager
def attending_by(model: nn.Module, implementation: str) -> Iterator[None]:
    """Let every part of a stock transformers model attend by this implementation, and by its own again behind it."""
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = implementation
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def _configs(model: nn.Module) -> list[Any]:
    """Return the configs of all modules that attend by one, each once."""
    found = (module.__dict__.get("config") for module in model.modules())
    return list({id(c): c for c in found if hasattr(c, "_attn_implementation_internal")}.values())


def coarsest_dtype(model: nn.Module, stream: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    """Return the least precise dtype that a model computes in, as far as its parts tell.

    Args:
        stream: the dtype of its embeddings.
        autocast: the dtype of the autocast that it runs under, or None.
    """
    used = {stream, autocast}
    for module in model.modules():
        used |= {weight.dtype for weight in module._parameters.values() if weight is not None}
        used.add(getattr(module, "compute_dtype", None))
        if _is_quantised(module):
            used.add(torch.bfloat16)
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in used), stream)


def _is_quantised(module: nn.Module) -> bool:
    """True for a projection whose weight is not a plain tensor of numbers."""
    if not (hasattr(module, "in_features") and hasattr(module, "out_features")):
        return False
    weight = getattr(module, "weight", None)
    return not isinstance(weight, Tensor) or not weight.is_floating_point() or type(weight) not in _PLAIN


_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class Nudge:
    """By how many roundings each element of some values is moved.

    Attributes:
        seed: of the numbers, which are the same for each pass that is compared with another.
        dtype: whose roundings.
        spread: up to so many, either way: far enough that everything computed from the values is rounded anew.
        share: of the elements that are moved by one more, either way.
    """

    seed: int
    dtype: torch.dtype
    spread: int = 0
    share: float = 0.0

    def steps(self, shape: tuple[int, ...]) -> Tensor:
        """Return by how many roundings each is moved, float32."""
        generator = torch.Generator().manual_seed(self.seed)
        found = torch.randint(-self.spread, self.spread + 1, shape, generator=generator).float()
        chosen = torch.rand(shape, generator=generator)
        return found + (chosen < self.share / 2).float() - (chosen > 1 - self.share / 2).float()


LIKE_ONE, NEARLY_ALL = 1 / 12, 2 / 3
"""Shares: so many of which move as much as one rounding does (a variance of a twelfth), and some three roundings."""


def moved_by(values: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values, each off by so many roundings of a dtype; gradients pass through."""
    step = 0.75 * torch.finfo(dtype).eps * values.detach().abs().float()  # reaches the neighbour from anywhere
    return values + (steps.to(values.device) * step).to(values.dtype)
