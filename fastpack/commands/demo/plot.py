"""The demo's picture: both loss curves, and the speed of both runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STOCK, PATCHED, INK = "#9aa5b1", "#d9480f", "#212529"


def save_plot(figures: dict[str, Any], path: Path) -> None:
    """Draw the figures and save them; the kind of file follows from the name (PNG, SVG, PDF)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(9, 4), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    losses, speeds = figure.subplots(1, 2, width_ratios=(2.2, 1))
    verdict = "Same losses" if figures["losses_agree"] else "LOSSES DISAGREE"
    share = figures["padding_share"]
    figure.suptitle(
        f"{verdict}, {figures['speed_ratio']:.1f}x the speed ({share:.0%} of the slots were padding)",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    _draw_losses(losses, figures)
    _draw_speeds(speeds, figures)
    for axes in (losses, speeds):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    figure.savefig(path)


def _draw_losses(axes: Any, figures: dict[str, Any]) -> None:
    steps = [row["step"] for row in figures["steps"]]
    axes.plot(steps, [r["stock_loss"] for r in figures["steps"]], color=STOCK, linewidth=6, label="stock, padded")
    axes.plot(
        steps,
        [r["patched_loss"] for r in figures["steps"]],
        color=PATCHED,
        linewidth=1.8,
        label="fastpack.patch(model)",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    difference = figures["max_relative_difference"]
    axes.legend(frameon=False, title=f"at most {difference:.0e} apart, relative", alignment="left")


def _draw_speeds(axes: Any, figures: dict[str, Any]) -> None:
    speeds = figures["tokens_per_second"]
    bars = axes.bar(["stock,\npadded", "patched"], [speeds["stock"], speeds["patched"]], color=[STOCK, PATCHED])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, color=INK, fontweight="bold")
    axes.set_ylabel("real tokens a second")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(top=1.15 * max(speeds.values()))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
