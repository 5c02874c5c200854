"""What :func:`fastpack.verify` found: a table for people, plain data for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastpack.errors import FastpackError
from fastpack.utils.console import as_text, headed

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType
    from torch import nn

Verdict = Literal["exact", "not exact", "can't tell"]


@dataclass(frozen=True)
class Check:
    """One comparison: how far off, relative, and what is allowed.

    ``at_least`` is True for the control, which must be further off than its bound.
    """

    what: str
    error: float
    bound: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """NaN never passes, and no infinite control: passes that are no numbers, or all zeros, show nothing."""
        return self.bound <= self.error < math.inf if self.at_least else self.error <= self.bound


@dataclass(frozen=True)
class Verification:
    """How far a patched model is from each sequence alone, as :func:`verify` or a sweep found it."""

    model: str
    dtype: str
    device: str
    checks: tuple[Check, ...]

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype, checks: Sequence[Check]) -> Verification:
        """Return it for a model, and the dtype that sets the bounds."""
        device = str(next(model.parameters()).device)
        return cls(type(model).__name__, str(dtype).removeprefix("torch."), device, tuple(checks))

    @property
    def passed(self) -> bool:
        """True where every check did: the verdict is ``exact``."""
        return all(check.passed for check in self.checks)

    @property
    def verdict(self) -> Verdict:
        """``exact``; ``not exact`` where something is off; ``can't tell`` where a control is off by too little."""
        if not all(check.passed for check in self.checks if not check.at_least):
            return "not exact"
        return "exact" if self.passed else "can't tell"

    @property
    def nearest(self) -> Check:
        """The check of what must be equal that comes nearest to its bound, or is furthest beyond it."""
        return max((check for check in self.checks if not check.at_least), key=lambda check: check.error / check.bound)

    @property
    def problem(self) -> str | None:
        """The verdict with what failed, on one line; None where nothing did."""
        failed = [f"{c.what} ({c.error:.1e}, bound {c.bound:.1e})" for c in self.checks if not c.passed]
        return f"{self.verdict}: {', '.join(failed)}" if failed else None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "passed": self.passed,
            "verdict": self.verdict,
            "checks": [{"what": c.what, "error": c.error, "bound": c.bound, "passed": c.passed} for c in self.checks],
        }

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        verdict = _SHOWN[self.verdict]
        title = f"fastpack verify: {self.model}, {self.dtype} on {self.device}: {verdict}"
        table = headed("check", "off by", "bound", "", title=title, right=("off by", "bound"))
        for check in self.checks:
            bound = f"{'>=' if check.at_least else '<='} {check.bound:.1e}"
            table.add_row(check.what, f"{check.error:.1e}", bound, "ok" if check.passed else "FAILED")
        return table


_SHOWN: dict[Verdict, str] = {
    "exact": "[green]exact[/green]",
    "not exact": "[bold red]NOT exact[/bold red]",
    "can't tell": "[bold yellow]can't tell in this dtype[/bold yellow]",
}


class ContaminationError(FastpackError):
    """:func:`fastpack.verify` found a patched model that does not give what each sequence gives alone.

    Attributes:
        verification: every figure. What is known to keep a model from being exact is said in its place.
    """

    def __init__(self, verification: Verification, known: str | None = None) -> None:
        super().__init__(
            "this patched model is not exact here. fastpack.unpatch(model) restores the stock model; "
            + (f"it can't be: {known}:" if known else "please report the family with this table:")
            + f"\n{verification}"
        )
        self.verification = verification


class InconclusiveError(FastpackError):
    """:func:`fastpack.verify` found nothing wrong, but rounding would hide a leak in this model's dtypes.

    Attributes:
        verification: every figure.
    """

    def __init__(self, verification: Verification) -> None:
        super().__init__(
            f"nobody can tell whether this model is exact in {verification.dtype}: rounding alone moves it by so much "
            "that a leak would not be seen. Verify it in float32: fastpack.verify(fastpack.patch(model.float())), on a "
            f"copy or on fewer layers of it.\n{verification}"
        )
        self.verification = verification
