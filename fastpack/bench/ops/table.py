"""The tables of ``fastpack bench --ops``, one an op."""

from __future__ import annotations

from rich.console import Console

from fastpack.bench.ops.case import PLAIN, Case
from fastpack.bench.ops.results import OpFigures, OpsOutcome
from fastpack.utils.console import headed, room_for, without_empty

WIDTH = 110
COLUMNS = ("T", "", "forward us", "both us", "share", "x torch", "MiB")


def print_op(case: Case, rows: list[OpFigures]) -> None:
    """Print the table of one op."""
    table = headed(*COLUMNS, title=f"{case.name}: {case.what}", right=[name for name in COLUMNS if name])
    for tokens in dict.fromkeys(row.tokens for row in rows):
        group = [row for row in rows if row.tokens == tokens]
        plain = next((row.both for row in group if row.implementation == PLAIN), None)
        for row in group:
            table.add_row(
                f"{tokens:,}" if row is group[0] else "",
                row.implementation,
                _shown(row.forward, "{:,.1f}", 1e6),
                _shown(row.both, "{:,.1f}", 1e6),
                _shown(row.share, "{:.0%}"),
                f"{plain / row.both:.2f}" if plain and row.both else row.error or "",
                _shown(row.peak_memory, "{:,.0f}", 2**-20),
                end_section=row is group[-1],
            )
    Console(width=room_for(WIDTH)).print(without_empty(table))


def print_end(outcome: OpsOutcome) -> None:
    """Print what the columns mean, and the machine."""
    console, ceiling = Console(width=room_for(WIDTH), highlight=False), outcome.ceiling
    told = (
        "both: forward and backward on the device, inputs not in the cache",
        f"share: of the measured copy bandwidth, {ceiling.bandwidth / 1e12:.3g} TB/s, or of "
        f"{ceiling.flops / 1e12:,.3g} TFLOP/s of matrix products ({ceiling.product}), for what both can't do without",
        "MiB: peak of both beyond inputs and gradients",
    )
    console.print("; ".join(told), style="dim")
    console.print(", ".join(f"{name} {what}" for name, what in outcome.machine.items()), style="dim")


def _shown(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else form.format(value * scale)
