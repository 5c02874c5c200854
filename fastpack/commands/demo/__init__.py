"""``fastpack demo``: a tiny model trained padded and stock, and patched, in one run; no network, no arguments.

Same seed, same weights, same batches, float32, TRL's SFTTrainer. The losses must agree; the speed may not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastpack.commands import (
    PICTURES,
    UsageError,
    quiet,
    require,
    require_file,
    require_one_process,
    require_picture,
    require_trl_on_cpu,
)

TOLERANCE = 1e-4
"""How far apart the losses of a step may be, relative to the stock one."""
WARM_UP = 2
"""Steps of each run that are trained but not timed."""
BATCH_SIZE = 16
THREADS = 1
"""Threads wait for each other many times a step; with one, whatever else the machine does costs its share, no more."""


def main(arguments: Sequence[str]) -> int:
    """Run the demo; the exit code is 1 where the losses disagree."""
    given = _parse(arguments)
    require_one_process("demo")
    require("demo", "trl", "datasets")
    require("demo", "matplotlib")
    require_trl_on_cpu("demo")
    from fastpack.commands.demo.plot import save_plot
    from fastpack.commands.demo.tables import print_figures

    figures = compare(rows=given.rows, steps=given.steps, seed=given.seed)
    save_plot(figures, Path(given.plot))
    if given.json is not None:
        Path(given.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print_figures(figures)
    print(f"plot: {given.plot}" + (f"   figures: {given.json}" if given.json else ""))
    return 0 if figures["losses_agree"] else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fastpack demo",
        description="Train a tiny Llama on made-up instruction data, padded and stock, then patched, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of each run")
    parser.add_argument("--rows", type=int, default=384, help="rows of the data set")
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and order")
    parser.add_argument("--plot", default="fastpack-demo.png", help=f"where the picture goes ({', '.join(PICTURES)})")
    parser.add_argument("--json", help="where the same figures go, for programs")
    given = parser.parse_args(arguments)
    if given.steps <= WARM_UP:
        raise UsageError(f"--steps must be more than {WARM_UP}, which warm up; got {given.steps}")
    if given.rows < BATCH_SIZE:
        raise UsageError(f"--rows must be at least {BATCH_SIZE}, a batch; got {given.rows}")
    require_picture("--plot", given.plot)
    require_file("--json", given.json)
    return given


def compare(*, rows: int, steps: int, seed: int) -> dict[str, Any]:
    """Train both ways, a step of one and a step of the other in turn, and return the figures."""
    quiet()
    import transformers
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from fastpack.commands.demo.data import make_rows, tiny_llama, train_tokenizer, write_rows
    from fastpack.commands.demo.worker import Settings, runs

    transformers.logging.set_verbosity_error()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chats = make_rows(rows, seed)
        tokenizer = train_tokenizer(chats)
        write_rows(chats, folder)
        tokenizer.save_pretrained(folder)
        tiny_llama(tokenizer).save_pretrained(folder)
        settings = Settings(folder, steps, BATCH_SIZE, seed, THREADS)
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        with bar:
            task = bar.add_task("starting a stock and a patched run", total=steps)
            with runs(settings) as (stock, patched):
                told: dict[Any, Any] = {}
                for step in range(steps):
                    for run in (stock, patched) if step % 2 == 0 else (patched, stock):
                        told[run] = run.step()
                    description = f"step {step + 1}"
                    if step + 1 < steps:
                        description = f"loss {told[stock].loss:.3f} stock, {told[patched].loss:.3f} patched"
                    bar.update(task, advance=1, description=description)
        results = {"stock": told[stock], "patched": told[patched]}
    return _figures(results, settings, rows)


def _figures(results: dict[str, Any], settings: Any, rows: int) -> dict[str, Any]:
    stock, patched = results["stock"]["records"], results["patched"]["records"]
    if [(r.real_tokens, r.slots) for r in stock] != [(r.real_tokens, r.slots) for r in patched]:
        raise UsageError("the two runs were not given the same batches: nothing to compare")
    differences = [abs(p.loss - s.loss) / abs(s.loss) for s, p in zip(stock, patched, strict=True)]
    real, slots = sum(r.real_tokens for r in stock), sum(r.slots for r in stock)
    speeds = {name: _speed(result["records"]) for name, result in results.items()}
    return {
        "machine": _machine(settings.threads),
        "model": {
            "family": results["patched"]["report"]["family"],
            "rung": results["patched"]["report"]["rung"],
            "backend": results["patched"]["report"]["backend"],
            "parameters": results["patched"]["parameters"],
        },
        "data": {"rows": rows, "batch_size": settings.batch_size, "seed": settings.seed},
        "steps": [
            {
                "step": s.step,
                "stock_loss": s.loss,
                "patched_loss": p.loss,
                "relative_difference": difference,
                "real_tokens": s.real_tokens,
                "slots": s.slots,
                "stock_seconds": s.seconds,
                "patched_seconds": p.seconds,
            }
            for s, p, difference in zip(stock, patched, differences, strict=True)
        ],
        "warm_up_steps": WARM_UP,
        "real_tokens": real,
        "slots": slots,
        "padding_share": 1 - real / slots,
        "tokens_per_second": speeds,
        "speed_ratio": speeds["patched"] / speeds["stock"],
        "peak_memory_bytes": {name: result["peak_memory_bytes"] for name, result in results.items()},
        "memory_kind": results["stock"]["memory_kind"],
        "max_relative_difference": max(differences),
        "tolerance": TOLERANCE,
        "losses_agree": max(differences) < TOLERANCE,
    }


def _speed(records: Sequence[Any]) -> float:
    # Of the median step: when something else takes the processor for a while, both runs are slow for a few steps.
    return statistics.median(r.real_tokens / r.seconds for r in records[WARM_UP:])


def _machine(threads: int) -> dict[str, str]:
    import platform
    from importlib.metadata import version

    import fastpack

    packages = {"fastpack": fastpack.__version__} | {name: version(name) for name in ("torch", "transformers", "trl")}
    system = f"{platform.system()} {platform.machine()}, CPU, {threads} thread{'s' if threads > 1 else ''}"
    return {"system": system, "python": platform.python_version(), **packages}
