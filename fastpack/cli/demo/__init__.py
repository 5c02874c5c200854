"""``fastpack demo``: train a tiny model stock, on padded batches, then patched; needs no network or arguments.

Both runs are ``fastpack sft`` with the same seed, weights and batches, in float32. Each has its own process, so their
peak memory can be compared. The losses must agree.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastpack
from fastpack.cli import PICTURES, UsageError, require_file, require_one_process, require_picture, require_trl_on_cpu
from fastpack.cli.demo.data import make_rows, tiny_llama, train_tokenizer, write_rows
from fastpack.cli.flags import at_least, make_parser
from fastpack.utils.versions import versions_of

TOLERANCE = 1e-4
"""The largest difference of a step's losses, relative to the stock loss."""
WARM_UP = 2
"""Steps of each run that are trained but not timed."""
BATCH_SIZE = 16
TRAINING = {
    "learning_rate": "2e-3",
    "warmup_steps": "2",
    "lr_scheduler_type": "cosine",
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": "True",
    "bf16": "False",
    "gradient_checkpointing": "False",
    "dataloader_pin_memory": "False",
    "log_level": "error",
    "metrics": "False",
}
"""Flags of both runs."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
"""One thread: several threads would wait for each other often, so other work on the machine would slow a run more."""


WHAT = "Train a tiny Llama on made-up instruction data, padded and stock, then patched, and compare."
PICTURE = "fastpack-demo.png"
FLAGS: dict[str, dict[str, Any]] = {
    "--steps": {"type": at_least(WARM_UP + 1), "default": 24, "help": "optimizer steps of each run (default: 24)"},
    "--rows": {"type": at_least(BATCH_SIZE), "default": 384, "help": "rows of the data set (default: 384)"},
    "--seed": {"type": int, "default": 0, "help": "seed of data, weights and order (default: 0)"},
    "--plot": {
        "type": Path,
        "default": Path(PICTURE),
        "help": f"file for the picture ({', '.join(PICTURES)}; default: {PICTURE})",
    },
    "--json": {"type": Path, "help": "file for the same results as JSON"},
}


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return 1 if the losses disagree, else 0."""
    args = make_parser("demo", WHAT, FLAGS).parse_args(arguments)
    require_picture("--plot", args.plot)
    require_file("--json", args.json)
    require_one_process("demo")
    require_trl_on_cpu("demo")
    from fastpack.cli.demo.output import (
        print_results,
        save_plot,
    )  # it imports matplotlib, which the data doesn't need

    results = compare(rows=args.rows, steps=args.steps, seed=args.seed)
    save_plot(results, args.plot)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print_results(results)
    print(f"plot: {args.plot}" + (f"   results: {args.json}" if args.json else ""))
    return 0 if results["losses_agree"] else 1


def compare(*, rows: int, steps: int, seed: int) -> dict[str, Any]:
    """Train stock, then patched, and return the results of both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chats = make_rows(rows, seed)
        tokenizer = train_tokenizer(chats)
        tokenizer.save_pretrained(folder)
        tiny_llama(tokenizer).save_pretrained(folder)
        flags = {
            **TRAINING,
            "random_init": name,
            "dataset_name": str(write_rows(chats, folder)),
            "max_steps": str(steps),
            "per_device_train_batch_size": str(BATCH_SIZE),
            "seed": str(seed),
        }
        stock = _train("stock, padded", folder, {**flags, "patch": "False"})
        patched = _train("patched", folder, flags)
    data = {"rows": rows, "batch_size": BATCH_SIZE, "seed": seed}
    return {"machine": _machine(), "data": data, **_combine(stock, patched)}


def _train(what: str, folder: Path, flags: dict[str, str]) -> dict[str, Any]:
    """Run ``fastpack sft`` with these flags; return the content of its ``--json`` file."""
    print(f"{what}:", file=sys.stderr)
    written = folder / "results.json"
    flags = {**flags, "output_dir": str(folder / "run"), "json": str(written)}
    command = [sys.executable, "-m", "fastpack", "sft", *(f"--{name}={value}" for name, value in flags.items())]
    environment = {**os.environ, **ENVIRONMENT, "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise UsageError(f"the {what} run ended with exit code {done.returncode}, see above")
    results: dict[str, Any] = json.loads(written.read_text())
    return results


def _combine(stock: dict[str, Any], patched: dict[str, Any]) -> dict[str, Any]:
    """Return the results of both runs, step by step and in total."""
    steps = [
        {
            "step": s["step"],
            "stock_loss": s["loss"],
            "patched_loss": p["loss"],
            "relative_difference": abs(p["loss"] - s["loss"]) / abs(s["loss"]),
            "real_tokens": s["real_tokens"],
            "slots": s["slots"],
            "stock_seconds": s["seconds"],
            "patched_seconds": p["seconds"],
        }
        for s, p in zip(stock["steps"], patched["steps"], strict=True)
    ]
    summaries = {"stock": stock["summary"], "patched": patched["summary"]}
    # The median, since other work on the machine makes a few steps slow.
    speeds = {
        name: statistics.median(row["real_tokens"] / row[f"{name}_seconds"] for row in steps[WARM_UP:])
        for name in summaries
    }
    furthest = max(row["relative_difference"] for row in steps)
    return {
        "model": {name: patched["report"][name] for name in ("family", "tier", "backend")},
        "steps": steps,
        "warm_up_steps": WARM_UP,
        **{name: stock["summary"][name] for name in ("real_tokens", "slots", "padding_share", "memory_kind")},
        "tokens_per_second": speeds,
        "speed_ratio": speeds["patched"] / speeds["stock"],
        "peak_memory_bytes": {name: summary["peak_memory_bytes"] for name, summary in summaries.items()},
        "max_relative_difference": furthest,
        "tolerance": TOLERANCE,
        "losses_agree": furthest < TOLERANCE,
    }


def _machine() -> dict[str, str]:
    system = f"{platform.system()} {platform.machine()}, CPU, 1 thread"
    return {"system": system, "fastpack": fastpack.__version__, **versions_of("torch", "transformers", "trl")}
