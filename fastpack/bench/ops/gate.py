"""Is an implementation exact enough to be timed? Results and gradients, against the plain formula in a wider dtype.

In half precision its error may be 1.5 times plain torch's own, and one rounding to that dtype in any case. In float32
it may be 1e-5 of the largest value of each tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpack.bench.ops.case import Case, Maker, Run, given_up, leaves, outputs_of

HALF_BOUND = 1.5
FLOAT32_BOUND = 1e-5
DRAWS, FEW_TOKENS = 3, 4096
"""How many are compared in half precision, and up to how many tokens; one of more."""
IN_HALF = "plain, in half precision"


def check(case: Case, make: Maker) -> dict[str, float]:
    """For each implementation its worst error over all results and gradients, as a share of what is allowed.

    How large the largest error of a tensor is, is luck in part, ours and torch's: the fewer elements, the more. In half
    precision, where one is compared with the other, both are the largest of several draws of few tokens.

    Returns:
        Nothing of an implementation that had no memory for it.

    Raises:
        torch.OutOfMemoryError: in the wider dtype, or in plain torch's own.
    """
    several = make.dtype.itemsize < 4 and make.tokens <= FEW_TOKENS
    errors = _errors_of_a_draw(case, make)
    for _ in range(DRAWS - 1 if several else 0):
        more = _errors_of_a_draw(case, make)
        errors = {name: list(map(_larger, errors[name], more[name])) for name in errors if name in more}
    return _shares(errors, make.dtype)


def _errors_of_a_draw(case: Case, make: Maker) -> dict[str, list[float]]:
    """Of each result and gradient, by implementation; and by :data:`IN_HALF`, where plain torch computes so, too."""
    inputs = case.inputs(make)
    runs = case.runs(inputs)
    (first, plain), *others = runs.items()
    half = make.dtype.itemsize < 4
    wide = torch.float32 if half else torch.float64
    seed = int(torch.randint(2**31, (), generator=make.generator, device=make.generator.device))
    truth = results(case.reference or plain, inputs, seed, wide)
    errors = {first: _errors(results(plain, inputs, seed), truth)}
    if case.plain_in_half is not None and half:
        errors[IN_HALF] = _errors(results(case.plain_in_half, inputs, seed), truth)
    for name, run in others:
        with contextlib.suppress(torch.OutOfMemoryError):
            errors[name] = _errors(results(run, inputs, seed), truth)
    return errors


def _shares(errors: dict[str, list[float]], dtype: torch.dtype) -> dict[str, float]:
    """The worst of each implementation's errors, as shares of what is allowed."""
    of_plain = next(iter(errors.values()))
    if IN_HALF in errors:
        of_plain = [max(pair) for pair in zip(of_plain, errors[IN_HALF], strict=True)]
    rounding = torch.finfo(dtype).eps / 2
    half = dtype.itemsize < 4
    allowed = [max(HALF_BOUND * error, rounding) if half else FLOAT32_BOUND for error in of_plain]
    return {name: max(map(_share, found, allowed)) for name, found in errors.items() if name != IN_HALF}


def _larger(error: float, other: float) -> float:
    return math.nan if math.isnan(error) or math.isnan(other) else max(error, other)


def results(run: Run, inputs: Sequence[Any], seed: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    """What ``run`` returns for copies of the inputs, and their gradients for random gradients of what it returns.

    Where none of them has a gradient, what it returns alone.
    """
    given = leaves(inputs, dtype)
    outputs = outputs_of(run(*given_up(given)))
    trained = [value for value in given if isinstance(value, Tensor) and value.requires_grad]
    if not trained:
        return [out.detach() for out in outputs]
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    of_outputs = random_gradients(outputs, generator)
    kept = [out.detach().clone() for out in outputs]
    return [*kept, *torch.autograd.grad(outputs, trained, of_outputs)]


def random_gradients(outputs: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Normally distributed; one for a scalar, which is a loss. Of bfloat16's precision, so that every dtype gets
    the same."""
    return [
        torch.ones_like(out)
        if out.ndim == 0
        else torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(out.dtype)
        for out in outputs
    ]


def _errors(found: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """max|difference| / max|reference| of each tensor."""
    pairs = zip((ours.detach() for ours in found), truth, strict=True)
    return [float((ours.to(true.dtype) - true).abs().max() / true.abs().max()) for ours, true in pairs]


def _share(error: float, allowed: float) -> float:
    return math.inf if math.isnan(error) else error / allowed
