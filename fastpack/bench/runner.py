"""Run variants in turn, each in its own process, and put all results into one record."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from fastpack.bench.ceiling import Ceiling
from fastpack.bench.flops import needed_flops
from fastpack.bench.same_losses import LossAgreement, compare
from fastpack.bench.settings import OUT_OF_MEMORY, RunResult, RunSettings
from fastpack.bench.variants import VARIANTS
from fastpack.errors import FastpackError

WITHOUT_SPEED = ("variant", "backend", "losses", "gradient_norms", "expert_norms", "error")
"""The results that are reported even if variants did not train the same model."""
ALWAYS = ("shape", "mode", "rows", "lengths")
"""The settings that a title always names."""


@dataclass(frozen=True)
class Outcome:
    """One run of the benchmark.

    Attributes:
        floor_rate: real tokens a second if only matmuls took time, at the measured rate.
        left_out: the variants that could not run, and why.
    """

    settings: RunSettings
    results: list[RunResult]
    verdict: LossAgreement
    ceiling: Ceiling
    floor_rate: float
    machine: dict[str, Any]
    left_out: dict[str, str]

    @property
    def ran(self) -> list[RunResult]:
        """Return the variants that have results."""
        return [row for row in self.results if row.error is None]

    @property
    def title(self) -> str:
        """Return the main settings, and all others that differ from their defaults, in one line."""
        default = asdict(RunSettings(""))
        shown = {
            name: value for name, value in asdict(self.settings).items() if value != default[name] or name in ALWAYS
        }
        return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in shown.items())

    def to_dict(self) -> dict[str, Any]:
        """Return everything for a JSON file; if losses disagree, without speeds and memory."""
        rows = [self.row_dict(row) for row in self.results]
        if not self.verdict.agree:
            rows = [{name: row[name] for name in WITHOUT_SPEED} for row in rows]
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "ceiling": asdict(self.ceiling),
            "floor_tokens_per_second": self.floor_rate,
            "verdict": asdict(self.verdict),
            "left_out": self.left_out,
            "variants": rows,
        }

    def row_dict(self, row: RunResult) -> dict[str, Any]:
        """Return a variant's measurements, and rates and shares computed from them."""
        if row.error is not None:
            return asdict(row)
        rate = row.tokens_per_second
        stock = [other.tokens_per_second for other in self.ran if not VARIANTS[other.variant].patched]
        return asdict(row) | {
            "step_median": statistics.median(row.seconds),
            "tokens_per_second": rate,
            "tokens_per_second_overall": sum(row.tokens) / sum(row.seconds),
            "padding_share": 1 - sum(row.tokens) / row.slots,
            "floor_share": rate / self.floor_rate,
            "times_best_stock": rate / max(stock) if stock else None,
        }


def run_all(settings: RunSettings, variants: Sequence[str], *, left_out: dict[str, str], on_gpu: bool) -> Outcome:
    """Measure the machine, then each variant in its own process; stop when losses disagree.

    A variant of another library that fails or disagrees has an error instead of results, and the others go on. It is
    never the one that others are compared with, so the first other variant comes before it.

    Raises:
        FastpackError: a process failed for another reason than a lack of memory; its output is printed first.
    """
    half = on_gpu or settings.mode == "qlora"  # on a CPU, only the adapters of 4-bit weights are bfloat16
    console = Console(stderr=True)
    with console.status("measuring this machine"):
        machine = _run("measuring this machine", "fastpack.bench.ceiling")
    ceiling = Ceiling(**machine["ceiling"])
    results: list[RunResult] = []
    verdict = compare(results, half=half)
    reference = next((name for name in variants if not VARIANTS[name].foreign), None)
    variants = sorted(variants, key=lambda name: name != reference)
    for name in variants:
        with console.status(f"{name}: builds its model and trains {settings.total_steps} steps"):
            row = _result(name, settings)
        verdict = compare([*results, row], half=half)
        if VARIANTS[name].foreign and not verdict.agree:
            row = replace(row, error=f"trains another model: {verdict.off}")
            verdict = compare(results, half=half)
        results.append(row)
        print(f"{name}: {_in_short(row)}", file=sys.stderr, flush=True)
        if not verdict.agree:
            break
    not_run = dict.fromkeys(variants[len(results) :], f"was not run: {verdict.against!r} and {name!r} disagree")
    floor = sum(map(sum, settings.timed_batches())) * ceiling.flops / needed_flops(settings)
    return Outcome(settings, results, verdict, ceiling, floor, machine["machine"], left_out | not_run)


def _result(name: str, settings: RunSettings) -> RunResult:
    """Train a variant in its own process, and return its results."""
    variant = VARIANTS[name]
    try:
        return RunResult(**_run(name, variant.module, json.dumps(asdict(replace(settings, variant=name)))))
    except FastpackError as error:
        if not variant.foreign:
            raise
        return RunResult(name, error=str(error))


def _in_short(row: RunResult) -> str:
    if row.error is None:
        return f"{row.tokens_per_second:,.0f} real tokens/s"
    if row.error != OUT_OF_MEMORY or row.held_memory is None:
        return row.error
    return f"{row.error} ({row.peak_memory:.2f} GiB in tensors, {row.held_memory:.2f} held)"


def _run(name: str, module: str, *arguments: str) -> dict[str, Any]:
    """Run a module in its own process, and return the JSON of the last line that it prints."""
    ended = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        last = (ended.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise FastpackError(f"{name} failed (exit {ended.returncode}): {last}")
    output: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return output
