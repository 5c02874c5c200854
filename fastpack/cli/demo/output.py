"""Show the demo's results: a table for the terminal, and a picture of the loss curves and speeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from fastpack.utils.console import headed


def print_results(results: dict[str, Any]) -> None:
    """Print the costs of both runs, and the difference of their losses."""
    console = Console(highlight=False)
    console.print(_costs(results))
    agree = results["losses_agree"]
    console.print(
        f"The losses {'agree' if agree else 'DISAGREE'}: at most {results['max_relative_difference']:.1e} apart, "
        f"relative ({'<' if agree else '>='} {results['tolerance']:.0e}).",
        style="bold green" if agree else "bold red",
    )
    data, machine = results["data"], results["machine"]
    packages = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "system")
    console.print(
        f"{results['model']['family']}, float32; {data['rows']} rows, batches of {data['batch_size']}; "
        f"{machine['system']}; {packages}"
    )


def _costs(results: dict[str, Any]) -> Table:
    real, slots = results["real_tokens"], results["slots"]
    speeds, memory = results["tokens_per_second"], results["peak_memory_bytes"]
    ways = ("stock, padded", "patched", "ratio")
    table = headed("", *ways, title="The same training", right=ways)
    speed = [f"{speeds[name]:,.0f}" for name in ("stock", "patched")]
    table.add_row("real tokens/s (median step)", *speed, f"{results['speed_ratio']:.2f}x")
    table.add_row("tokens through the layers", f"{slots:,}", f"{real:,}", f"{real / slots:.2f}x")
    table.add_row("padding among these", f"{results['padding_share']:.0%}", "0%", "")
    if memory["stock"] is not None:
        peaks = [f"{memory[name] / 2**30:.2f} GiB" for name in ("stock", "patched")]
        ratio = f"{memory['patched'] / memory['stock']:.2f}x"
        table.add_row(f"peak memory ({results['memory_kind']})", *peaks, ratio)
    return table


def save_plot(results: dict[str, Any], path: Path) -> None:
    """Draw the results and save them in the format of the path's suffix (PNG, SVG, PDF)."""
    grey, orange = "#9aa5b1", "#d9480f"
    figure = Figure(figsize=(9, 4), dpi=160, layout="constrained")
    losses, bars = figure.subplots(1, 2, width_ratios=(2.2, 1))
    figure.suptitle(
        f"{'Same losses' if results['losses_agree'] else 'LOSSES DISAGREE'}, {results['speed_ratio']:.1f}x the speed "
        f"({results['padding_share']:.0%} of the slots were padding)",
        fontweight="bold",
    )
    steps = [row["step"] for row in results["steps"]]
    stock, patched = ([row[f"{name}_loss"] for row in results["steps"]] for name in ("stock", "patched"))
    losses.plot(steps, stock, color=grey, linewidth=6, label="stock, padded")
    losses.plot(steps, patched, color=orange, linewidth=1.8, label="fastpack.patch(model)")
    losses.set(xlabel="step", ylabel="training loss", ylim=(0, None))
    losses.legend(frameon=False, title=f"at most {results['max_relative_difference']:.0e} apart, relative")
    speeds = results["tokens_per_second"]
    speed_bars = bars.bar(["stock,\npadded", "patched"], [speeds["stock"], speeds["patched"]], color=[grey, orange])
    bars.bar_label(speed_bars, fmt="{:,.0f}", padding=3)
    bars.set(ylabel="real tokens a second", ylim=(0, 1.15 * max(speeds.values())))
    figure.savefig(path)
