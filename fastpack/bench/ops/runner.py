"""Time every op over a sweep of T."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpack.bench.ceiling import Ceiling, machine, measure
from fastpack.bench.measure import peak_extra_memory, time_calls
from fastpack.bench.ops.case import LIGER, LLAMA_8B, SMALL, Case, Inputs, Maker, Run
from fastpack.bench.ops.results import OpFigures, OpsOutcome
from fastpack.bench.ops.table import print_end, print_op

SWEEP = {"cuda": [2**n for n in range(8, 16)], "cpu": [64, 256]}
CACHES = 3
"""Inputs in turn hold at least so many times what the cache does."""
MOST_SETS = 128
OUT_OF_MEMORY = "out of memory"


def all_cases() -> dict[str, Case]:
    """By name."""
    from fastpack.bench.ops import elementwise_cases, lora_cases, product_cases

    return {case.name: case for module in (elementwise_cases, product_cases, lora_cases) for case in module.CASES}


def run_ops(cases: Sequence[Case], sweep: Sequence[int] | None = None, lengths: str = "alpaca") -> OpsOutcome:
    """Time each op at each T. Its table is printed when its sweep has ended."""

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
    inputs, limit = case.inputs(make), getattr(ceiling, case.bound)
    found: list[OpFigures] = []
    for name, run in runs_of(case, inputs).items():
        row = OpFigures(case.name, name, make.tokens)
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


def runs_of(case: Case, inputs: Inputs) -> dict[str, Run]:
    """Every implementation that can run on such inputs, Liger's where it is installed."""
    runs = case.runs(inputs)
    if case.liger is not None and inputs[0].is_cuda and importlib.util.find_spec("liger_kernel") is not None:
        return runs | {LIGER: case.liger(inputs)}
    return runs


def leaves(inputs: Inputs) -> Inputs:
    """Copies of the inputs that autograd sees as its own leaves."""

    def leaf(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    return list(map(leaf, inputs))


def _both(run: Run, given: Inputs, generator: torch.Generator) -> Callable[[], tuple[Tensor, ...]]:
    """A call of forward and backward, as training asks for them."""
    trained = _trained(given)
    if not trained:
        return lambda: _tuple(run(*given))
    gradients = _gradients(_tuple(run(*given)), generator)
    return lambda: torch.autograd.grad(_tuple(run(*given)), trained, gradients)


def _gradients(outputs: tuple[Tensor, ...], generator: torch.Generator) -> list[Tensor]:
    """Normally distributed; one for a scalar, which is a loss."""
    return [
        torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
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
