"""The rows and tables of ``fastpack bench --ops``, a table an op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from fastpack.bench.ceiling import Ceiling
from fastpack.bench.ops.case import PLAIN, Case
from fastpack.utils.console import headed, room_for, without_empty

WIDTH = 110
COLUMNS = ("T", "", "forward us", "both us", "share", "x torch", "MiB")


@dataclass
class OpFigures:
    """The measurements of one implementation at one T.

    Attributes:
        forward, both: seconds of the forward, and of forward and backward (of ops without gradients the forward);
            None where memory did not suffice, which ``error`` then says.
        share: of the machine's limit, for what both can't do without.
        peak_memory: bytes beyond inputs and gradients, for forward and backward; None on a CPU.
    """

    op: str
    implementation: str
    tokens: int
    forward: float | None = None
    both: float | None = None
    share: float | None = None
    peak_memory: int | None = None
    error: str | None = None


def print_op(case: Case, rows: list[OpFigures]) -> None:
    """Print the table of one op."""
    table = headed(*COLUMNS, title=f"{case.name}: {case.what}", right=[name for name in COLUMNS if name])
    plain = {row.tokens: row.both for row in rows if row.implementation == PLAIN}
    for row in rows:
        against = plain[row.tokens]
        table.add_row(
            f"{row.tokens:,}",
            row.implementation,
            _shown(row.forward, "{:,.1f}", 1e6),
            _shown(row.both, "{:,.1f}", 1e6),
            _shown(row.share, "{:.0%}"),
            f"{against / row.both:.2f}" if against and row.both else row.error or "",
            _shown(row.peak_memory, "{:,.0f}", 2**-20),
        )
    Console(width=room_for(WIDTH)).print(without_empty(table))


def print_end(ceiling: Ceiling, machine: dict[str, Any]) -> None:
    """Print what the columns mean, and the machine."""
    console = Console(width=room_for(WIDTH), highlight=False)
    console.print(
        "both: forward and backward on the device, inputs not in the cache; share: of the measured copy bandwidth, "
        f"{ceiling.bandwidth / 1e12:.3g} TB/s, or of {ceiling.flops / 1e12:,.3g} TFLOP/s of matrix products "
        f"({ceiling.product}), for what both can't do without; MiB: peak of both beyond inputs and gradients",
        style="dim",
    )
    console.print(", ".join(f"{name} {what}" for name, what in machine.items()), style="dim")


def _shown(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else form.format(value * scale)
