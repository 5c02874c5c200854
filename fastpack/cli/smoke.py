"""``fastpack smoke``: many architectures, each built tiny, proved and trained; a table, an exit code."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import chain

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fastpack.cli.flags import make_parser
from fastpack.cli.smoke_flags import FLAGS, WHAT, check, choose
from fastpack.testing.processes import run
from fastpack.testing.record import Record
from fastpack.testing.setting import Setting
from fastpack.testing.worker import Task
from fastpack.utils.console import counted, headed, room_for, without_empty


def main(arguments: Sequence[str]) -> int:
    """Return 1 where any row failed.

    Raises:
        UsageError: the flags can't be followed.
    """
    given = make_parser("smoke", WHAT, FLAGS).parse_args(arguments)
    check(given)
    names, absent = choose(given.families, everyone=given.all, tier=given.tier)
    setting = Setting.of_this_machine(given.device, given.dtype)
    start = time.monotonic()
    found = run(names, Task(tuple(given.modes), given.backends, setting), jobs=given.jobs, timeout=given.timeout)
    rows = list(chain.from_iterable(track(found, "", total=len(names), transient=True)))
    record = Record.of_now(setting.named(), time.monotonic() - start, absent, rows)
    console = Console(width=room_for(150))
    console.print(heading(record), highlight=False)
    console.print(without_empty(table(record)))
    for row in rows:
        if row.refused is not None:
            print(f"{row.family}: refused: {row.refused}")
        if row.left_out is not None:
            print(f"{row.family} ({row.mode}): left out: {row.left_out}")
    if absent:
        print(f"not in transformers {record.versions['transformers']}: {', '.join(absent)}")
    failed = [row for row in rows if row.problem is not None]
    for row in failed:
        print(f"{row.family} ({row.mode}, {row.backend or 'no backend'}): {row.problem}", file=sys.stderr)
    if given.json:
        given.json.write_text(json.dumps(record.to_dict(), indent=1))
    return 1 if failed else 0


VERDICTS = ("exact", "refused", "left out", "FAILED")
NUMBERS = ("off by", "allowed", "losses off by", "x padded")


def heading(record: Record) -> str:
    """Counts of the verdicts, and what the run was made with."""
    rows = record.rows
    families = len({row.family for row in rows})
    of = "1 family" if families == 1 else f"{families} families"
    counts = [f"{sum(row.verdict == verdict for row in rows)} {verdict}" for verdict in VERDICTS]
    return f"{counted(len(rows), 'run')} of {of} in {record.seconds:.0f} s: {', '.join(counts)}\n{record.made_with}"


def table(record: Record) -> Table:
    """For people: a line for each family, mode and backend."""
    made = headed("family", "mode", "rung", "attention", "dtype", *NUMBERS, "", right=NUMBERS)
    before = ""
    for row in record.rows:
        figures = [f"{value:.1e}" if value is not None else "" for value in (row.error, row.bound, row.loss)]
        speed = f"{row.speed:.1f}" if row.speed is not None else ""
        name = row.family if row.family != before else ""
        style = {"FAILED": "bold red", "refused": "dim", "left out": "dim"}.get(row.verdict)
        made.add_row(name, row.mode, row.rung, row.backend, row.dtype, *figures, speed, row.verdict, style=style)
        before = row.family
    return made
