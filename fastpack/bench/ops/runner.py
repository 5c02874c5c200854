"""Time every op over a sweep of T, and print a table an op."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fastpack.bench.ceiling import Ceiling, machine, measure
from fastpack.bench.measure import peak_extra_memory, time_calls
from fastpack.bench.ops import elementwise_cases, expert_cases, lora_cases, loss_attention_cases
from fastpack.bench.ops.case import LIGER, PLAIN, SMALL, Case, Inputs, Maker, Run
from fastpack.bench.settings import OUT_OF_MEMORY
from fastpack.bench.shapes import make_config
from fastpack.utils.console import headed, room_for, without_empty

MODULES = (elementwise_cases, loss_attention_cases, lora_cases, expert_cases)
CASES = {case.name: case for module in MODULES for case in module.CASES}
SWEEP = {"cuda": [2**n for n in range(8, 16)], "cpu": [64, 256]}
CACHES = 3
"""All sets of inputs together are at least so many times as large as the cache."""
MOST_SETS = 128

WIDTH = 110
COLUMNS = ("T", "", "forward us", "both us", "share", "x torch", "MiB")


@dataclass
class OpResult:
    """The measurements of one implementation at one T.

    Attributes:
        forward, both: seconds of the forward, and of forward and backward (of ops without gradients the forward);
            None if memory ran out; ``error`` then says so.
        share: of the machine's limit, for the least work that both need.
        peak_memory: bytes beyond inputs and gradients, for forward and backward; None on a CPU.
    """

    op: str
    implementation: str
    tokens: int
    forward: float | None = None
    both: float | None = None
    share: float | None = None
    peak_memory: int | None = None
    error: str | None = None


def run_ops(cases: Sequence[Case], sweep: Sequence[int] | None = None, lengths: str = "alpaca") -> dict[str, Any]:
    """Time each op at each T, and return all results. An op's table is printed when its sweep ends."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, dtype = (make_config("llama8b"), torch.bfloat16) if device.type == "cuda" else (SMALL, torch.float32)
    ceiling = measure()
    measured_on = machine()
    results: list[OpResult] = []
    for case in cases:
        rows: list[OpResult] = []
        for tokens in sweep or SWEEP[device.type]:
            rows += run_case(case, Maker(tokens, sizes, dtype, torch.Generator(device), lengths), ceiling)
        print_op(case, rows)
        results += rows
    print_end(ceiling, measured_on)
    return {"machine": measured_on, "ceiling": asdict(ceiling), "ops": [asdict(row) for row in results]}


def run_case(case: Case, make: Maker, ceiling: Ceiling) -> list[OpResult]:
    """Time all implementations of one op at one T."""
    device = make.generator.device
    make.generator.manual_seed(0)
    inputs = case.inputs(make)
    rows: list[OpResult] = []
    for name, run in runs_of(case, inputs).items():
        row = OpResult(case.name, name, make.tokens)
        try:
            sets = [leaves(inputs) for _ in range(_how_many(inputs, device))]
            calls = [_both(run, each, make.generator) for each in sets]
            row.forward = time_calls([partial(run, *each) for each in sets], device)
            row.both = time_calls(calls, device)
            row.share = case.least_seconds(make, ceiling) / row.both
            row.peak_memory = peak_extra_memory(calls[0], device)
        except torch.OutOfMemoryError:
            row.error = OUT_OF_MEMORY
        rows.append(row)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def runs_of(case: Case, inputs: Inputs) -> dict[str, Run]:
    """Return every implementation that can run on such inputs, Liger's on a GPU if it is installed."""
    runs = case.runs(inputs)
    if not inputs[0].is_cuda or importlib.util.find_spec("liger_kernel") is None:
        runs.pop(LIGER, None)
    return runs


def leaves(inputs: Inputs) -> Inputs:
    """Return copies of the inputs that autograd sees as its own leaves."""
    return list(tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs))


def trained(inputs: Inputs) -> list[Tensor]:
    """Return the tensors that get a gradient."""
    return [value for value in tree_leaves(inputs) if isinstance(value, Tensor) and value.requires_grad]


def _both(run: Run, inputs: Inputs, generator: torch.Generator) -> Callable[[], Any]:
    """Return a call of forward and backward, as in training."""
    trainable = trained(inputs)
    if not trainable:
        return lambda: tree_leaves(run(*inputs))
    gradients = random_gradients(tree_leaves(run(*inputs)), generator)
    return lambda: torch.autograd.grad(run(*inputs), trainable, gradients)


def random_gradients(outputs: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return normally distributed gradients; a scalar is a loss, whose gradient is one."""
    return [
        torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
        if out.ndim
        else torch.ones_like(out)
        for out in outputs
    ]


def _how_many(inputs: Inputs, device: torch.device) -> int:
    """Return how many sets of inputs are too large together for the cache."""
    if device.type != "cuda":
        return 2
    size = sum(value.nbytes for value in tree_leaves(inputs) if isinstance(value, Tensor))
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_SETS, -(-CACHES * cache // size)))


def print_op(case: Case, rows: list[OpResult]) -> None:
    """Print the table of one op."""
    table = headed(*COLUMNS, title=f"{case.name}: {case.what}", right=[name for name in COLUMNS if name])
    plain = {row.tokens: row.both for row in rows if row.implementation == PLAIN}
    for row in rows:
        against = plain[row.tokens]
        table.add_row(
            f"{row.tokens:,}",
            row.implementation,
            _shown(row.forward, "{:,.1f}", 1e6),
            _shown(row.both, "{:,.1f}", 1e6),
            _shown(row.share, "{:.0%}"),
            f"{against / row.both:.2f}" if against and row.both else row.error or "",
            _shown(row.peak_memory, "{:,.0f}", 2**-20),
        )
    Console(width=room_for(WIDTH)).print(without_empty(table))


def print_end(ceiling: Ceiling, machine: dict[str, Any]) -> None:
    """Print what the columns mean, and the machine."""
    console = Console(width=room_for(WIDTH), highlight=False)
    console.print(
        "both: forward and backward on the device, inputs not in the cache; share: of the measured copy bandwidth, "
        f"{ceiling.bandwidth / 1e12:.3g} TB/s, or of {ceiling.flops / 1e12:,.3g} TFLOP/s of matrix products "
        f"({ceiling.product}), for what both can't do without; MiB: peak of both beyond inputs and gradients",
        style="dim",
    )
    console.print(", ".join(f"{name} {what}" for name, what in machine.items()), style="dim")


def _shown(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else form.format(value * scale)
