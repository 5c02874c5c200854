"""Rich's tables as plain text, for ``print`` and for messages."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 100
"""Columns, where the terminal has as many, or where there is none."""


def as_text(shown: RenderableType) -> str:
    """Without colours, and without a line end."""
    from rich.console import Console

    terminal, _ = shutil.get_terminal_size((WIDTH, 0))
    console = Console(width=min(WIDTH, terminal), color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return capture.get().rstrip("\n")
