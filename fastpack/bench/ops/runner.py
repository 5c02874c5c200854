"""Measure every op over a sweep of T."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from fastpack.bench.ceiling import Ceiling, machine, measure
from fastpack.bench.gate import NOT_COMPARED
from fastpack.bench.lengths import make_lengths
from fastpack.bench.measure import peak_extra_memory, time_calls
from fastpack.bench.ops.case import (
    LIGER,
    LLAMA_8B,
    PLAIN,
    SMALL,
    Case,
    Maker,
    Run,
    Sizes,
    Work,
    bytes_of,
    given_up,
    leaves,
    outputs_of,
)
from fastpack.bench.ops.gate import check, random_gradients
from fastpack.commands import UsageError

if TYPE_CHECKING:
    from fastpack.bench.ops.table import OpTables

SWEEP = {"cuda": [2**n for n in range(8, 16)], "cpu": [64, 256]}
CACHES = 3
"""Inputs in turn hold at least so many times what the cache does."""
MOST_SETS = 128
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Pass:
    """One direction of one implementation at one T; rates follow from the work that the op can't do without."""

    seconds: float
    host_seconds: float | None
    bandwidth: float | None
    flops: float | None
    share: float


@dataclass
class OpFigures:
    """One implementation at one T.

    Attributes:
        forward, backward, both: None where memory did not suffice, which ``error`` then says. Without gradients there
            is no backward, and both is the forward. A loss, whose gradients may be made in its forward, has neither:
            both are timed in one, as ``loss.backward()`` asks for them.
        peak_memory: bytes beyond inputs and gradients, for forward and backward.
        avoided: bytes of what the op is there not to hold, or None.
        deviation: the error, as a share of what is allowed; None where it was not looked at.
    """

    op: str
    implementation: str
    tokens: int
    forward: Pass | None = None
    backward: Pass | None = None
    both: Pass | None = None
    peak_memory: int | None = None
    avoided: int | None = None
    deviation: float | None = None
    error: str | None = None

    @property
    def ours(self) -> bool:
        """Neither plain torch's nor Liger's."""
        return self.implementation not in (PLAIN, LIGER)

    @property
    def exact(self) -> bool:
        """Unless it was found otherwise."""
        return self.deviation is None or self.deviation <= 1


@dataclass
class OpsOutcome:
    """Everything measured."""

    ceiling: Ceiling
    machine: dict[str, Any]
    figures: list[OpFigures] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        """Whether any result was."""
        return any(row.deviation is not None for row in self.figures)

    @property
    def inexact(self) -> list[OpFigures]:
        """Ours that are further off than allowed."""
        return [row for row in self.figures if row.ours and not row.exact]

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        figures = [asdict(row) for row in self.figures]
        return {"machine": self.machine, "ceiling": asdict(self.ceiling), "ops": figures}


def all_cases() -> dict[str, Case]:
    """By name."""
    from fastpack.bench.ops import elementwise_cases, four_bit_cases, lora_cases, product_cases, rope_cases

    modules = (rope_cases, elementwise_cases, four_bit_cases, product_cases, lora_cases)
    return {case.name: case for module in modules for case in module.CASES}


def main(
    names: Sequence[str],
    sweep: Sequence[int] | None,
    *,
    lengths: str | None = None,
    json_path: Path | None = None,
    plot_path: Path | None = None,
) -> int:
    """Measure these ops, or all; 1 where one of ours is not exact enough, :data:`NOT_COMPARED` where none was compared.

    Raises:
        UsageError: there is no op of such a name, there are no such lengths, or nothing that is measured has any.
    """
    from fastpack.bench.ops.table import OpTables

    cases = all_cases()
    for name in names:
        if name not in cases:
            raise UsageError(f"--ops {name!r}: no such op. Choose from: {', '.join(cases)}.")
    if lengths is not None:
        if not any(cases[name].packed for name in names or cases):
            of_packed = ", ".join(name for name, case in cases.items() if case.packed)
            raise UsageError(f"--lengths is for ops over packed sequences, none of which is asked for: {of_packed}.")
        try:
            make_lengths(1, kind=lengths)
        except (OSError, ValueError) as error:
            raise UsageError(f"--lengths {lengths}: {error}") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [cases[name] for name in names or cases]
    tables = OpTables()
    outcome = run_ops(chosen, sweep or SWEEP[device.type], device, tables, lengths or "alpaca")
    tables.print_end(outcome)
    if json_path:
        json_path.write_text(json.dumps(outcome.to_dict(), indent=1))
    if plot_path:
        from fastpack.bench.ops.plot import save_plot

        save_plot(outcome, plot_path)
    if outcome.inexact:
        return 1
    return 0 if outcome.compared else NOT_COMPARED


