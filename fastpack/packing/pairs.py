"""The pairs of a query and a key in causal attention, which its work grows with."""

from __future__ import annotations

from collections.abc import Iterable


def count_pairs(lengths: Iterable[int], window: int | None = None) -> int:
    """Count the pairs of a query and a key that it sees.

    Args:
        lengths: the lengths of the sequences.
        window: how many tokens a query sees, itself included; None for all up to itself.

    Example:
        >>> count_pairs([3, 1]), count_pairs([3], window=2)
        (7, 5)
    """
    seen = ((length, min(length, window or length)) for length in lengths)
    return sum(most * (most + 1) // 2 + (length - most) * most for length, most in seen)
