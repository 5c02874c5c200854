"""``PatchReport``: what a patch did to a model, for people and for programs."""

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
    "fast": "fastpack's own forwards: packed attention, the family's norms, gated MLPs",
    "varlen": "packed attention, and norms and MLPs that are known; the rest is the stock model, on real tokens only",
    "re-padded mixer": "what mixes tokens and knows no boundaries runs on one row a sequence; attention is packed, and "
    "the rest runs on real tokens only",
    "re-padded model": "the stock model on rows of equal length: exact, no faster",
}
"""The meaning of each tier, for people."""


@dataclass(frozen=True)
class PatchReport:
    """The account of a patch: what was swapped, which backend serves, and what was left alone.

    Attributes:
        model: class name of the head, or of a bare backbone.
        family: transformers' model_type.
        tier: the lowest that any layer is on (:data:`WORDS` says what each means), or ``stock``
            (not patched).
        layers: names of the modules that mix tokens, by tier.
        unpadded: the share of the backbone's products with weights that runs on real tokens alone, from 0 to 1.
        attention: the backend asked for.
        backend: the one that serves a batch of this model's dtype on its device.
        backends: for each backend, why it can't serve, or None.
        swapped: how many modules of each kind have another forward now.
        projections: how many linear layers of each kind there are.
        as_modules: why projections are called as modules, where their weights can't be read and fused, and how many;
            those that would share a Function with one are called so too.
        matched: classes whose sources were not proved, and whose fast forwards a twin of them matched.
        skipped: what was left alone, and why.
        notes: what a user should know.
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
        """Plain dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
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
            table.add_row("without padding", f"{100 * self.unpadded:.3g}% of the backbone's products with weights")
        if self.backend is not None:
            asked = "" if self.attention == "auto" else " (asked for by name)"
            table.add_row("attention", f"{self.backend}{asked}")
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
    """``self_attn of 4 layers: 3, 7, 11, 15`` for ``layers.3.self_attn`` and the others; a kind a line."""
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
    """The index of the layer, and what of it; None where the name has no index."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    if found is None:
        return None, name
    return int(found[1]), name[found.end() :] or name[: found.start()]


def _ranges(at: Iterable[int]) -> str:
    """``0-2, 4`` for 0, 1, 2 and 4."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(sorted(set(at))), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
