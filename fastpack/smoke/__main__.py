"""``python -m fastpack.smoke``: many architectures, each built tiny, verified and trained; a table, an exit code."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fastpack.smoke.most_used import MOST_USED
from fastpack.smoke.train import ROW, Row

MODES = ("plain", "lora", "packed")


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where any row failed."""
    parser = argparse.ArgumentParser(
        prog="gists/smoke.sh", description="Build many architectures tiny, verify them patched, and train three steps."
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: those that people use most")
    parser.add_argument("--all", action="store_true", help="every family of transformers' causal-LM mapping")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--backends", choices=("each", "auto"), default="each", help="every one that can serve, or one")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a family")
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args(arguments)
    found = run(_chosen(given), given.modes, given.backends, jobs=given.jobs, timeout=given.timeout)
    Console(width=124).print(table(found))
    failed = [row for row in found if row.problem is not None]
    for row in failed:
        print(f"{row.family} ({row.mode}, {row.backend or 'no backend'}): {row.problem}", file=sys.stderr)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 1 if failed else 0


def _chosen(given: argparse.Namespace) -> list[str]:
    from fastpack.families import REFUSED
    from fastpack.smoke.special import NOT_BUILT
    from fastpack.smoke.tiny import model_types

    known = [name for name in model_types() if name not in NOT_BUILT and name not in REFUSED]
    if given.families:
        return list(given.families)
    return [name for name in known if given.all or name in MOST_USED]


def run(families: Sequence[str], modes: Sequence[str], backends: str, *, jobs: int, timeout: int) -> list[Row]:
    """The rows of all families, each of which has a process of its own, in order."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("", total=len(families))

        def one(family: str) -> list[Row]:
            progress.update(task, description=family)
            rows = _in_a_process(family, modes, backends, timeout)
            progress.advance(task)
            return rows

        return [row for rows in pool.map(one, families) for row in rows]


def _in_a_process(family: str, modes: Sequence[str], backends: str, timeout: int) -> list[Row]:
    command = [sys.executable, "-m", "fastpack.smoke.train", family, ",".join(modes), backends]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return [Row(family, ", ".join(modes), problem=f"not done after {timeout} s")]
    rows = [Row(**json.loads(line[len(ROW) :])) for line in done.stdout.splitlines() if line.startswith(ROW)]
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no word"]
        rows.append(Row(family, ", ".join(modes), problem=last[0][:300]))
    return rows


def table(rows: Sequence[Row]) -> Table:
    """For people: a line for each family, mode and backend."""
    failed = sum(row.problem is not None for row in rows)
    title = f"{len(rows)} runs of {len({row.family for row in rows})} families, {failed} failed"
    made = Table(title=title, title_justify="left", box=box.ROUNDED)
    for name in ("family", "mode", "rung", "attention", "off by", "losses off by", "x padded", ""):
        made.add_column(name, justify="right" if name in ("off by", "losses off by", "x padded") else "left")
    before = ""
    for row in rows:
        figures = [f"{value:.1e}" if value is not None else "" for value in (row.error, row.loss)]
        speed = f"{row.speed:.1f}" if row.speed is not None else ""
        name = row.family if row.family != before else ""
        made.add_row(name, row.mode, row.rung, row.backend, *figures, speed, "FAILED" if row.problem else "ok",
                     style="bold red" if row.problem else None)  # fmt: skip
        before = row.family
    return made


if __name__ == "__main__":
    sys.exit(main())