def run_ops(
    cases: Sequence[Case], sweep: Sequence[int], device: torch.device, tables: OpTables, lengths: str = "alpaca"
) -> OpsOutcome:
    """Each op at each T: the gate, then the clock. Its table is printed when its sweep has ended."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    sizes, dtype = (LLAMA_8B, torch.bfloat16) if device.type == "cuda" else (SMALL, torch.float32)
    columns = (TextColumn("{task.description:<30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcome = OpsOutcome(measure(), machine())
    bars = tables.console.is_terminal  # into a file, they would leave an empty line behind
    with Progress(*columns, console=tables.console, transient=True, disable=not bars) as progress:
        task = progress.add_task("", total=len(cases) * len(sweep))
        for case in cases:
            progress.update(task, description=case.name)
            found: list[OpFigures] = []
            for tokens in sweep:
                found += run_case(case, tokens, sizes, dtype, device, outcome.ceiling, lengths)
                progress.advance(task)
            tables.print_op(case, found)
            outcome.figures += found
    return outcome


def run_case(
    case: Case,
    tokens: int,
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    ceiling: Ceiling,
    lengths: str = "alpaca",
) -> list[OpFigures]:
    """All implementations of one op at one T."""

    def make(count: int) -> Maker:
        return Maker(count, sizes, dtype, torch.Generator(device).manual_seed(0), lengths)

    # an odd number of tokens, which no block size divides; one alone has attention without gradients of q and k
    try:
        deviations = check(case, make(max(2, tokens - 1)))
    except torch.OutOfMemoryError:  # in a wider dtype, or plain torch: what fits is timed all the same
        deviations = {}
    maker = make(tokens)
    work = (case.forward(maker), case.backward(maker))
    inputs = case.inputs(maker)
    found: list[OpFigures] = []
    for name, run in case.runs(inputs).items():
        row = OpFigures(case.name, name, tokens, deviation=deviations.get(name))
        row.avoided = None if case.avoided is None else case.avoided(maker)
        try:
            # a compiled backward would be allowed to overwrite what was saved for it, and so to run but once
            with functorch_config.patch(donated_buffer=False):
                measured = _measure if case.avoided is None else _measure_loss
                measured(row, run, inputs, work, device, ceiling)
        except torch.OutOfMemoryError:
            row.error = OUT_OF_MEMORY
        found.append(row)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _measure(
    row: OpFigures, run: Run, inputs: list[Any], work: tuple[Work, Work], device: torch.device, ceiling: Ceiling
) -> None:
    sets = [leaves(inputs) for _ in range(_how_many(inputs, device))]
    in_place = _works_in_place(run, inputs)

    def forward_call(given: list[Any]) -> Callable[[], Any]:
        # what overwrites its inputs can't be given leaves: it is timed without a graph
        ready = _frozen(given) if in_place else given
        return lambda: run(*ready)

    forward = time_calls([forward_call(given) for given in sets], device)

    def outputs(given: list[Any]) -> tuple[Tensor, ...]:
        return outputs_of(run(*given_up(given) if in_place else given))

    if not _trained(inputs):
        row.peak_memory = peak_extra_memory(lambda: outputs(sets[0]), device)
        row.forward = row.both = _pass(forward.seconds, forward.host_seconds, work[0], ceiling)
        return
    generator = torch.Generator(device).manual_seed(1)
    of_outputs = random_gradients(outputs(sets[0]), generator)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs(sets[0]), _trained(sets[0]), of_outputs)

    row.peak_memory = peak_extra_memory(both, device)

    def backward_call(given: list[Any]) -> Callable[[], Any]:
        made, trained = outputs(given), _trained(given)
        gradients = random_gradients(made, generator)
        return lambda: torch.autograd.grad(made, trained, gradients, retain_graph=True)

    backward = time_calls([backward_call(given) for given in sets], device)
    row.forward = _pass(forward.seconds, forward.host_seconds, work[0], ceiling)
    row.backward = _pass(backward.seconds, backward.host_seconds, work[1], ceiling)
    row.both = _pass(forward.seconds + backward.seconds, None, _sum(work), ceiling)


def _measure_loss(
    row: OpFigures, run: Run, inputs: list[Any], work: tuple[Work, Work], device: torch.device, ceiling: Ceiling
) -> None:
    """Forward and backward in one, as ``loss.backward()`` asks for them."""

    def call(given: list[Any]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(_summed(outputs_of(run(*given))), _trained(given))

    calls = [call(leaves(inputs)) for _ in range(_how_many(inputs, device))]
    timing = time_calls(calls, device)
    row.peak_memory = peak_extra_memory(calls[0], device)
    row.both = _pass(timing.seconds, timing.host_seconds, _sum(work), ceiling)


def _summed(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Scalars, as losses are."""
    return [out if out.ndim == 0 else out.sum() for out in outputs]


def _sum(work: tuple[Work, Work]) -> Work:
    forward, backward = work
    return Work(forward.bytes + backward.bytes, forward.flops + backward.flops)


def _trained(given: list[Any]) -> list[Tensor]:
    return [value for value in given if isinstance(value, Tensor) and value.requires_grad]


def _frozen(given: list[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, Tensor) else value for value in given]


def _works_in_place(run: Run, inputs: list[Any]) -> bool:
    """True where it returns what it is given, written over."""
    ready = _frozen(leaves(inputs))
    given = {value.data_ptr() for value in ready if isinstance(value, Tensor)}
    return any(result.data_ptr() in given for result in outputs_of(run(*ready)))


def _how_many(inputs: list[Any], device: torch.device) -> int:
    """Sets of inputs that together are too large for the cache."""
    if device.type != "cuda":
        return 2
    size = bytes_of(inputs)
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_SETS, -(-CACHES * cache // size)))


def _pass(seconds: float, host_seconds: float | None, work: Work, ceiling: Ceiling) -> Pass:
    if work.flops:
        rate = work.flops / seconds
        return Pass(seconds, host_seconds, None, rate, rate / ceiling.flops)
    rate = work.bytes / seconds
    return Pass(seconds, host_seconds, rate, None, rate / ceiling.bandwidth)
