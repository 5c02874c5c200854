"""Rich's tables: as plain text, for ``print`` and for messages, and as wide as there is room."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 100
"""Columns, where the terminal has as many, or where there is none."""


def as_text(shown: RenderableType) -> str:
    """Render without colours, and without a line end."""
    from rich.console import Console

    console = Console(width=room_for(WIDTH), color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return capture.get().rstrip("\n")


def counted(number: int, what: str, several: str = "s") -> str:
    """``1 step``, ``2 steps``; with ``es``, ``1 batch``, ``2 batches``."""
    return f"{number:,} {what}{'' if number == 1 else several}"


def headed(*names: str, title: str | None = None, right: Collection[str] = ()) -> Table:
    """Return a table with these columns, of which those named in ``right`` hold numbers; the last one does not wrap."""
    from rich import box
    from rich.table import Column, Table

    columns = [Column(name, justify="right" if name in right else "left") for name in names]
    columns[-1].no_wrap = True  # a verdict is read on a narrow terminal too
    return Table(*columns, title=title, title_justify="left", box=box.ROUNDED)


def room_for(wanted: int) -> int:
    """Return so many columns, or the terminal's where there is one that has fewer (or ``COLUMNS`` says so)."""
    return min(wanted, shutil.get_terminal_size((wanted, 0)).columns)


def without_empty(table: Table) -> Table:
    """The table, whose columns without anything in a cell are taken out."""
    table.columns = [column for column in table.columns if any(column.cells)]
    return table
