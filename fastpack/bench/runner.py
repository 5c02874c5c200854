"""Run contestants in turn, each in a process of its own, and put everything found into one record."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastpack.bench.ceiling import CEILING, Ceiling
from fastpack.bench.contestant import FIGURES, STEP
from fastpack.bench.contestants import CONTESTANTS
from fastpack.bench.flops import step_flops
from fastpack.bench.gate import Precision, Verdict, compare
from fastpack.bench.models import LORA_RANK
from fastpack.bench.preference import dpo_step_flops
from fastpack.bench.settings import Figures, Settings
from fastpack.bench.shapes import make_config
from fastpack.errors import FastpackError
from fastpack.text import counted

WITHOUT_SPEED = ("contestant", "backend", "losses", "gradient_norms", "error")
"""What is told of contestants that did not train the same model."""


@dataclass(frozen=True)
class Outcome:
    """One run of the benchmark.

    Attributes:
        floor_rate: real tokens a second if nothing took time but the matrix products, at the measured rate.
        left_out: contestants that could not take part, and why.
    """

    settings: Settings
    figures: list[Figures]
    verdict: Verdict
    ceiling: Ceiling
    floor_rate: float
    machine: dict[str, Any]
    left_out: dict[str, str]

    @property
    def ran(self) -> list[Figures]:
        """Contestants that have figures."""
        return [row for row in self.figures if row.error is None]

    @property
    def best_stock(self) -> Figures | None:
        """The fastest that fastpack had no part in."""
        stock = [row for row in self.ran if not CONTESTANTS[row.contestant].patched]
        return max(stock, key=lambda row: row.tokens_per_second, default=None)

    @property
    def title(self) -> str:
        """What was trained, in one line."""
        given = self.settings
        batch = f"DPO, {counted(given.rows, 'pair')}" if given.trainer == "dpo" else counted(given.rows, "row")
        words = [given.shape, given.mode, batch, f"{given.lengths.split('/')[-1]} lengths"]
        words += ["checkpointing"] if given.checkpointing else []
        words += ["a plain loop"] if given.loop == "plain" else []
        words += ["a trainer that waits"] if given.trainer_waits else []
        words += [f"at most {given.max_length} tokens"] if given.max_length is not None else []
        words += [f"{name} {value}" for name in ("attention", "kernels") if (value := getattr(given, name)) != "auto"]
        words += [
            f"{name} {value}" for name in ("graphs", "loss", "offload") if (value := getattr(given, name)) is not None
        ]
        return ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for a JSON file; of losses that disagree, them alone."""
        rows = [row.to_dict() | (self.compared(row) if row.error is None else {}) for row in self.figures]
        if not self.verdict.agree:
            rows = [{name: row[name] for name in WITHOUT_SPEED} for row in rows]
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "ceiling": asdict(self.ceiling),
            "floor_tokens_per_second": self.floor_rate,
            "verdict": asdict(self.verdict),
            "left_out": self.left_out,
            "contestants": rows,
        }

    def compared(self, row: Figures) -> dict[str, float | None]:
        """A contestant's rate over the floor's, the first one's, and that of the best stock one, if any is stock."""
        rate, stock = row.tokens_per_second, self.best_stock
        return {
            "floor_share": rate / self.floor_rate,
            "times_first": rate / self.ran[0].tokens_per_second,
            "times_best_stock": None if stock is None else rate / stock.tokens_per_second,
        }


def run_all(settings: Settings, contestants: Sequence[str], *, left_out: dict[str, str], on_gpu: bool) -> Outcome:
    """Measure the machine, then each contestant, one process after the other, as long as their losses agree.

    Raises:
        FastpackError: a process failed otherwise than for want of memory; what it said is printed before.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    half = on_gpu or settings.mode == "qlora"  # on a CPU, adapters of 4-bit weights alone are bfloat16
    precision: Precision = "half precision" if half else "full precision"
    figures: list[Figures] = []
    verdict = compare(figures, precision)
    with Progress(*columns, transient=True) as progress:
        bars = progress.console.is_terminal
        task = progress.add_task("this machine", total=1)
        found = json.loads(_run("fastpack.bench.ceiling", [], CEILING, name="measuring this machine"))
        progress.update(task, completed=1)
        for name in contestants:
            task = progress.add_task(name, total=settings.warmup + settings.steps + on_gpu)
            given = json.dumps(asdict(replace(settings, contestant=name)))
            advance = functools.partial(progress.advance, task)
            line = _run("fastpack.bench.contestant", [given], FIGURES, advance, name=name)
            figures.append(Figures(**json.loads(line)))
            verdict = compare(figures, precision)
            if not verdict.agree:
                rest = contestants[len(figures) :]
                left_out = left_out | dict.fromkeys(rest, f"was not run: {verdict.against!r} and {name!r} disagree")
                break
            if not bars:  # a log wants to know how far it is, too
                print(f"{name}: {figures[-1].in_brief}", file=sys.stderr, flush=True)
    ceiling = Ceiling(**found["ceiling"])
    return Outcome(
        settings,
        figures,
        verdict,
        ceiling,
        floor_rate(settings, ceiling),
        found["machine"],
        left_out,
    )


def floor_rate(settings: Settings, ceiling: Ceiling) -> float:
    """Real tokens a second over the timed steps, if their matrix products took all the time."""
    config = make_config(settings.shape)
    batches = settings.timed_batches()
    if settings.trainer == "dpo":
        needed = sum(dpo_step_flops(config, pairs, settings) for pairs in settings.timed_pairs())
        return sum(map(sum, batches)) / (needed / ceiling.flops)
    needed = sum(
        step_flops(config, batch, mode=settings.mode, checkpointing=settings.checkpointing, rank=LORA_RANK).total
        for batch in batches
    )
    return sum(map(sum, batches)) / (needed / ceiling.flops)


def _run(
    module: str, arguments: list[str], prefix: str, on_step: Callable[[], None] | None = None, *, name: str
) -> str:
    """Run a module in a process of its own; the rest of the line that it prints after ``prefix``."""
    found = None
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(prefix):
                    found = line.removeprefix(prefix)
                elif on_step is not None and line.strip() == STEP:
                    on_step()
        if found is None:
            errors.seek(0)
            said = errors.read().strip()
            print(said, file=sys.stderr)
            last = said.splitlines()[-1] if said else "it said nothing"
            raise FastpackError(f"{name} failed (exit {process.returncode}): {last}")
    return found
