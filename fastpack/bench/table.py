"""The benchmark's table."""

from __future__ import annotations

from collections.abc import Collection
from itertools import zip_longest

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastpack.bench.power import Drawn
from fastpack.bench.runner import Outcome
from fastpack.bench.settings import Figures, spread
from fastpack.text import counted, print_fitting, room_for, without_empty

WIDTH, WIDTH_WITH_POWER = 140, 165
COLUMNS = (
    "",
    "attention",
    "step ms",
    "p10-p90",
    "real tokens/s",
    "x first",
    "x best",
    "floor",
    "GiB",
    "held",
    "kernels",
    "busy",
)
POWER_COLUMNS = ("W", "MHz")
SPARE = ("busy", "kernels", "p10-p90", "held", "x first", "attention", "floor")
"""What goes first where a terminal is narrow."""


def print_outcome(outcome: Outcome, console: Console | None = None) -> None:
    """The table and the verdict; where the losses disagree, the losses alone."""
    console = console or Console(width=room_for(width_of(outcome)))
    if outcome.verdict.agree:
        table = print_fitting(console, _speeds(outcome), SPARE)
    else:
        console.print(_losses(outcome))
    verdict = outcome.verdict
    style = "bold red" if not verdict.agree else "green" if verdict.compared else "bold yellow"
    console.print(str(verdict), style=style, highlight=False)
    if outcome.verdict.agree:
        shown = {str(column.header) for column in table.columns}
        console.print(_overall(outcome), style="dim", highlight=False)
        console.print(_legend(outcome, shown), style="dim", highlight=False)
    for row in outcome.ran:
        if row.drawn is not None and row.drawn["unknown"] is not None:
            console.print(f"power of {row.contestant}: {row.drawn['unknown']}", style="yellow", highlight=False)
    for name, reason in outcome.left_out.items():
        console.print(f"left out: {name} ({reason})", style="yellow", highlight=False)
    console.print(", ".join(f"{name} {what}" for name, what in outcome.machine.items()), style="dim", highlight=False)


def width_of(outcome: Outcome) -> int:
    """Columns of a terminal that the table takes."""
    return WIDTH_WITH_POWER if _powered(outcome) else WIDTH


def _on_gpu(outcome: Outcome) -> bool:
    return any(row.held_memory is not None for row in outcome.ran)


def _powered(outcome: Outcome) -> bool:
    return any(map(_power, outcome.ran))


def _speeds(outcome: Outcome) -> Table:
    table = Table(title=outcome.title, box=box.ROUNDED)
    for name in COLUMNS + (POWER_COLUMNS if _powered(outcome) else ()):
        table.add_column(name, justify="left" if name in ("", "attention") else "right", no_wrap=True)
    best = max((row.tokens_per_second for row in outcome.ran), default=0.0)
    before_rate = [""] * (COLUMNS.index("real tokens/s") - 1)
    for row in outcome.figures:
        if row.error is not None:
            table.add_row(row.contestant, *before_rate, Text(row.error, style="red"))
        else:
            table.add_row(*_cells(row, outcome), style="bold" if row.tokens_per_second == best else None)
    return without_empty(table)


def _cells(row: Figures, outcome: Outcome) -> list[str]:
    low, high = spread(row.seconds)
    against = outcome.compared(row)
    best_stock = against["times_best_stock"]
    return [
        row.contestant,
        row.backend,
        f"{row.step_median * 1e3:,.0f}",
        f"{low * 1e3:,.0f}-{high * 1e3:,.0f}",
        f"{row.tokens_per_second:,.0f}",
        f"{against['times_first']:.2f}",
        f"{best_stock:.2f}" if best_stock is not None else "",
        f"{against['floor_share']:.0%}",
        f"{row.peak_memory:.2f}",
        f"{row.held_memory:.1f}" if row.held_memory is not None else "",
        f"{row.kernels:,}" if row.kernels is not None else "",
        f"{row.busy * 1e3:,.0f}" if row.busy is not None else "",
        *([f"{drawn.watts:,.0f}", f"{drawn.mhz:,.0f}"] if (drawn := _power(row)) is not None else []),
    ]


def _power(row: Figures) -> Drawn | None:
    """What it drew, if that is known."""
    return None if row.drawn is None or row.drawn["unknown"] is not None else Drawn(**row.drawn)


def _losses(outcome: Outcome) -> Table:
    from fastpack.bench.loops import GATE_STEPS

    table = Table(title=f"{outcome.title}: loss and norm of the gradients", box=box.ROUNDED)
    table.add_column("")
    shown = min(GATE_STEPS, len(outcome.ran[0].losses))
    for step in range(1, shown + 1):
        table.add_column(f"step {step}", justify="right")
    for row in outcome.ran:
        norms = [f"  {norm:.4f}" for norm in row.gradient_norms[:shown]]
        pairs = zip_longest(row.losses[:shown], norms, fillvalue="")  # a plain loop reads norms of warm-up steps alone
        table.add_row(row.contestant, *(f"{loss:.5f}{norm}" for loss, norm in pairs))
    return table


def _overall(outcome: Outcome) -> str:
    """Rates of whole runs, each with what it is of the best stock one's, where that was compared."""
    stock = outcome.best_stock

    def told(row: Figures) -> str:
        rate = row.tokens_per_second_overall
        times = "" if stock in (None, row) else f" ({rate / stock.tokens_per_second_overall:.2f} x)"
        return f"{row.contestant} {rate:,.0f}{times}"

    return f"real tokens/s over {counted(outcome.settings.steps, 'step')}: " + ", ".join(map(told, outcome.ran))


def _legend(outcome: Outcome, shown: Collection[str]) -> str:
    """What the columns mean that are shown."""
    ceiling, steps = outcome.ceiling, outcome.settings.steps
    meanings = {
        "x first": "x first: times the first row",
        "x best": "x best: times the best stock one",
        "floor": f"floor: share of the {outcome.floor_rate:,.0f} tokens/s that the step's matrix products alone would "
        f"allow at the measured {ceiling.flops / 1e12:,.3g} TFLOP/s ({ceiling.product})",
        "GiB": "GiB in tensors" if _on_gpu(outcome) else "GiB: most that the process had",
        "held": "held by the allocator for them",
        "busy": "busy: ms in which any kernel ran",
    }
    told = [meaning for name, meaning in meanings.items() if name in shown]
    drawn = next(filter(None, map(_power, outcome.ran)), None)
    limits = () if drawn is None else ((drawn.watts_limit, "W"), (drawn.mhz_limit, "MHz"))
    told += [f"{unit}: on average, of {limit:,.0f} at most" for limit, unit in limits if limit is not None]
    padded = next((row for row in outcome.ran if row.padding_share), None)
    told += [f"{padded.padding_share:.0%} of the padded slots are padding"] if padded else []
    told.append(f"medians of {steps} steps" if steps > 1 else "one step")
    return "; ".join([*told, f"copies measured at {ceiling.bandwidth / 1e12:.3g} TB/s"])
