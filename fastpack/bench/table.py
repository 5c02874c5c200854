"""Print the benchmark's table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastpack.bench.runner import Outcome
from fastpack.utils.console import counted, headed, room_for, without_empty

WIDTH = 140
COLUMNS = ("", "attention", "step ms", "real tokens/s", "overall", "x best stock", "floor", "GiB", "held")


def print_outcome(outcome: Outcome, console: Console | None = None) -> None:
    """Print the table and the verdict; if the losses disagree, only the verdict."""
    console = console or Console(width=room_for(WIDTH))
    verdict = outcome.verdict
    if verdict.agree:
        console.print(_speeds(outcome))
        console.print(_legend(outcome), style="dim", highlight=False)
    style = "bold red" if not verdict.agree else "green" if verdict.compared else "bold yellow"
    console.print(str(verdict), style=style, highlight=False)
    for name, reason in outcome.left_out.items():
        console.print(f"left out: {name} ({reason})", style="yellow", highlight=False)
    console.print(", ".join(f"{name} {what}" for name, what in outcome.machine.items()), style="dim", highlight=False)


def _speeds(outcome: Outcome) -> Table:
    table = headed(*COLUMNS, title=outcome.title, right=COLUMNS[2:])
    for row in outcome.results:
        if row.error is not None:
            table.add_row(row.variant, "", "", Text(row.error, style="red"))
            continue
        numbers = outcome.row_dict(row)
        table.add_row(
            row.variant,
            row.backend,
            f"{numbers['step_median'] * 1e3:,.0f}",
            f"{row.tokens_per_second:,.0f}",
            f"{numbers['tokens_per_second_overall']:,.0f}",
            "" if numbers["times_best_stock"] is None else f"{numbers['times_best_stock']:.2f}",
            f"{numbers['floor_share']:.0%}",
            f"{row.peak_memory:.2f}",
            "" if row.held_memory is None else f"{row.held_memory:.1f}",
        )
    return without_empty(table)


def _legend(outcome: Outcome) -> str:
    """Return the meaning of the columns, and the share of padding."""
    ceiling = outcome.ceiling
    padding = max((outcome.row_dict(row)["padding_share"] for row in outcome.ran), default=0)
    return (
        f"real tokens/s: median of {counted(outcome.settings.steps, 'step')}; overall: all steps together; "
        f"floor: share of the {outcome.floor_rate:,.0f} tokens/s that the matmuls alone would allow at "
        f"the measured {ceiling.flops / 1e12:,.3g} TFLOP/s ({ceiling.product}); GiB: peak of tensors, or on a CPU of "
        f"the process; held: reserved by the allocator; at most {padding:.0%} of a variant's slots are padding"
    )
