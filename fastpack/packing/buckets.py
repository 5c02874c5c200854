"""``Bucket``: sizes that batches are rounded up to, so that shapes repeat (CUDA graphs, ``torch.compile``).

Bucket padding is sequences behind those of the batch that fill a bucket up; nobody sees their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastpack.errors import PackingError

TOKEN_MULTIPLE = 64
TOKEN_STEPS = 16
"""Values of T between two powers of two."""
SEQUENCE_MINIMUM = 16
SEQUENCE_STEPS = 4
LENGTH_MINIMUM = 512


@dataclass(frozen=True)
class Bucket:
    """Sizes that batches share, so that shapes repeat from one to the next.

    Attributes:
        tokens: T. Between two powers of two there are sixteen values, evenly apart, below 1,024 the multiples of 64:
            from there on at most 6.3 % is added, 2.2 % on average over batches whose T is spread evenly on a
            logarithmic scale.
        sequences: N, from 16 on four values between two powers of two; those that are missing have no token.
        max_seqlen: the most that the longest length may be; a power of two from 512 on, or T where that is less.
            Kernels take it for the size of their grid, in which blocks without a token end at once (but take a while:
            15 missing ones of 32 sequences cost FlashAttention-2 12 %).
    """

    tokens: int
    sequences: int
    max_seqlen: int

    @classmethod
    def of(cls, lengths: Sequence[int], *, steps: int = TOKEN_STEPS) -> Bucket:
        """Find the smallest that holds these lengths, and bucket padding to fill it.

        Args:
            lengths: tokens of each sequence.
            steps: values of T between two powers of two, where a coarser one is wanted.
        """
        total, longest = sum(lengths), max(lengths)
        tokens = _round_up(total, steps, TOKEN_MULTIPLE)
        bound = min(max(LENGTH_MINIMUM, 1 << (longest - 1).bit_length()), tokens)
        pieces = -(-(tokens - total) // bound)
        # one more in any case: whether there is bucket padding must not decide between two buckets
        sequences = max(SEQUENCE_MINIMUM, len(lengths) + max(pieces, 1))
        return cls(tokens, _round_up(sequences, SEQUENCE_STEPS), bound)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Return whether these lengths and their bucket padding fit."""
        rest = self.tokens - sum(lengths)
        fits = rest >= 0 and max(lengths) <= self.max_seqlen
        return fits and len(lengths) + -(-rest // self.max_seqlen) <= self.sequences

    def padding(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return lengths of the bucket padding: one, or several where one would be longer than the bound.

        Raises:
            PackingError: the lengths don't fit.
        """
        if not self.holds(lengths):
            raise PackingError(
                f"{len(lengths)} sequences of {sum(lengths)} tokens, the longest of {max(lengths)}, don't fit {self}. "
                "Leave the bucket out to have one made that holds them."
            )
        whole, part = divmod(self.tokens - sum(lengths), self.max_seqlen)
        return (self.max_seqlen,) * whole + ((part,) if part else ())


def _round_up(value: int, steps: int, multiple: int = 1) -> int:
    """Return the next of ``steps`` evenly spaced values between two powers of two, or of the multiples of a number."""
    step = max(multiple, 2 ** (value.bit_length() - 1) // steps)
    return -(-value // step) * step
