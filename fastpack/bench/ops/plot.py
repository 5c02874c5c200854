"""The picture of ``fastpack bench --ops``: how near to the machine's limit each implementation comes, over T."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastpack.bench.ops.case import LIGER, PLAIN
from fastpack.bench.ops.runner import OpFigures, OpsOutcome
from fastpack.bench.plot import FLOOR, INK, STOCK
from fastpack.bench.plot import LIGER as LIGER_COLOR
from fastpack.bench.plot import OURS as OUR_COLOR

OTHERS = ("#e8890c", "#862e9c", "#0b7285", "#5c940d", "#c2255c")
"""For the second and later ones of ours."""


def save_plot(outcome: OpsOutcome, path: Path) -> None:
    """Draw and save; the kind of file follows from the name (PNG, SVG, PDF)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ops = list(dict.fromkeys(row.op for row in outcome.figures))
    figure = Figure(
        figsize=(14, 1.0 + 2.5 * len(ops)),
        dpi=130,
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"How near to the limit of {outcome.machine['device']}",
        fontsize=14,
        fontweight="bold",
        color=INK,
        x=0.02,
        ha="left",
    )
    grid = figure.subplots(len(ops), 3, squeeze=False, sharex=True, sharey="row")
    for axes, op in zip(grid, ops, strict=True):
        rows = [row for row in outcome.figures if row.op == op]
        for panel, direction in zip(axes, ("forward", "backward", "both"), strict=True):
            _draw(panel, rows, direction)
            panel.set_title(f"{op}, {direction}", fontsize=10, color=INK, loc="left", fontweight="bold")
        of_products = any(row.both and row.both.flops for row in rows)
        axes[0].set_ylabel("of matrix products'\nrate" if of_products else "of copy bandwidth", color=INK)
        axes[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    for panel in grid[-1]:
        panel.set_xlabel("T, tokens", color=INK)
    figure.savefig(path)


def _draw(axes: Any, rows: list[OpFigures], direction: str) -> None:
    top = 1.1
    ours = 0
    for name in dict.fromkeys(row.implementation for row in rows):
        of_us = name not in (PLAIN, LIGER)
        color = STOCK if name == PLAIN else LIGER_COLOR if name == LIGER else OUR_COLOR
        if of_us and ours:
            color = OTHERS[(ours - 1) % len(OTHERS)]
        ours += of_us
        points = [
            (row.tokens, found.share)
            for row in rows
            if row.implementation == name and (found := getattr(row, direction)) is not None
        ]
        if not points:
            continue
        top = max(top, 1.1 * max(share for _, share in points))
        axes.plot(*zip(*points, strict=True), color=color, linewidth=2.2, marker="o", markersize=4, label=name)
    if all(getattr(row, direction) is None for row in rows):
        axes.text(0.5, 0.5, "not timed by itself", transform=axes.transAxes, ha="center", color=INK, fontsize=9)
    axes.axhline(1, color=FLOOR, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, top)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(alpha=0.25)
