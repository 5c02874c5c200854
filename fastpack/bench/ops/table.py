"""The tables of ``fastpack bench --ops``, one an op."""

from __future__ import annotations

import functools
from collections.abc import Collection

from rich import box
from rich.console import Console
from rich.table import Table

from fastpack.bench.ceiling import Ceiling
from fastpack.bench.ops.case import PLAIN, Case
from fastpack.bench.ops.runner import OpFigures, OpsOutcome, Pass
from fastpack.text import print_fitting, room_for, without_empty

WIDTH = 132
SPARE = ("host", "GB/s", "TFLOP/s", "error", "MiB", "share")
"""What goes first where a terminal is narrow."""


class OpTables:
    """Prints each op's table as it comes, and at the end what the columns mean.

    Attributes:
        console: where to.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(width=room_for(WIDTH))
        self._shown: set[str] = set()

    def print_op(self, case: Case, rows: list[OpFigures]) -> None:
        """The table of one op."""
        table = print_fitting(self.console, _table(case, rows), SPARE)
        self._shown |= {str(column.header) for column in table.columns}
        self.console.file.flush()

    def print_end(self, outcome: OpsOutcome) -> None:
        """What the columns mean, which results are not exact enough, and the machine."""
        say = functools.partial(self.console.print, highlight=False)
        say(_legend(outcome.ceiling, self._shown), style="dim")
        for row in outcome.inexact:
            what = f"{row.op}, {row.implementation}, T = {row.tokens - 1}: {row.deviation:.2f} of what is allowed"
            say(f"NOT EXACT: {what}", style="bold red")
        if outcome.compared and not outcome.inexact:
            say("every result of ours that was compared is exact enough", style="green")
        blind = [
            f"{row.op}, {row.implementation}, T = {row.tokens - 1}" for row in outcome.figures if row.deviation is None
        ]
        if blind:
            say(f"not compared, for want of memory: {'; '.join(blind)}", style="yellow")
        say(", ".join(f"{name} {what}" for name, what in outcome.machine.items()), style="dim")


def _legend(ceiling: Ceiling, shown: Collection[str]) -> str:
    """What the columns mean that are shown."""
    meanings = {
        "both us": "forward, backward, both: us on the device, inputs not in the cache; of a loss, which may make its "
        "gradients in the forward, both in one",
        "share": f"share: of the measured copy bandwidth, {ceiling.bandwidth / 1e12:.3g} TB/s, or of "
        f"{ceiling.flops / 1e12:,.3g} TFLOP/s of matrix products ({ceiling.product}), for what the op can't do without",
        "x torch": "x torch: both together",
        "host": "host: us until a forward (of a loss both) is launched",
        "MiB": "MiB: peak of forward and backward beyond inputs and gradients (of a loss: in times the logits)",
        "error": "error: of results and gradients, as a share of what is allowed (1.5 times torch's own in half "
        "precision, 1e-5 in float32)",
    }
    return "; ".join(meaning for name, meaning in meanings.items() if name in shown)


def _table(case: Case, rows: list[OpFigures]) -> Table:
    rate = "TFLOP/s" if any(row.both and row.both.flops for row in rows) else "GB/s"
    table = Table(title=f"{case.name}: {case.what}", box=box.HORIZONTALS)
    columns = ["T", "", "forward", "share", "backward", "share", "both us", rate, "share", "x torch", "host"]
    for name in [*columns, "MiB", "error"]:
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for tokens in dict.fromkeys(row.tokens for row in rows):
        group = [row for row in rows if row.tokens == tokens]
        plain = next((row.both.seconds for row in group if row.implementation == PLAIN and row.both), None)
        for i, row in enumerate(group):
            table.add_row(
                f"{tokens:,}" if i == 0 else "",
                row.implementation,
                *(_cells(row.forward)),
                *(_cells(row.backward)),
                *(_cells(row.both, rate=True)),
                f"{plain / row.both.seconds:.2f}" if plain and row.both else row.error or "",
                _host(row.forward or row.both),
                _memory(row),
                f"{row.deviation:.2f}" if row.deviation is not None else "",
                style=None if row.exact else "red",
                end_section=i == len(group) - 1,
            )
    return without_empty(table)


def _cells(found: Pass | None, *, rate: bool = False) -> list[str]:
    """Microseconds, perhaps the rate, and its share of the machine's."""
    if found is None:
        return [""] * (3 if rate else 2)
    reached = found.flops / 1e12 if found.flops is not None else (found.bandwidth or 0.0) / 1e9
    shown = [f"{reached:,.3g}" if reached < 1000 else f"{reached:,.0f}"] if rate else []
    return [f"{found.seconds * 1e6:,.1f}", *shown, f"{found.share:.0%}"]


def _host(found: Pass | None) -> str:
    return f"{found.host_seconds * 1e6:,.0f}" if found is not None and found.host_seconds else ""


def _memory(row: OpFigures) -> str:
    if row.peak_memory is None:
        return ""
    shown = f"{row.peak_memory / 2**20:,.0f}"
    return shown if row.avoided is None else f"{shown} ({row.peak_memory / row.avoided:.2g} x)"
