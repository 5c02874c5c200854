"""Run many families, each in its own process with a time limit, so that a hang or a crash fails only its row."""

from __future__ import annotations

import functools
import json
import multiprocessing
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastpack.testing.experts import EXPERTS
from fastpack.testing.record import Row
from fastpack.testing.worker import TRAINED, Task, modes_of, work

IMPORTED = (
    "fastpack.testing.worker",
    "fastpack.patching.verify",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
)
IMPORTED_TO_TRAIN = ("datasets", "peft", "trl.trainer.sft_trainer")


def run(families: Sequence[str], task: Task, *, jobs: int, timeout: float) -> Iterator[list[Row]]:
    """Yield the rows of each family, in order.

    Args:
        families: the families' names.
        task: the work on each family.
        jobs: the number of processes that run at the same time.
        timeout: the seconds for each family.
    """
    context, stopped = _context(task), threading.Event()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        one = functools.partial(_in_a_process, task, context, timeout, Path(folder), stopped)
        try:
            yield from pool.map(one, families)
        except (KeyboardInterrupt, GeneratorExit):  # otherwise the queued families would run first
            pool.shutdown(wait=False, cancel_futures=True)
            stopped.set()
            for process in context.active_children():
                process.kill()
            raise


def _context(task: Task) -> Any:
    """Return the context that starts processes, forked from one that has imported everything (saves nine seconds each).

    On a GPU, processes are spawned instead: libraries talk to the driver while they are imported, and a fork breaks
    that.
    """
    if task.setting.device != "cpu" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *(IMPORTED_TO_TRAIN if {*task.modes} & {EXPERTS, *TRAINED} else ())])
    return context


def _in_a_process(
    task: Task, context: Any, timeout: float, folder: Path, stopped: threading.Event, family: str
) -> list[Row]:
    sent, log = folder / f"{family}.rows", folder / family
    process = context.Process(target=work, args=(family, task, sent, log), daemon=True)
    process.start()
    if stopped.is_set():  # stopped during the start, when it could not be killed yet
        process.kill()
    process.join(timeout)
    late = process.is_alive()
    process.kill()
    process.join()
    lines = sent.read_text().splitlines(keepends=True) if sent.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    rows = [Row(**row) for row in whole if row is not None]
    sent_modes = {row.mode for row in rows}
    missing = [
        mode for mode in modes_of(family, task) if mode not in sent_modes and not any(row.refused for row in rows)
    ]
    if None not in whole:  # exit code 0 is not enough: rows may be missing unless null ends the file
        problem = f"not done after {timeout:g} s" if late else _last_line(log, process.exitcode or 0)
    elif missing:
        problem = "its process ended without these rows"
    else:
        return rows
    modes = missing or [row.mode for row in rows[-1:]] or task.modes  # none is missing of a name without any
    return [*rows, Row(family, ", ".join(modes), problem=problem)]


def _last_line(log: Path, exitcode: int) -> str:
    """Return a process's last line of output, with the signal that ended it or a note on exit code 0."""
    printed = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in printed.splitlines() if line.strip()] or ["no output"]
    if exitcode < 0:
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        return f"ended by signal {-exitcode}: {(fatal or lines)[-1][:300]}"
    if exitcode == 0:
        return f"its process ended with exit code 0 before it had sent all rows: {lines[-1][:300]}"
    return lines[-1][:300]
