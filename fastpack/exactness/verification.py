"""The result of :func:`fastpack.verify`, as a table for people and as plain data for programs."""

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

Outcome = Literal["exact", "not exact", "can't tell"]


@dataclass(frozen=True)
class Check:
    """One comparison: its relative error, and the bound.

    Attributes:
        what: What was compared.
        error: The relative error.
        bound: The largest error allowed; for a control, the least error required.
        at_least: True for a control, whose error must reach the bound.
    """

    what: str
    error: float
    bound: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """True if the check passed. NaN never passes, nor does a control with an infinite error: they show nothing."""
        return self.bound <= self.error < math.inf if self.at_least else self.error <= self.bound


@dataclass(frozen=True)
class Verification:
    """The errors of a patched model against each of its sequences alone.

    Example:
        >>> result = fastpack.verify(model)  # doctest: +SKIP
        >>> print(result)  # a table of all checks  # doctest: +SKIP
        >>> result.passed, result.verdict  # doctest: +SKIP
        (True, 'exact')

    Attributes:
        model: The name of the model's class.
        dtype: The dtype that sets the bounds.
        device: The model's device.
        checks: Every comparison with its bound.
    """

    model: str
    dtype: str
    device: str
    checks: tuple[Check, ...]

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype, checks: Sequence[Check]) -> Verification:
        """Return the verification of a model, with the dtype that sets the bounds."""
        device = str(next(model.parameters()).device)
        return cls(type(model).__name__, str(dtype).removeprefix("torch."), device, tuple(checks))

    @property
    def passed(self) -> bool:
        """True if every check passed, so that the verdict is ``exact``."""
        return all(check.passed for check in self.checks)

    @property
    def verdict(self) -> Outcome:
        """``exact``; ``not exact`` if a check failed; ``can't tell`` if only a control failed."""
        if not all(check.passed for check in self.checks if not check.at_least):
            return "not exact"
        return "exact" if self.passed else "can't tell"

    @property
    def nearest(self) -> Check:
        """The check nearest to its bound, or furthest beyond it; controls don't count."""
        return max((check for check in self.checks if not check.at_least), key=lambda check: check.error / check.bound)

    @property
    def problem(self) -> str | None:
        """The verdict and the failed checks, on one line; None if all passed."""
        failed = [f"{c.what} ({c.error:.1e}, bound {c.bound:.1e})" for c in self.checks if not c.passed]
        return f"{self.verdict}: {', '.join(failed)}" if failed else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "passed": self.passed,
            "verdict": self.verdict,
            "checks": [{"what": c.what, "error": c.error, "bound": c.bound, "passed": c.passed} for c in self.checks],
        }

    def __str__(self) -> str:
        """Return the table as text."""
        return as_text(self)

    def __rich__(self) -> RenderableType:
        """Return the table for rich."""
        verdict = _SHOWN[self.verdict]
        title = f"fastpack verify: {self.model}, {self.dtype} on {self.device}: {verdict}"
        table = headed("check", "off by", "bound", "", title=title, right=("off by", "bound"))
        for check in self.checks:
            bound = f"{'>=' if check.at_least else '<='} {check.bound:.1e}"
            table.add_row(check.what, f"{check.error:.1e}", bound, "ok" if check.passed else "FAILED")
        return table


_SHOWN: dict[Outcome, str] = {
    "exact": "[green]exact[/green]",
    "not exact": "[bold red]NOT exact[/bold red]",
    "can't tell": "[bold yellow]can't tell in this dtype[/bold yellow]",
}


class ContaminationError(FastpackError):
    """The error of :func:`fastpack.verify` if a patched model's results differ from each sequence's alone.

    Attributes:
        verification: Every error with its bound.
    """

    def __init__(self, verification: Verification, reason: str | None = None) -> None:
        """Set up the message, with the known reason why the model can't be exact, if any."""
        super().__init__(
            "this patched model is not exact here. fastpack.unpatch(model) restores the stock model. "
            + (f"It can't be exact when patched: {reason}:" if reason else "Please report the family with this table:")
            + f"\n{verification}"
        )
        self.verification = verification


class InconclusiveError(FastpackError):
    """The error of :func:`fastpack.verify` if no check failed, but rounding in this model's dtypes could hide a leak.

    Attributes:
        verification: Every error with its bound.
    """

    def __init__(self, verification: Verification) -> None:
        """Set up the message with the table of checks."""
        super().__init__(
            f"fastpack can't tell whether this model is exact in {verification.dtype}: rounding alone changes "
            "its results so much that a leak could go unseen. Verify it in float32: "
            "fastpack.verify(fastpack.patch(model.float())), on a copy or on fewer layers of it."
            f"\n{verification}"
        )
        self.verification = verification
