"""The demo's figures as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

SHOWN = 10
"""How many steps the table shows, spread evenly; ``--json`` holds them all."""


def print_figures(figures: dict[str, Any]) -> None:
    """Both loss curves side by side, then what it cost."""
    console = Console()
    console.print(_losses(figures["steps"]))
    console.print(_costs(figures))
    verdict = "agree" if figures["losses_agree"] else "DISAGREE"
    sign = "<" if figures["losses_agree"] else ">="
    console.print(
        f"The losses {verdict}: at most {figures['max_relative_difference']:.1e} apart, relative "
        f"({sign} {figures['tolerance']:.0e}).",
        style="bold green" if figures["losses_agree"] else "bold red",
        highlight=False,
    )
    machine, model = figures["machine"], figures["model"]
    packages = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "system")
    console.print(
        f"{model['family']} with {model['parameters'] / 1e6:.1f} M parameters, float32; "
        f"{figures['data']['rows']} rows, batches of {figures['data']['batch_size']}; {machine['system']}; {packages}",
        style="dim",
        highlight=False,
    )


def _losses(steps: list[dict[str, Any]]) -> Table:
    table = Table(title="Loss, step by step", title_justify="left", box=box.ROUNDED)
    for heading in ("step", "stock, padded", "patched", "difference", "real tokens", "padding"):
        table.add_column(heading, justify="right", no_wrap=True)
    last = len(steps) - 1
    for at in sorted({round(n * last / (SHOWN - 1)) for n in range(SHOWN)}):
        row = steps[at]
        table.add_row(
            str(row["step"]),
            f"{row['stock_loss']:.6f}",
            f"{row['patched_loss']:.6f}",
            f"{row['relative_difference']:.1e}",
            f"{row['real_tokens']:,}",
            f"{1 - row['real_tokens'] / row['slots']:.0%}",
        )
    return table


def _costs(figures: dict[str, Any]) -> Table:
    speeds, memory = figures["tokens_per_second"], figures["peak_memory_bytes"]
    table = Table(title="The same training", title_justify="left", box=box.ROUNDED)
    table.add_column("", style="bold")
    for heading in ("stock, padded", "patched", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row(
        "real tokens/s (median step)",
        f"{speeds['stock']:,.0f}",
        f"{speeds['patched']:,.0f}",
        f"[bold]{figures['speed_ratio']:.2f}x[/bold]",
    )
    layers = f"{figures['slots']:,}", f"{figures['real_tokens']:,}"
    table.add_row("tokens through the layers", *layers, f"{figures['real_tokens'] / figures['slots']:.2f}x")
    table.add_row("of these padding", f"{figures['padding_share']:.0%}", "0%", "")
    if memory["stock"] is not None:
        gib = {name: f"{value / 2**30:.2f} GiB" for name, value in memory.items()}
        ratio = f"{memory['patched'] / memory['stock']:.2f}x"
        table.add_row(f"peak memory ({figures['memory_kind']})", gib["stock"], gib["patched"], ratio)
    return table
