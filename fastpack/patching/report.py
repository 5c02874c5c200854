"""The report of a patch, as a table for people and as plain data for programs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fastpack.utils.console import as_text

if TYPE_CHECKING:
    from rich.console import RenderableType


WORDS: dict[str, str] = {
    "fast": "fastpack's own forwards: packed attention and recurrences, the family's norms, gated MLPs",
    "varlen": "packed attention and recurrences, known norms and MLPs; the rest is the stock model, on real tokens "
    "only",
    "re-padded mixer": "token mixers that know no boundaries run on one row per sequence; attention is packed, and "
    "the rest runs on real tokens only",
    "re-padded model": "the stock model on rows of equal length: exact, no faster",
}
"""The meaning of each tier, for people."""


@dataclass(frozen=True)
class PatchReport:
    """The report of a patch: the swapped forwards, the attention backend, and the parts that were left alone.

    Example:
        >>> report = fastpack.report(model)  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        >>> report.to_dict()["tier"]  # doctest: +SKIP
        'fast'

    Attributes:
        model: The class name of the head, or of a bare backbone.
        family: transformers' ``model_type``.
        tier: The lowest tier of any layer (:data:`WORDS` explains each), or ``stock`` for a model that is not patched.
        layers: The names of the modules that mix tokens, by tier.
        unpadded: The share of the backbone's matmuls with weights that runs on real tokens alone, from 0 to 1.
        attention: The requested attention backend.
        backend: The backend that serves a batch of this model's dtype on its device.
        backends: Each backend with the reason why it can't serve, or None.
        swapped: The number of modules with a new forward, by kind.
        projections: The number of linear layers, by kind.
        as_modules: The number of projections that are called as modules, by the reason why their weights can't be read
            and fused. Projections that would share an autograd Function with such a projection count, too.
        matched: Classes with an unproved source, whose fast forward was proved on a tiny twin.
        skipped: Pairs of a part that was left alone, and the reason.
        notes: Sentences that a user should know.
    """

    model: str
    family: str
    tier: str = "stock"
    layers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unpadded: float | None = None
    attention: str = "auto"
    backend: str | None = None
    backends: dict[str, str | None] = field(default_factory=dict)
    swapped: dict[str, int] = field(default_factory=dict)
    projections: dict[str, int] = field(default_factory=dict)
    as_modules: dict[str, int] = field(default_factory=dict)
    matched: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Return the table as text."""
        return as_text(self)

    def __rich__(self) -> RenderableType:
        """Return the table for rich."""
        from rich import box
        from rich.table import Table

        title = f"fastpack: {self.model} ({self.family})"
        table = Table(title=title, title_justify="left", box=box.ROUNDED, show_header=False, min_width=60)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        if self.tier == "stock":
            table.add_row("tier", "stock: not patched")
            return table
        if len(self.layers) == 1:
            table.add_row("tier", f"{self.tier}: {WORDS[self.tier]}")
        for tier, names in self.layers.items() if len(self.layers) > 1 else ():
            table.add_row(tier, describe(names))
        if self.unpadded is not None:
            table.add_row("without padding", f"{100 * self.unpadded:.3g}% of the backbone's matmuls with weights")
        if self.backend is not None:
            by_name = "" if self.attention == "auto" else " (asked for by name)"
            table.add_row("attention", f"{self.backend}{by_name}")
        for kind, count in self.swapped.items():
            table.add_row(f"  {kind}", f"{count} swapped")
        if self.projections:
            table.add_row("projections", ", ".join(f"{count} {kind}" for kind, count in self.projections.items()))
        for why, count in self.as_modules.items():
            table.add_row("  called as modules", f"{count}: {why}")
        if self.matched:
            table.add_row("matched by a twin", ", ".join(self.matched))
        for what, why in self.skipped:
            table.add_row(f"left alone: {what}", why)
        for note in self.notes:
            table.add_row("note", note)
        unusable = {name: why for name, why in self.backends.items() if why is not None}
        for name, why in unusable.items():
            table.add_row(f"not {name}", why, style="dim")
        return table


def describe(names: Sequence[str]) -> str:
    """Return names as text, one line per kind of module.

    Names such as ``layers.3.self_attn`` become ``self_attn of 4 layers: 3, 7, 11, 15``.
    """
    split = [_split(name) for name in names]
    lines = []
    for tail in dict.fromkeys(tail for _, tail in split):
        at = [index for index, other in split if other == tail and index is not None]
        if not at:
            lines.append(tail)
        else:
            lines.append(f"{tail} of {len(at)} layer{'s' if len(at) > 1 else ''}: {_ranges(at)}")
    return "\n".join(lines)


def _split(name: str) -> tuple[int | None, str]:
    """Return the layer's index, or None, and the rest of the name."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    if match is None:
        return None, name
    return int(match[1]), name[match.end() :] or name[: match.start()]


def _ranges(at: Iterable[int]) -> str:
    """Return ``0-2, 4`` for 0, 1, 2 and 4."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(sorted(set(at))), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
