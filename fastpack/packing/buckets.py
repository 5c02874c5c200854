"""``Bucket``: the sizes that batches are rounded up to, so that shapes repeat (CUDA graphs, ``torch.compile``).

Bucket padding consists of extra sequences after those of the batch. They fill the bucket up, and no other token sees
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastpack.errors import PackingError

TOKEN_MULTIPLE = 64
TOKEN_STEPS = 16
"""The number of values of T between two powers of two."""
SEQUENCE_MINIMUM = 16
SEQUENCE_STEPS = 4
LENGTH_MINIMUM = 512


@dataclass(frozen=True)
class Bucket:
    """The sizes that a batch is rounded up to.

    Attributes:
        tokens: T. Below 1,024 the values are the multiples of 64. From 1,024 on there are sixteen evenly spaced values
            between two powers of two, and rounding adds at most 6.3 %, and 2.2 % on average if T is spread evenly on a
            logarithmic scale.
        sequences: N, at least 16, with four values between two powers of two. Sequences beyond those of the batch and
            of the bucket padding have no token.
        max_seqlen: the bound on the longest length: a power of two from 512 on, or T if that is less. Kernels size
            their grid by it. Blocks without a token end at once, but not for free: if 15 of 32 sequences are empty,
            FlashAttention-2 takes 12 % longer.
    """

    tokens: int
    sequences: int
    max_seqlen: int

    @classmethod
    def of(cls, lengths: Sequence[int], *, steps: int = TOKEN_STEPS) -> Bucket:
        """Return the smallest bucket that holds sequences of these lengths and the bucket padding to fill it.

        Args:
            lengths: the tokens of each sequence.
            steps: the number of values of T between two powers of two; fewer make coarser buckets.
        """
        total, longest = sum(lengths), max(lengths)
        tokens = _round_up(total, steps, TOKEN_MULTIPLE)
        bound = min(max(LENGTH_MINIMUM, 1 << (longest - 1).bit_length()), tokens)
        pieces = -(-(tokens - total) // bound)
        # always one more, so that batches with and without bucket padding share a bucket
        sequences = max(SEQUENCE_MINIMUM, len(lengths) + max(pieces, 1))
        return cls(tokens, _round_up(sequences, SEQUENCE_STEPS), bound)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Return whether sequences of these lengths and their bucket padding fit."""
        rest = self.tokens - sum(lengths)
        fits = rest >= 0 and max(lengths) <= self.max_seqlen
        return fits and len(lengths) + -(-rest // self.max_seqlen) <= self.sequences

    def padding(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths of the bucket padding: one, or several if one would be longer than the bound.

        Raises:
            PackingError: the lengths don't fit.
        """
        if not self.holds(lengths):
            raise PackingError(
                f"{len(lengths)} sequences of {sum(lengths)} tokens, the longest of {max(lengths)}, don't fit {self}. "
                "Leave the bucket out: by default it is made to hold them."
            )
        whole, part = divmod(self.tokens - sum(lengths), self.max_seqlen)
        return (self.max_seqlen,) * whole + ((part,) if part else ())


def _round_up(value: int, steps: int, multiple: int = 1) -> int:
    """Round up to a multiple of ``multiple``, or to one of ``steps`` evenly spaced values between powers of two."""
    step = max(multiple, 2 ** (value.bit_length() - 1) // steps)
    return -(-value // step) * step
