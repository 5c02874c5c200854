"""Shares of a batch's tokens: each rank of a context-parallel group runs modules on its own share.

Shape suffixes: T tokens of the batch, U of these that this rank keeps, G ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastpack.errors import PackingError
from fastpack.ops.exchange import Group, all_rows


@dataclass(frozen=True, eq=False)
class TokenShards:
    """The shares of a batch's tokens that the ranks of a group keep: neighbouring tokens, as many on each rank.

    All ranks have equally much to do, since attention runs on all tokens of a rank's own heads.

    Attributes:
        sizes: the tokens of each rank, G numbers.
        rank: this rank's place in the group.
        group: the process group.
        position_ids: int64 ``[1, U]``, the positions of the kept tokens.
    """

    sizes: tuple[int, ...]
    rank: int
    group: Group
    position_ids: Tensor

    @property
    def ranks(self) -> int:
        """G, the number of ranks."""
        return len(self.sizes)

    @property
    def total_tokens(self) -> int:
        """U, the number of kept tokens."""
        return self.sizes[self.rank]

    @property
    def begin(self) -> int:
        """The index of the first kept token."""
        return sum(self.sizes[: self.rank])

    @property
    def indices(self) -> Tensor:
        """The indices of the kept tokens, int64 ``[U]``."""
        return torch.arange(self.begin, self.begin + self.total_tokens, device=self.position_ids.device)

    def keep(self, x_1T: Tensor) -> Tensor:
        """Return the entries of the kept tokens, ``[1, T, ...]`` to ``[1, U, ...]``."""
        return x_1T.narrow(1, self.begin, self.total_tokens)

    keep_ids = keep  # shared tokens have another one, which compares copies

    def put_together(self, x: Tensor) -> Tensor:
        """Return the entries of all tokens, ``[U, ...]`` to ``[T, ...]``; every rank calls this at once."""
        return all_rows(x, self.sizes, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors of one shape; every rank calls this at once."""
        return all_rows(x[None], [1] * self.ranks, self.group).sum(0)


def share_sizes(tokens: int, ranks: int) -> tuple[int, ...]:
    """Return how many of the tokens each rank keeps: the same, or one more on the first ranks.

    Raises:
        PackingError: there are fewer tokens than ranks.

    Example:
        >>> share_sizes(11, 4)
        (3, 3, 3, 2)
    """
    if tokens < ranks:
        raise PackingError(
            f"a batch of {tokens} tokens can't be spread over the {ranks} ranks of a context-parallel group: each "
            f"needs one. Send longer batches, or use a context_mesh of at most {tokens} ranks."
        )
    return tuple(tokens // ranks + (rank < tokens % ranks) for rank in range(ranks))
