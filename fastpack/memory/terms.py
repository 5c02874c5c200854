"""The parts of the memory that is taken at a moment."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Term:
    """One part of the memory at a moment.

    Attributes:
        name: what it is.
        formula: its bytes, in the letters of this module.
        fixed: the bytes that don't depend on the batch.
        per_token: the bytes of each token.
    """

    name: str
    formula: str
    fixed: float = 0.0
    per_token: float = 0.0

    def of(self, tokens: int) -> float:
        """Return the bytes in a batch of so many tokens."""
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True)
class Moment:
    """A moment of a step, and what is in memory then."""

    name: str
    terms: tuple[Term, ...]

    def of(self, tokens: int) -> float:
        """Return the bytes in a batch of so many tokens."""
        return sum(term.of(tokens) for term in self.terms)


def quantised_bytes(size: int) -> int:
    """Return the bytes of a weight of so many elements in NF4 with double quantisation (arXiv:2305.14314, section 3).

    A block of 64 elements has a scale of 8 bits, and 256 scales have one of 32 bits. bitsandbytes adds the tables of 16
    and 256 values of both codes, and an offset.
    """
    blocks = ceil(size / 64)
    return ceil(size / 2) + blocks + 4 * (ceil(blocks / 256) + 16 + 256 + 1)
