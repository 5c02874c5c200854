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

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FULL_BOUND = 1e-5
"""What rounding in float32 may do to a tensor, relative to its largest value."""
FACTOR = 1.5
"""Of the stock model's own error: what another order of the same operations may be off by."""
CONTROL = 3.0
"""Of what is allowed: how far off the control must be at least."""

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


def worst(values: Iterable[float]) -> float:
    """Return the largest; infinity where one is NaN, or where there is none: nothing was compared."""
    return max((math.inf if value != value else value for value in values), default=math.inf)


def middle(errors: Iterable[float]) -> float:
    """Return the median of one tensor's errors over several draws: rounding that one draw blows up says nothing."""
    ordered = sorted(math.inf if error != error else error for error in errors)
    return ordered[len(ordered) // 2]


class Result(NamedTuple):
    """One pass over some sequences, or the mean of several.

    Attributes:
        logits: of each sequence ``[L, V]``, or of all tokens in order.
        grads: the gradient of each weight that has one.
        embeddings: the gradient of each token's embedding, ``[T, H]``, where it was asked for.
    """

    logits: list[Tensor]
    loss: Tensor
    grads: dict[str, Tensor]
    embeddings: Tensor | None = None

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Return its tensors by kind and name."""
        logits = {str(i): each for i, each in enumerate(self.logits)}
        tokens = {} if self.embeddings is None else {"": self.embeddings}
        return {"logits": logits, "loss": {"": self.loss}, "grads": self.grads, "embeddings": tokens}


@dataclass(frozen=True)
class Error:
    """Relative errors against the oracle, infinite for a kind of tensors of which there are none."""

    logits: float
    loss: float
    grads: float
    embeddings: float

    @property
    def worst(self) -> float:
        """The largest of logits, loss and gradients."""
        return max(self.of_tensors, self.loss)

    @property
    def of_tensors(self) -> float:
        """The largest of logits and gradients: a loss that is a sum of weighted logits may cancel."""
        return max(self.logits, self.grads)


def compare(found: Result, true: Result, *, half: bool = False) -> Error:
    """Return how far a pass is from another: see :func:`compare_draws`."""
    return compare_draws([found], [true], half=half)


def compare_draws(found: Sequence[Result], true: Sequence[Result], *, half: bool) -> Error:
    """Return how far passes are from others: of each kind the tensor that is off most, by the median of the draws.

    Args:
        found: a pass for each draw of tokens; true: those that they are compared with.
        half: measure norms, as for half precision, which one token hardly moves; else the largest differences.
    """
    size: Size = torch.linalg.vector_norm if half else largest
    pairs = [(a.by_kind(), b.by_kind()) for a, b in zip(found, true, strict=True)]
    errors: dict[str, dict[str, float]] = {}
    for kind in pairs[0][0]:
        least = 1e-3 if kind == "grads" else 0.0
        draws = [errors_of(a[kind], b[kind], size=size, least=least) for a, b in pairs]
        names = dict.fromkeys(name for draw in draws for name in draw)
        errors[kind] = {name: middle(draw.get(name, 0.0) for draw in draws) for name in names}
    return Error(**{kind: worst(each.values()) for kind, each in errors.items()})


def errors_of(found: Mapping[str, Tensor], true: Mapping[str, Tensor], *, size: Size, least: float) -> dict[str, float]:
    """Return the relative error of each tensor; one that only one side has is zero on the other.

    Args:
        least: the share of the largest of all as which a smaller one counts.
    """
    floor = least * max((float(size(tensor.float())) for tensor in true.values()), default=0.0)
    return {
        name: relative(found.get(name, 0 * tensor), true.get(name, 0 * tensor), size=size, floor=floor)
        for name, tensor in {**found, **true}.items()
    }


def largest(tensor: Tensor) -> Tensor:
    """Return max|tensor|."""
    return tensor.abs().max()


def relative(value: Tensor, reference: Tensor, *, size: Size = largest, floor: float = 0.0) -> float:
    """Return |value - reference| / |reference| in the given size.

    It is infinite where something is no number, and where the reference is all zeros and there is no floor: two
    passes that give nothing are equal, and prove nothing.
    """
    value, reference = value.detach().float(), reference.detach().float()
    of_reference = max(float(size(reference)), floor)
    off = float(size(value - reference))
    # NaN compares as neither larger nor smaller, and would pass
    return off / of_reference if of_reference > 0 and off == off else math.inf
