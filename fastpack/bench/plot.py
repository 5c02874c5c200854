"""The benchmark's picture: speed of each contestant under the floor's rate, and the memory that it took."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from fastpack.bench.contestants import CONTESTANTS
from fastpack.bench.runner import Outcome

STOCK, LIGER, OURS, INK, FLOOR = "#adb5bd", "#74a9cf", "#d9480f", "#212529", "#2b8a3e"


def save_plot(outcome: Outcome, path: Path) -> None:
    """Draw the outcome and save it; the kind of file follows from the name (PNG, SVG, PDF)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = outcome.ran[::-1]
    figure = Figure(
        figsize=(11, 2.2 + 0.55 * len(rows)),
        dpi=160,
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1),
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2, width_ratios=(2.2, 1), sharey=True)
    figure.suptitle(_headline(outcome), fontsize=12, fontweight="bold", color=INK, x=0.02, ha="left")
    names = [row.contestant for row in rows]
    colors = [_color(name) for name in names]

    first = outcome.ran[0].tokens_per_second
    bars = speed.barh(names, [row.tokens_per_second for row in rows], color=colors, height=0.68)
    labels = [f"{row.tokens_per_second:,.0f}   {row.tokens_per_second / first:.2f}x" for row in rows]
    speed.bar_label(bars, labels=labels, padding=5, color=INK, fontweight="bold")
    _draw_floor(speed, outcome.floor_rate, max(row.tokens_per_second for row in rows))
    speed.set_xlabel("real tokens a second")
    speed.xaxis.set_major_formatter("{x:,.0f}")

    bars = memory.barh(names, [row.peak_memory for row in rows], color=colors, height=0.68)
    memory.bar_label(bars, fmt="{:.3g}", padding=5, color=INK, fontweight="bold")
    memory.set_xlim(right=1.2 * max(row.peak_memory for row in rows))
    memory.set_xlabel("peak memory, GiB")
    for axes in (speed, memory):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=INK, length=0)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    figure.supxlabel(_footer(outcome), fontsize=7.5, color="#868e96", x=0.02, ha="left")
    figure.savefig(path)


def _draw_floor(axes: Any, floor: float, longest: float) -> None:
    """A line at the floor's rate; where it is so far off that it would squeeze the bars, an arrow that points there."""
    right = max(1.04 * floor, 1.35 * longest)
    text = f"floor: {floor:,.0f}"
    at = floor
    if floor > 2.2 * longest:
        right = at = 1.4 * longest
        text = f"floor: {floor:,.0f}, {floor / longest:.1f}x the longest bar →"
    else:
        axes.axvline(floor, color=FLOOR, linewidth=2, linestyle=(0, (5, 3)))
    axes.set_xlim(right=right)
    axes.text(
        at,
        1.01,
        text,
        transform=axes.get_xaxis_transform(),
        ha="right",
        va="bottom",
        color=FLOOR,
        fontweight="bold",
    )


def _headline(outcome: Outcome) -> str:
    what = textwrap.fill(outcome.title, 105)
    ours = [row for row in outcome.ran if CONTESTANTS[row.contestant].patched]
    stock = outcome.best_stock
    if not ours or stock is None:
        return what
    best = max(row.tokens_per_second for row in ours)
    return f"{what}\n{best / stock.tokens_per_second:.2f}x the best stock run"


def _footer(outcome: Outcome) -> str:
    names = ("device", "torch", "transformers", "trl", "fastpack")
    where = ", ".join(f"{name} {outcome.machine[name]}" for name in names if name in outcome.machine)
    rate = f"{outcome.ceiling.flops / 1e12:,.3g} TFLOP/s"
    return f"floor: the step's matrix products alone, at the measured {rate}.   {where.removeprefix('device ')}"


def _color(name: str) -> Any:
    contestant = CONTESTANTS[name]
    return OURS if contestant.patched else LIGER if contestant.varlen else STOCK
