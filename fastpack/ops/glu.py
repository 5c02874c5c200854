"""Gated linear units: ``activation(gate) * up`` (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def gated(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """``activation(gate) * up``, elementwise on ``[..., I]`` (SwiGLU for SiLU, GEGLU for GELU)."""
    return activation(gate) * up
