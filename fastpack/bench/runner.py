"""Run contestants in turn, check that their losses agree, print the table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fastpack.bench.contestant import CONTESTANTS, Figures, Settings
from fastpack.bench.shapes import SHAPES
from fastpack.errors import FastpackError

LOSS_BOUND = {"full precision": 1e-4, "half precision": 2e-2}
"""How far losses may be apart, relative, before the figures mean nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fastpack bench``."""
    parser.add_argument("--shape", choices=SHAPES, default=None, help="default: llama8b on a GPU, tiny on a CPU")
    parser.add_argument("--mode", choices=("full", "lora"), default="full")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--lengths", default="alpaca", help="'alpaca', a number of tokens, or a JSON file of lengths")
    parser.add_argument("--max-length", type=int, help="truncate rows to so many tokens")
    parser.add_argument("--loop", choices=("trl", "plain"), default="trl", help="TRL's SFTTrainer, or a plain loop")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--attention", default="auto", help="fastpack's attention backend")
    what = "; ".join(f"{name}: {text}" for name, text in CONTESTANTS.items())
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=None, help=what)
    parser.add_argument("--json", type=Path, help="write the figures here")


def main(arguments: argparse.Namespace) -> int:
    """Run the benchmark; 1 where losses disagree."""
    import torch

    on_gpu = torch.cuda.is_available()
    settings = Settings(
        contestant="",
        shape=arguments.shape or ("llama8b" if on_gpu else "tiny"),
        mode=arguments.mode,
        rows=arguments.rows,
        steps=arguments.steps,
        warmup=arguments.warmup,
        lengths=arguments.lengths,
        checkpointing=arguments.checkpointing,
        attention=arguments.attention,
        loop=arguments.loop,
        max_length=arguments.max_length,
    )
    figures = run_all(settings, arguments.only or list(CONTESTANTS))
    worst = worst_loss_difference(figures)
    bound = LOSS_BOUND["half precision" if on_gpu else "full precision"]
    _print(figures, settings, worst, bound)
    if arguments.json:
        record = {"settings": asdict(settings), "worst_loss_difference": worst, "machine": machine()}
        arguments.json.write_text(json.dumps({**record, "contestants": [asdict(f) for f in figures]}, indent=1))
    return 0 if worst <= bound else 1


def run_all(settings: Settings, contestants: Sequence[str]) -> list[Figures]:
    """Each contestant in a process of its own, one after the other."""
    from rich.progress import Progress

    found: list[Figures] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("contestants", total=len(contestants))
        for name in contestants:
            progress.update(task, description=name)
            found.append(_run_one(replace(settings, contestant=name)))
            progress.advance(task)
    return found


def _run_one(settings: Settings) -> Figures:
    command = [sys.executable, "-m", "fastpack.bench.contestant", json.dumps(asdict(settings))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FIGURES ")), None)
    if line is None:
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise FastpackError(f"contestant {settings.contestant!r} failed (exit {done.returncode}):\n{tail}")
    return Figures(**json.loads(line.removeprefix("FIGURES ")))


def worst_loss_difference(figures: Sequence[Figures]) -> float:
    """The largest relative difference of any contestant's loss from the first's, over all steps."""
    first = figures[0].losses
    return max(
        abs(ours - theirs) / abs(theirs) for other in figures for ours, theirs in zip(other.losses, first, strict=True)
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import platform

    import torch
    import transformers
    import trl

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "python": platform.python_version(),
    }


def _print(figures: Sequence[Figures], settings: Settings, worst: float, bound: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    where = machine()
    title = f"{settings.shape}, {settings.mode}, {settings.rows} rows of {settings.lengths} lengths" + (
        ", checkpointing" if settings.checkpointing else ""
    )
    table = Table(title=title, box=box.ROUNDED)
    columns = ("", "attention", "step (ms)", "real tokens/s", "times", "peak GiB", "share", "padding")
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "attention") else "right")
    base = figures[0]
    for row in figures:
        table.add_row(
            row.contestant,
            row.backend,
            f"{row.step_median * 1e3:,.0f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_second / base.tokens_per_second:.2f} x",
            f"{row.peak_memory:.2f}",
            f"{row.peak_memory / base.peak_memory:.1%}",
            f"{1 - row.tokens / row.slots:.0%}",
        )
    console = Console(width=110)
    console.print(table)
    verdict = "agree" if worst <= bound else "DISAGREE"
    console.print(f"losses {verdict}: at most {worst:.1e} apart, relative, over all steps (bound {bound:g})")
    console.print(", ".join(f"{key} {value}" for key, value in where.items()), style="dim")
