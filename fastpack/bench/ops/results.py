"""What a run of the op benchmark measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from fastpack.bench.ceiling import Ceiling


@dataclass
class OpFigures:
    """One implementation at one T.

    Attributes:
        forward, both: seconds of the forward, and of forward and backward (of ops without gradients the forward);
            None where memory did not suffice, which ``error`` then says.
        share: of the machine's limit, for what both can't do without.
        peak_memory: bytes beyond inputs and gradients, for forward and backward; None on a CPU.
    """

    op: str
    implementation: str
    tokens: int
    forward: float | None = None
    both: float | None = None
    share: float | None = None
    peak_memory: int | None = None
    error: str | None = None


@dataclass
class OpsOutcome:
    """Everything measured."""

    ceiling: Ceiling
    machine: dict[str, Any]
    figures: list[OpFigures] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        figures = [asdict(row) for row in self.figures]
        return {"machine": self.machine, "ceiling": asdict(self.ceiling), "ops": figures}
