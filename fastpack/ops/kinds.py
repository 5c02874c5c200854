"""The variants of norms and gated units, which an op and its kernel both know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

Rounding = Literal["before", "after"]
Activation = Callable[[Tensor], Tensor]
ActivationKind = Literal["silu", "gelu", "gelu_tanh"]


class NormKind(NamedTuple):
    """Which normalisation: about the mean or not, where it is rounded, and whether w is 1 + weight."""

    centred: bool
    round_before: bool
    unit_offset: bool
