"""How far the results and gradients of an op of the benchmark are off, of every implementation."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fastpack.bench.ops.case import PLAIN, Case, Inputs, Maker, Run
from fastpack.bench.ops.loss_attention_cases import _attend, _attend_on_copies
from fastpack.bench.ops.runner import random_gradients, runs_of, trained
from fastpack.exactness.rule import bound_of, is_half, largest, middle, relative, worst
from fastpack.ops.dequantize import definition

DRAWS = 3
"""How many are compared in half precision."""


def _unrounded(weight: Tensor, state: Any) -> Tensor:
    return definition(weight, SimpleNamespace(**{**vars(state), "dtype": torch.float32}))


REFERENCES: dict[str, Run] = {
    "attention": functools.partial(_attend, backend="reference"),
    "attention_tree": functools.partial(_attend_on_copies, backend="reference"),
    "dequantize": _unrounded,
}
"""What computes the same in a wider dtype, where the plain formula does not."""


def check(case: Case, make: Maker) -> dict[str, float]:
    """For each implementation its worst error over all results and gradients, as a share of what is allowed.

    That is what :mod:`fastpack.exactness.rule` allows, the plain formula in a wider dtype being the truth: an error is
    a norm's in half precision, and the median of several draws.

    Returns:
        Nothing of an implementation that had no memory for it.

    Raises:
        torch.OutOfMemoryError: in the wider dtype, or in plain torch's own.
    """
    draws = [_errors_of_a_draw(case, make) for _ in range(DRAWS if is_half(make.dtype) else 1)]
    names = [name for name in draws[0] if all(name in draw for draw in draws)]
    errors = {name: list(map(middle, zip(*(draw[name] for draw in draws), strict=True))) for name in names}
    bounds = [bound_of(own, make.dtype) for own in errors[PLAIN]]
    return {name: worst([e / bound for e, bound in zip(errors[name], bounds, strict=True)]) for name in names}


def _errors_of_a_draw(case: Case, make: Maker) -> dict[str, list[float]]:
    """Return the error of each result and gradient, by implementation."""
    inputs = case.inputs(make)
    runs = runs_of(case, inputs)
    wider, size = (torch.float32, torch.linalg.vector_norm) if is_half(make.dtype) else (torch.float64, largest)
    seed = int(torch.randint(2**31, (), generator=make.generator, device=make.generator.device))
    truth = results(REFERENCES.get(case.name, runs[PLAIN]), leaves(inputs, wider), seed)
    errors: dict[str, list[float]] = {}
    for name, run in runs.items():
        with contextlib.nullcontext() if name == PLAIN else contextlib.suppress(torch.OutOfMemoryError):
            result = results(run, leaves(inputs), seed)
            errors[name] = [relative(ours, true, size=size) for ours, true in zip(result, truth, strict=True)]
    return errors


def leaves(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Copies of the inputs, float tensors in ``dtype`` if given, that autograd sees as its own leaves."""

    def leaf(value: Tensor) -> Tensor:
        expected = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.detach().to(expected, copy=True).requires_grad_(value.requires_grad)

    copied: Inputs = tree_map_only(Tensor, leaf, inputs)
    return copied


def results(run: Run, kwargs: Inputs, seed: int) -> list[Tensor]:
    """Return the results of ``run``, and the gradients for random gradients of those, where anything has one."""
    outputs = tree_leaves(run(*kwargs))
    kept = [out.detach().clone() for out in outputs]
    expected = trained(kwargs)
    if not expected:
        return kept
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    # of bfloat16's precision, so that every dtype gets the same
    grads = [grad.bfloat16().to(grad.dtype) for grad in random_gradients(outputs, generator)]
    return [*kept, *torch.autograd.grad(outputs, expected, grads)]
