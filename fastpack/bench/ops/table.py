"""The tables of ``fastpack bench --ops``, one an op."""

from __future__ import annotations

from collections.abc import Collection, Mapping

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


def print_ops(outcome: OpsOutcome, cases: Mapping[str, Case], console: Console | None = None) -> None:
    """All tables, what the columns mean, and which results are not exact enough."""
    console = console or Console(width=room_for(WIDTH))
    shown: set[str] = set()
    for op in dict.fromkeys(row.op for row in outcome.figures):
        rows = [row for row in outcome.figures if row.op == op]
        table = print_fitting(console, _table(cases[op], rows), SPARE)
        shown |= {str(column.header) for column in table.columns}
    console.print(_legend(outcome.ceiling, shown), style="dim", highlight=False)
    inexact = outcome.inexact
    for row in inexact:
        console.print(
            f"NOT EXACT: {row.op}, {row.implementation}, T = {row.tokens - 1}: {row.deviation:.2f} of what is allowed",
            style="bold red",
            highlight=False,
        )
    if not inexact:
        console.print("every result of ours that was compared is exact enough", style="green")
    console.print(", ".join(f"{name} {what}" for name, what in outcome.machine.items()), style="dim", highlight=False)


def _legend(ceiling: Ceiling, shown: Collection[str]) -> str:
    """What the columns mean that are shown."""
    meanings = {
        "forward": "forward, backward: us on the device, inputs not in the cache, the graph retained, so that a loss's "
        "gradients are copied, which in training stay in their place",
        "share": f"share: of the measured copy bandwidth, {ceiling.bandwidth / 1e12:.3g} TB/s, or of "
        f"{ceiling.flops / 1e12:,.3g} TFLOP/s of matrix products ({ceiling.product}), for what the op can't do without",
        "x torch": "x torch: both together",
        "host": "host: us until a forward is launched",
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
                f"{row.forward.host_seconds * 1e6:,.0f}" if row.forward and row.forward.host_seconds else "",
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
    return [f"{found.seconds * 1e6:,.1f}", *shown, _share(found.share)]


def _share(share: float) -> str:
    # a loss that has its gradients from the forward does next to nothing in its backward: that is no rate
    return f"{share:.0%}" if share < 2 else "-"


def _memory(row: OpFigures) -> str:
    if row.peak_memory is None:
        return ""
    shown = f"{row.peak_memory / 2**20:,.0f}"
    return shown if row.avoided is None else f"{shown} ({row.peak_memory / row.avoided:.2g} x)"
