"""Variants of norms and gated linear units, shared by the ops and their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

Rounding = Literal["before", "after"]
Activation = Callable[[Tensor], Tensor]
ActivationKind = Literal["silu", "gelu", "gelu_tanh"]


class GatedNormKind(NamedTuple):
    """A kind of gated normalisation: whether the gate comes first, its activation, and where x is rounded."""

    gate_first: bool
    activation: Literal["silu", "sigmoid"]
    round_before: bool


class NormKind(NamedTuple):
    """A kind of normalisation: whether x is centred, where it is rounded, and whether the factor is 1 + weight."""

    centred: bool
    round_before: bool
    unit_offset: bool
