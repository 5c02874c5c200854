"""``verify``: proof, on a user's own model, that sequences don't see each other and that nothing else has changed.

The oracle is the stock model on each sequence alone. Logits are compared, and the gradient of every token's embedding,
in which whatever happens in the backward pass of any layer shows; the weights are only read. The same check on the
tokens taken for one long sequence must fail: if it does not, the check could not have seen a leak.

Shape suffixes: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastpack.errors import ContaminationError
from fastpack.patching import is_patched, patch_options, patched_with, unpatch
from fastpack.targets import find_parts

if TYPE_CHECKING:
    from rich.console import RenderableType

LENGTHS = (17, 1, 30, 8, 23)
BOUND = {torch.float64: 1e-8, torch.float32: 1e-4}
HALF_BOUND = 5e-2
"""Of the largest value of each kind: in half precision rounding alone is 1e-2 after thirty layers."""
CONTROL = 5.0
"""How many times the bound the control must be off."""


@dataclass(frozen=True)
class Check:
    """One comparison: the largest difference, as a share of the largest value, and what is allowed.

    ``at_least`` is True for the control, which must be further off than its bound.
    """

    what: str
    error: float
    bound: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.error >= self.bound if self.at_least else self.error <= self.bound


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found."""

    model: str
    dtype: str
    device: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True where every check did."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        found = [{"what": c.what, "error": c.error, "bound": c.bound, "passed": c.passed} for c in self.checks]
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "passed": self.passed,
            "checks": found,
        }

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")

    def __rich__(self) -> RenderableType:
        from rich import box
        from rich.table import Table

        verdict = "[green]exact[/green]" if self.passed else "[bold red]NOT exact[/bold red]"
        title = f"fastpack verify: {self.model}, {self.dtype} on {self.device}: {verdict}"
        table = Table(title=title, title_justify="left", box=box.ROUNDED)
        for name in ("check", "off by", "bound", ""):
            table.add_column(name, justify="left" if name in ("check", "") else "right")
        for check in self.checks:
            bound = f"{'>=' if check.at_least else '<='} {check.bound:.0e}"
            table.add_row(check.what, f"{check.error:.1e}", bound, "ok" if check.passed else "FAILED")
        return table
