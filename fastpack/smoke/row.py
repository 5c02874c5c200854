"""A line of the table: what one family did in one mode, with one attention backend."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """What one family did in one mode, with one attention backend.

    Attributes:
        rung, backend, dtype: of the patched model; empty where it was not patched, or nothing attends.
        error: the worst relative error against each sequence alone of the kinds of input in mode ``exact``; in the
            others that of what :func:`fastpack.verify` compares which comes nearest to its bound.
        bound: what ``error`` may be.
        kinds: in mode ``exact``, the error of each kind of input.
        loss: the largest difference of three losses from those of the stock model on padded batches, relative.
        speed: times the stock model's steps on padded batches, the first one left out.
        refused: why the family, or this precision of it, is not taken; else None.
        left_out: why the mode was not tried, since the stock model itself can't be trained so; else None.
        problem: why the row failed, or None.
    """

    family: str
    mode: str
    rung: str = ""
    backend: str = ""
    dtype: str = ""
    error: float | None = None
    bound: float | None = None
    kinds: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    speed: float | None = None
    refused: str | None = None
    left_out: str | None = None
    problem: str | None = None

    @property
    def verdict(self) -> str:
        """For people."""
        if self.problem is not None:
            return "FAILED"
        if self.left_out is not None:
            return "left out"
        return "exact" if self.refused is None else "refused"
