"""Rich's tables as plain text, for ``print`` and for messages, no wider than the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 100
"""Width in columns, if the terminal is not narrower."""


def as_text(renderable: RenderableType) -> str:
    """Render as text, without colours and without a line end."""
    from rich.console import Console

    console = Console(width=room_for(WIDTH), color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().rstrip("\n")


def counted(number: int, what: str, several: str = "s") -> str:
    """Return a number with its noun: ``1 step``, ``2 steps``; with ``es``, ``1 batch``, ``2 batches``."""
    return f"{number:,} {what}{'' if number == 1 else several}"


def headed(*names: str, title: str | None = None, right: Collection[str] = ()) -> Table:
    """Return an empty table with these columns; ``right`` names those of numbers, and the last column does not wrap."""
    from rich import box
    from rich.table import Column, Table

    columns = [Column(name, justify="right" if name in right else "left") for name in names]
    columns[-1].no_wrap = True  # so that a verdict can be read on a narrow terminal too
    return Table(*columns, title=title, title_justify="left", box=box.ROUNDED)


def room_for(width: int) -> int:
    """Return a width in columns, or the terminal's width (or that of ``COLUMNS``) if it is smaller."""
    return min(width, shutil.get_terminal_size((width, 0)).columns)


def without_empty(table: Table) -> Table:
    """Remove the columns of a table whose cells are all empty, and return the table."""
    table.columns = [column for column in table.columns if any(column.cells)]
    return table
