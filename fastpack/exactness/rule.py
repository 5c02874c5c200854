"""How far one pass over some sequences is from another, and how far it may be.

In float32 and float64 an error is max|difference| / max|reference| of each tensor, gradients with a floor of 1e-3 of
the largest gradient in the model, and at most :data:`FULL_BOUND`; more only where the stock model itself is off by
more. In half precision a maximum is luck, so that an error is a 2-norm, |difference| / |reference|, and the median of
several draws. It is at most :data:`FACTOR` times the stock model's own error: against a copy in float32 where one is
cheap, else between two stock runs that differ in rounding alone.

Every comparison has a control that must be off, by :data:`CONTROL` times what is allowed. Where it isn't, an error
would not be seen, and the answer is that nobody can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

FULL_BOUND = 1e-5
"""What rounding in float32 may do to a tensor, relative to its largest value."""
FACTOR = 1.5
"""Of the stock model's own error: what another order of the same operations may be off by."""
CONTROL = 3.0
"""Of what is allowed: how far off the control must be at least."""

Verdict = Literal["exact", "not exact", "can't tell"]
Size = Callable[[Tensor], Tensor]


def bound_of(own: float, dtype: torch.dtype) -> float:
    """Return how far a pass may be off.

    Args:
        own: the stock model's own error in this precision, measured as the pass's is.
        dtype: the least precise one that the model computes in. Half precision allows one rounding in any case.
    """
    least = torch.finfo(dtype).eps / 2 if is_half(dtype) else FULL_BOUND
    return max(FACTOR * own, least)


def is_half(dtype: torch.dtype) -> bool:
    """True for dtypes of two bytes."""
    return dtype in (torch.float16, torch.bfloat16)


def verdict_of(error: float, bound: float, control: float) -> Verdict:
    """Judge a pass by its error, what it may be, and the error of its control. NaN is never exact."""
    if not error <= bound:
        return "not exact"
    return "exact" if control > CONTROL * bound else "can't tell"


def worst(values: Sequence[float]) -> float:
    """Return the largest, or infinity where one is NaN."""
    return max((float("inf") if value != value else value for value in values), default=0.0)


def middle(errors: Iterable[float]) -> float:
    """Return the median of one tensor's errors over several draws: rounding that one draw blows up says nothing."""
    ordered = sorted(float("inf") if error != error else error for error in errors)
    return ordered[len(ordered) // 2]


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
    """Return how far ``result`` is from ``reference``, by the largest differences.

    Raises:
        ValueError: the two have not the same sequences, or gradients of other parameters.
    """
    return _compare(result, reference, largest)


def compare_norms(result: Result, reference: Result) -> Error:
    """The same by norms of differences, |difference| / |reference|, which one token hardly moves."""
    return _compare(result, reference, torch.linalg.vector_norm)


def _compare(result: Result, reference: Result, size: Size) -> Error:
    if result.grads.keys() != reference.grads.keys():
        raise ValueError(f"only one has gradients of {sorted(result.grads.keys() ^ reference.grads.keys())}")
    logits = max(relative(a, b, size=size) for a, b in zip(result.logits, reference.logits, strict=True))
    errors = errors_of(result.grads, reference.grads, size=size)
    worst_grad = max(errors, key=lambda name: errors[name])
    return Error(logits, relative(result.loss, reference.loss, size=size), errors[worst_grad], worst_grad)


def errors_of(found: Mapping[str, Tensor], true: Mapping[str, Tensor], *, size: Size) -> dict[str, float]:
    """Return the relative error of each tensor; none counts as smaller than 1e-3 of the largest of all."""
    floor = 1e-3 * max((float(size(tensor.float())) for tensor in true.values()), default=0.0)
    return {name: relative(found[name], tensor, size=size, floor=floor) for name, tensor in true.items()}


def largest(tensor: Tensor) -> Tensor:
    """Return max|tensor|."""
    return tensor.abs().max()


def relative(value: Tensor, reference: Tensor, *, size: Size = largest, floor: float = 0.0) -> float:
    """Return |value - reference| / |reference| in the given size, 0 for equal ones, infinite where it is no number."""
    value, reference = value.detach().float(), reference.detach().float()
    of_reference = max(float(size(reference)), floor)
    off = float(size(value - reference))
    if off == 0.0:
        return 0.0
    # NaN compares as neither larger nor smaller, and would pass
    return off / of_reference if of_reference > 0 and off == off else float("inf")
