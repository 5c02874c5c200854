"""How far one pass over some sequences is from another.

Error is max|difference| / max|reference| of each tensor; gradients with a floor of 1e-3 of the largest gradient in
the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Result:
    """One pass over some sequences: logits of each ``[L, V]``, the loss, and every gradient."""

    logits: list[Tensor]
    loss: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Error:
    """Relative errors against the oracle."""

    logits: float
    loss: float
    grads: float
    worst_grad: str = ""

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.logits, self.loss, self.grads)


def compare(result: Result, reference: Result) -> Error:
    """How far ``result`` is from ``reference``.

    Raises: ValueError where the two have not the same sequences, or gradients of other parameters.
    """
    return _compare(result, reference, largest)


def compare_norms(result: Result, reference: Result) -> Error:
    """The same for the norms of differences, |difference| / |reference|, which one token hardly moves."""
    return _compare(result, reference, torch.linalg.vector_norm)


def _compare(result: Result, reference: Result, size: Callable[[Tensor], Tensor]) -> Error:
    if result.grads.keys() != reference.grads.keys():
        raise ValueError(f"only one has gradients of {sorted(result.grads.keys() ^ reference.grads.keys())}")
    logits = max(_relative(a, b, size) for a, b in zip(result.logits, reference.logits, strict=True))
    floor = 1e-3 * max(float(size(g.float())) for g in reference.grads.values())
    errors = {name: _relative(result.grads[name], g, size, floor) for name, g in reference.grads.items()}
    worst = max(errors, key=lambda name: errors[name])
    return Error(logits, _relative(result.loss, reference.loss, size), errors[worst], worst)


def largest(tensor: Tensor) -> Tensor:
    """max|tensor|"""
    return tensor.abs().max()


def relative(value: Tensor, reference: Tensor) -> float:
    """max|value - reference| / max|reference|, infinite where that is no number."""
    return _relative(value, reference, largest)


def _relative(value: Tensor, reference: Tensor, size: Callable[[Tensor], Tensor], floor: float = 0.0) -> float:
    value, reference = value.detach().float(), reference.detach().float()
    of_reference = max(float(size(reference)), floor)
    off = float(size(value - reference))
    # NaN compares as neither larger nor smaller, and would pass
    return off / of_reference if of_reference > 0 and off == off else float("inf")
