"""The kernels of a block of experts on a GPU: precision, no waiting for the device, recordings, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from expert_cases import (
    EVERYTHING,
    GATES,
    LAYOUTS,
    ODD_SIZES,
    RANKS,
    Case,
    by_expert,
    by_token,
    cases,
    choices,
    cotangent,
    op,
    operands,
    run,
    worst,
)
from torch import Tensor

from fastpack.exactness.rule import FACTOR
from fastpack.ops.implementation import Implementation

pytestmark = pytest.mark.gpu

FLOAT32 = 2e-5
DRAWS = 4
SIZES = ((70, 2, 5, 256, 128), (300, 4, 9, 128, 264), (33, 3, 40, 72, 200), (400, 1, 2, 64, 64))
"""Tokens, choices, experts, hidden size, size inside; several tiles of rows, columns and steps, and parts of tiles."""


@pytest.mark.sample(16)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32(gate: str, ranks: str, layout: str) -> None:
    case = cases(gate, ranks, layout, SIZES)
    values, index = operands(case, dtype=torch.float32), choices(case)
    truth = run(by_expert, case, values, index, device="cuda")
    assert worst(run(op("auto"), case, values, index, torch.float32, device="cuda"), truth) <= FLOAT32


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision(layout: str, ranks: str, gate: str, dtype: torch.dtype) -> None:
    """By the 2-norm over several draws, no operand's error is above 1.5 times that of plain matmuls."""
    case = replace(cases(gate, ranks, layout, SIZES), lora_dtype=torch.float32, weights_dtype=torch.float32)
    if case.routing == "nowhere":
        case = replace(case, routing="elsewhere")
    errors: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for draw in range(DRAWS):
        values, index = operands(case, draw, dtype), choices(case, draw)
        exact = replace(case, lora_dtype=None, weights_dtype=None)
        truth = run(by_expert, exact, values, index, device="cuda")
        plain, ours = (run(block, case, values, index, dtype, device="cuda") for block in (by_expert, op("auto")))
        for name, right in truth.items():
            apart = [(result[name].double() - right).square().sum() for result in (plain, ours)]
            errors.setdefault(name, []).append((*apart, right.square().sum()))  # type: ignore[arg-type]
    half_a_unit = torch.finfo(dtype).eps / 2
    for name, draws in errors.items():
        theirs, mine, size = (torch.stack(column).sum().sqrt() for column in zip(*draws, strict=True))
        assert mine <= max(FACTOR * theirs, half_a_unit * size), f"{name}: {mine / size:.1e}, plain {theirs / size:.1e}"


def test_sizes_that_kernels_do_not_support() -> None:
    """``auto`` multiplies each expert's rows by torch."""
    case = Case(sizes=ODD_SIZES[0], bias=True)
    values, index = operands(case, dtype=torch.float32), choices(case)
    actual = run(op("auto"), case, values, index, torch.float32, device="cuda")
    assert worst(actual, run(by_token, case, values, index)) <= FLOAT32
    exact = run(op("auto"), case, values, index, device="cuda")
    assert worst(exact, run(by_token, case, values, index)) <= 1e-12


# --- nothing waits for the device -------------------------------------------------------------------------------------


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(case: Case, dtype: torch.dtype, *, stacks_train: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    values, index = operands(case, dtype=dtype), choices(case).cuda()
    leaves = {name: value.to("cuda", case.dtype_of(name, dtype)) for name, value in values.items()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(stacks_train or not name.endswith("weight"))
    return leaves, index


LARGE = replace(EVERYTHING, sizes=(200, 2, 6, 128, 64), routing="elsewhere", lora_dtype=torch.float32)


def test_the_host_does_not_wait() -> None:
    leaves, index = on_gpu(LARGE, torch.bfloat16)
    grad = cotangent(leaves["x"])

    def step(implementation: Implementation) -> None:
        op(implementation)(LARGE, leaves, index).backward(grad)

    step("auto")  # compiles
    with waiting_is_an_error():
        step("auto")
        with pytest.raises(RuntimeError, match="synchroniz"):  # the control
            step("torch")


def test_a_recording_is_replayed_with_other_routings() -> None:
    """Shapes don't depend on the choices. Experts without tokens, and choices of no expert, come and go."""
    leaves, index = on_gpu(LARGE, torch.bfloat16)
    grad, block = cotangent(leaves["x"]), op("auto")

    def step() -> list[Tensor]:
        out = block(LARGE, leaves, index)
        return [out.detach(), *torch.autograd.grad(out, [*leaves.values()], grad)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    results = []
    for seed, routing in enumerate(("distinct", "one", "few", "nowhere", "elsewhere")):
        case = replace(LARGE, routing=routing)
        index.copy_(choices(case, seed))
        with torch.no_grad():
            fresh = operands(case, seed, torch.bfloat16)
            leaves["x"].copy_(fresh["x"])
            leaves["weights"].copy_(fresh["weights"])
        expected = step()
        graph.replay()
        assert all(torch.equal(ours, right) for ours, right in zip(recorded, expected, strict=True)), routing
        results.append(recorded[0].clone())
    assert not results[3].any()
    assert not torch.equal(results[0], results[4]), "the control: routings differ"


def test_two_runs_give_the_same_bits() -> None:
    leaves, index = on_gpu(LARGE, torch.bfloat16)
    grad = cotangent(leaves["x"])
    first, again = (torch.autograd.grad(op("auto")(LARGE, leaves, index), [*leaves.values()], grad) for _ in range(2))
    assert all(map(torch.equal, first, again))


def test_a_frozen_stack_costs_no_memory() -> None:
    """Forward and backward need less than a quarter of a stack; the control, whose stacks train, needs both stacks."""
    case = Case(sizes=(64, 2, 64, 512, 512), ranks=(4, 4), lora_dtype=torch.float32)
    stack = 64 * 512 * 512 * 2

    def peak(*, stacks_train: bool) -> int:
        leaves, index = on_gpu(case, torch.bfloat16, stacks_train=stacks_train)
        for _ in range(2):
            for leaf in leaves.values():
                leaf.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = op("auto")(case, leaves, index)
            out.backward(cotangent(out))
        return torch.cuda.max_memory_allocated() - before

    adapters = 64 * 4 * (512 + 1024 + 512 + 512) * 4
    assert peak(stacks_train=False) <= stack / 4 + 6 * adapters
    assert peak(stacks_train=True) >= 3 * stack
