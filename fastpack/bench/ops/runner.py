"""Check and measure every op over a sweep of T."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastpack.bench.ceiling import Ceiling, machine, measure
from fastpack.bench.measure import peak_extra_memory, time_calls
from fastpack.bench.ops.case import LIGER, LLAMA_8B, PLAIN, SMALL, Case, Inputs, Maker, Run
from fastpack.bench.ops.results import OpFigures, OpsOutcome
from fastpack.bench.ops.table import print_end, print_op
from fastpack.exactness.rule import bound_of, is_half, largest, middle, relative, worst

SWEEP = {"cuda": [2**n for n in range(8, 16)], "cpu": [64, 256]}
CACHES = 3
"""Inputs in turn hold at least so many times what the cache does."""
MOST_SETS = 128
DRAWS, FEW_TOKENS = 3, 4096
"""How many are compared in half precision, and up to how many tokens; one of more."""
OUT_OF_MEMORY = "out of memory"


def all_cases() -> dict[str, Case]:
    """By name."""
    from fastpack.bench.ops import elementwise_cases, lora_cases, product_cases

    return {case.name: case for module in (elementwise_cases, product_cases, lora_cases) for case in module.CASES}


def run_ops(cases: Sequence[Case], sweep: Sequence[int] | None = None, lengths: str = "alpaca") -> OpsOutcome:
    """Check and time each op at each T. Its table is printed when its sweep has ended."""

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, dtype = (LLAMA_8B, torch.bfloat16) if device.type == "cuda" else (SMALL, torch.float32)
    outcome = OpsOutcome(measure(), machine())
    for case in cases:
        found: list[OpFigures] = []
        for tokens in sweep or SWEEP[device.type]:
            make = Maker(tokens, sizes, dtype, torch.Generator(device), lengths)
            found += run_case(case, make, outcome.ceiling)
        print_op(case, found)
        outcome.figures += found
    print_end(outcome)
    return outcome


def run_case(case: Case, make: Maker, ceiling: Ceiling) -> list[OpFigures]:
    """All implementations of one op at one T."""
    device = make.generator.device
    make.generator.manual_seed(0)
    # an odd number of tokens, which no block size divides; one alone has attention without gradients of q and k
    checked = replace(make, tokens=max(2, make.tokens - 1))
    try:
        deviations = check(case, checked)
    except torch.OutOfMemoryError:  # in a wider dtype, or plain torch: what fits is timed all the same
        deviations = {}
    make.generator.manual_seed(0)
    inputs, limit = case.inputs(make), getattr(ceiling, case.bound)
    found: list[OpFigures] = []
    for name, run in runs_of(case, inputs).items():
        row = OpFigures(case.name, name, make.tokens, deviation=deviations.get(name))
        try:
            sets = [leaves(inputs) for _ in range(_how_many(inputs, device))]
            calls = [_both(run, given, make.generator) for given in sets]
            row.forward = time_calls([functools.partial(run, *given) for given in sets], device)
            row.both = time_calls(calls, device)
            row.share = case.work(make) / row.both / limit
            row.peak_memory = peak_extra_memory(calls[0], device)
        except torch.OutOfMemoryError:
            row.error = OUT_OF_MEMORY
        found.append(row)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def check(case: Case, make: Maker) -> dict[str, float]:
    """For each implementation its worst error over all results and gradients, as a share of what is allowed.

    That is what :mod:`fastpack.exactness.rule` allows, the plain formula in a wider dtype being the truth: an error is
    a norm's in half precision, and the median of several draws of few tokens.

    Returns:
        Nothing of an implementation that had no memory for it.

    Raises:
        torch.OutOfMemoryError: in the wider dtype, or in plain torch's own.
    """
    several = is_half(make.dtype) and make.tokens <= FEW_TOKENS
    draws = [_errors_of_a_draw(case, make) for _ in range(DRAWS if several else 1)]
    names = [name for name in draws[0] if all(name in draw for draw in draws)]
    errors = {name: list(map(middle, zip(*(draw[name] for draw in draws), strict=True))) for name in names}
    bounds = [bound_of(own, make.dtype) for own in errors[PLAIN]]
    return {name: worst([e / bound for e, bound in zip(errors[name], bounds, strict=True)]) for name in names}


def _errors_of_a_draw(case: Case, make: Maker) -> dict[str, list[float]]:
    """Return the error of each result and gradient, by implementation."""
    inputs = case.inputs(make)
    runs = runs_of(case, inputs)
    wider, size = (torch.float32, torch.linalg.vector_norm) if is_half(make.dtype) else (torch.float64, largest)
    seed = int(make.integers(2**31))
    truth = results(case.reference or runs[PLAIN], leaves(inputs, wider), seed)
    errors: dict[str, list[float]] = {}
    for name, run in runs.items():
        with contextlib.nullcontext() if name == PLAIN else contextlib.suppress(torch.OutOfMemoryError):
            found = results(run, leaves(inputs), seed)
            errors[name] = [relative(ours, true, size=size) for ours, true in zip(found, truth, strict=True)]
    return errors


def runs_of(case: Case, inputs: Inputs) -> dict[str, Run]:
    """Every implementation that can run on such inputs, Liger's where it is installed."""
    runs = case.runs(inputs)
    if case.liger is not None and inputs[0].is_cuda and importlib.util.find_spec("liger_kernel") is not None:
        return runs | {LIGER: case.liger(inputs)}
    return runs


def leaves(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Copies of the inputs, float tensors in ``dtype`` if given, that autograd sees as its own leaves."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.detach().to(wanted, copy=True).requires_grad_(value.requires_grad)

    return list(map(leaf, inputs))


def results(run: Run, given: Inputs, seed: int) -> list[Tensor]:
    """Return the results of ``run``, and the gradients for random gradients of those, where anything has one."""
    outputs = _tuple(run(*given))
    kept = [out.detach().clone() for out in outputs]
    trained = _trained(given)
    if not trained:
        return kept
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    return [*kept, *torch.autograd.grad(outputs, trained, _gradients(outputs, generator))]


def _both(run: Run, given: Inputs, generator: torch.Generator) -> Callable[[], tuple[Tensor, ...]]:
    """A call of forward and backward, as training asks for them."""
    trained = _trained(given)
    if not trained:
        return lambda: _tuple(run(*given))
    gradients = _gradients(_tuple(run(*given)), generator)
    return lambda: torch.autograd.grad(_tuple(run(*given)), trained, gradients)


def _gradients(outputs: tuple[Tensor, ...], generator: torch.Generator) -> list[Tensor]:
    """Normally distributed; one for a scalar, which is a loss. Of bfloat16's precision, so that every dtype gets
    the same."""
    return [
        torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(out.dtype)
        if out.ndim
        else torch.ones_like(out)
        for out in outputs
    ]


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _trained(given: Inputs) -> list[Tensor]:
    return [value for value in given if isinstance(value, Tensor) and value.requires_grad]


def _how_many(inputs: Inputs, device: torch.device) -> int:
    """Sets of inputs that together are too large for the cache."""
    if device.type != "cuda":
        return 2
    size = sum(value.nbytes for value in inputs if isinstance(value, Tensor))
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_SETS, -(-CACHES * cache // size)))
