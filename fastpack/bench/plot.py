"""Draw the benchmark's picture: each variant's speed and peak memory, and the floor's rate."""

from __future__ import annotations

from pathlib import Path

from fastpack.bench.runner import Outcome
from fastpack.bench.variants import VARIANTS

STOCK, OURS, FLOOR = "#adb5bd", "#d9480f", "#2b8a3e"


def save_plot(outcome: Outcome, path: Path) -> None:
    """Draw the outcome and save it in the format of the path's suffix (PNG, SVG, PDF)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = outcome.ran[::-1]
    figure = Figure(figsize=(11, 2.2 + 0.55 * len(rows)), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(outcome.title, wrap=True)
    names = [row.variant for row in rows]
    colors = [OURS if VARIANTS[name].patched else STOCK for name in names]
    speed, memory = figure.subplots(1, 2, width_ratios=(2.2, 1), sharey=True)
    for axes, values, form, label in (
        (speed, [row.tokens_per_second for row in rows], "{:,.0f}", "real tokens a second"),
        (memory, [row.peak_memory for row in rows], "{:.3g}", "peak memory, GiB"),
    ):
        axes.bar_label(axes.barh(names, values, color=colors), fmt=form, padding=5)
        axes.set_xlim(right=1.2 * max(values))
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    speed.axvline(outcome.floor_rate, color=FLOOR, linestyle="--")  # outside the axes if it is far off
    speed.set_title(f"floor: {outcome.floor_rate:,.0f}", color=FLOOR, loc="right", fontsize="medium")
    figure.savefig(path)
