"""The rule of exactness: the error of one pass over some sequences against another, and its bound.

In float32 and float64 the error of a tensor is max|difference| / max|reference|. For gradients the reference is at
least 1e-3 of the largest gradient in the model, or 1e-2 for a gradient that is rounding alone. The bound is
:data:`FULL_BOUND`, or :data:`RECURRENT_BOUND`, or more if the stock model itself is off by more.

In half precision a maximum depends on luck. So the error is |difference| / |reference| in 2-norms, and of several draws
of tokens the median counts. The bound is :data:`FACTOR` times the stock model's own error. This own error is measured
against a float32 copy if a copy is cheap, else between two stock runs that differ in rounding alone.

Every comparison has a control that must be off by at least :data:`CONTROL` times the bound. If a control
is off by less, a real error could go unseen, and the verdict is "can't tell".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FULL_BOUND = 1e-5
"""The error that rounding in float32 may cause, relative to a tensor's largest value."""
RECURRENT_BOUND = 1e-4
"""The error that rounding may cause in a model with recurrences, which sum over all tokens of a sequence. Behind
padding, where its chunks begin elsewhere, a tiny stock model is off by 1e-5 to 4e-4 from itself."""
FACTOR = 1.5
"""The bound as a multiple of the stock model's own error: another order of the same operations rounds differently."""
CONTROL = 3.0
"""The least error of the control, as a multiple of the bound."""

ROUNDING = torch.finfo(torch.float32).eps
"""The size of a gradient, as a share of the largest in the model, up to which it is rounding alone: what is left where
terms cancel, as in the bias of keys."""

Size = Callable[[Tensor], Tensor]


def bound_of(own: float, dtype: torch.dtype, *, recurrent: bool = False) -> float:
    """Return the bound of a pass's error.

    Args:
        own: The stock model's own error in this precision, measured in the same way as the pass's error.
        dtype: The least precise dtype that the model computes in. In half precision the bound is at least one rounding.
        recurrent: Whether the model has recurrences.
    """
    full = RECURRENT_BOUND if recurrent else FULL_BOUND
    least = torch.finfo(dtype).eps / 2 if is_half(dtype) else full
    return max(FACTOR * own, least)


def is_half(dtype: torch.dtype) -> bool:
    """Return whether a dtype is float16 or bfloat16."""
    return dtype in (torch.float16, torch.bfloat16)


def worst(values: Iterable[float]) -> float:
    """Return the largest value, or infinity if a value is NaN or there are no values: nothing was compared."""
    return max((math.inf if value != value else value for value in values), default=math.inf)


def middle(errors: Iterable[float]) -> float:
    """Return the median of one tensor's errors over draws: a single draw with blown-up rounding says nothing."""
    ordered = sorted(math.inf if error != error else error for error in errors)
    return ordered[len(ordered) // 2]


class Result(NamedTuple):
    """The result of one pass over some sequences, or the mean of several.

    Attributes:
        logits: The logits of each sequence ``[L, V]``, or of all tokens in order.
        loss: The loss, a scalar.
        grads: The gradient of each weight that has one, by name.
        embeddings: The gradient of each token's embedding, ``[T, H]``, if it was asked for.
    """

    logits: list[Tensor]
    loss: Tensor
    grads: dict[str, Tensor]
    embeddings: Tensor | None = None

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors by kind and name."""
        logits = {str(i): each for i, each in enumerate(self.logits)}
        tokens = {} if self.embeddings is None else {"": self.embeddings}
        return {"logits": logits, "loss": {"": self.loss}, "grads": self.grads, "embeddings": tokens}


@dataclass(frozen=True)
class Error:
    """The relative errors of a result against the oracle, by kind of tensor.

    A kind without tensors has an infinite error.
    """

    logits: float
    loss: float
    grads: float
    embeddings: float

    @property
    def worst(self) -> float:
        """The largest error of logits, loss and gradients."""
        return max(self.of_tensors, self.loss)

    @property
    def of_tensors(self) -> float:
        """The largest error of logits and gradients: a loss that is a sum of weighted logits may cancel."""
        return max(self.logits, self.grads)


def compare(result: Result, true: Result, *, half: bool = False) -> Error:
    """Return the errors of one pass against a reference pass, as :func:`compare_draws` does."""
    return compare_draws([result], [true], half=half)


def compare_draws(results: Sequence[Result], true: Sequence[Result], *, half: bool) -> Error:
    """Return the errors of passes against reference passes: per kind of tensor, the largest median over the draws.

    Args:
        results: A pass for each draw of tokens.
        true: The passes to compare them with.
        half: True measures 2-norms, for half precision: one token hardly moves them. False measures the largest
            differences.
    """
    size: Size = torch.linalg.vector_norm if half else largest
    pairs = [(a.by_kind(), b.by_kind()) for a, b in zip(results, true, strict=True)]
    errors: dict[str, dict[str, float]] = {}
    for kind in pairs[0][0]:
        least = 1e-3 if kind == "grads" else 0.0
        draws = [errors_of(a[kind], b[kind], size=size, least=least) for a, b in pairs]
        names = dict.fromkeys(name for draw in draws for name in draw)
        errors[kind] = {name: middle(draw.get(name, 0.0) for draw in draws) for name in names}
    return Error(**{kind: worst(each.values()) for kind, each in errors.items()})


def errors_of(
    tensors: Mapping[str, Tensor], true: Mapping[str, Tensor], *, size: Size, least: float
) -> dict[str, float]:
    """Return the relative error of each tensor. A tensor that one side lacks counts as zero there.

    Args:
        tensors: Tensors by name.
        true: The tensors to compare them with.
        size: The norm to measure.
        least: The least size of a reference, as a share of the largest size in ``true``. It is ten times as much for a
            reference that is rounding alone (:data:`ROUNDING`).
    """
    sizes = {name: float(size(tensor.float())) for name, tensor in true.items()}
    biggest = max(sizes.values(), default=0.0)

    def floor(name: str) -> float:
        return biggest * least * (10 if sizes.get(name, 0.0) <= ROUNDING * biggest else 1)

    return {
        name: relative(tensors.get(name, 0 * tensor), true.get(name, 0 * tensor), size=size, floor=floor(name))
        for name, tensor in {**tensors, **true}.items()
    }


def largest(tensor: Tensor) -> Tensor:
    """Return max|tensor|."""
    return tensor.abs().max()


def relative(value: Tensor, reference: Tensor, *, size: Size = largest, floor: float = 0.0) -> float:
    """Return |value - reference| / |reference| in the given size.

    The result is infinite for NaNs, and for a reference of zeros without a floor: two passes that return only zeros
    are equal, but prove nothing.
    """
    value, reference = value.detach().float(), reference.detach().float()
    of_reference = max(float(size(reference)), floor)
    off = float(size(value - reference))
    # a NaN is neither larger nor smaller than a bound, so it would pass
    return off / of_reference if of_reference > 0 and off == off else math.inf
