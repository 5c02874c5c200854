"""A block of experts that are spread over ranks: tokens go to the experts, and the sums of their results come back.

Every rank has tokens of its own, and some of the experts. Each token goes to every rank once, not once for each choice:
with K choices and up to K ranks, most have an expert that it chose. There its rows are sorted by expert, and the
weighted results of these experts are added up in float32 and rounded. Where the token is, the ranks' sums are added up
in float32. Many tokens are exchanged in parts, one of them while experts run on another, forward and backward.

Shape suffixes: T tokens of this rank, S of all ranks, K choices of a token, H hidden size; E experts, e of them on each
of G ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from fastpack.ops.autograd import keeps_what_it_saves
from fastpack.ops.exchange import Group, Sums, all_rows, begin_all_rows
from fastpack.ops.experts.experts import Unfinished
from fastpack.ops.linear.operands import Lora
from fastpack.ops.row_count import RowsOfRanks

FEWEST_IN_PARTS = 8192
"""From so many tokens of all ranks on, these are exchanged in parts. Parts are smaller matmuls, and each reads the
weights that are quantised or trained."""
PART = 2**15
"""The number of tokens of all ranks in a part between the first and the last. These have half of it, since nothing runs
beside the exchange of the first part's tokens, and of the last part's results."""
UNCOUNTED = 8
"""The most ranks for which memory is taken as if all choices were of experts here: that many times what is needed, for
one layer at a time."""


class Run(Protocol):
    """A function that runs this rank's experts."""

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor, *, most_rows: int | None) -> Unfinished:
        """Run tokens ``[S, H]`` with choices and weights ``[S, K]``, as :func:`experts` does.

        At most ``most_rows`` choices are of this rank's experts, if it is known; the others are negative, or e or more.
        """


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """The ranks over which the experts of a block are spread, equally many on each, in order.

    Attributes:
        ranks: G.
        rank: this rank's place.
        group: the process group.
        own: e, the number of this rank's experts.
    """

    ranks: int
    rank: int
    group: Group
    own: int

    def lora(self, lora: Lora) -> Lora:
        """Return the part of an update that belongs to this rank's experts; its gradient is zero elsewhere.

        A ``[E r, I]`` holds the experts one after the other; in B ``[O, r E]`` the expert is the fastest index.
        """
        begin, experts = self.rank * self.own, self.ranks * self.own
        a = lora.a.unflatten(0, (experts, -1)).narrow(0, begin, self.own).flatten(0, 1)
        b = lora.b.unflatten(1, (-1, experts)).narrow(2, begin, self.own).flatten(1, 2)
        return Lora(a, b, lora.scale, lora.dropout)


def experts_across_ranks(
    x: Tensor, index: Tensor, weights: Tensor, run: Run, place: ExpertRanks, of_ranks: RowsOfRanks | None = None
) -> Tensor:
    """Run each token through the experts that it chose, wherever they are; every rank calls this at once.

    Where what the experts save is kept for the backward, or ranks are many, the host waits for the device, to know how
    many rows there are. Elsewhere memory is taken as if all choices were of experts here.

    Args:
        x: ``[T, H]``.
        index: int64 or int32 ``[T, K]``, the chosen experts of all E. A choice of E or more, or a negative one, adds
            nothing.
        weights: ``[T, K]`` of any float dtype.
        run: runs this rank's experts.
        place: where the experts are.
        of_ranks: how many tokens each rank has, which the first block asks for, or None for a block that asks for
            itself. The host waits for the answer.

    Returns:
        ``[T, H]`` in x's dtype.
    """
    of_ranks = RowsOfRanks(len(index)) if of_ranks is None else of_ranks
    if of_ranks.answer is None:
        of_ranks.answer = _ask(len(index), x.device, place)
    tokens = of_ranks.answer
    parts, group = _parts(tokens), place.group
    small = [begin_all_rows(y, tokens, group) for y in (weights, index)]
    coming = [
        begin_all_rows(piece, part, group)
        for part, piece in zip(parts, x.split([part[place.rank] for part in parts]), strict=True)
    ]
    all_weights, all_index = (_of_parts(each.wait(), parts) for each in small)
    # All that the backward needs is saved before a block is finished, so that a recomputation ends there. What was read
    # is taken off its list, so that its memory is free for the next part.
    sums = [Sums(part, place.rank, group) for part in parts]
    begun = [
        _begin(run, coming.pop(0).wait(), part_index, part_weights, place).through(each.await_gradient)
        for part_index, part_weights, each in zip(all_index, all_weights, sums, strict=True)
    ]
    back = [each.begin(begun.pop(0).finish()) for each in sums]
    results = [each.wait() for each in back]
    return results[0] if len(results) == 1 else torch.cat(results)


def _begin(run: Run, x: Tensor, index: Tensor, weights: Tensor, place: ExpertRanks) -> Unfinished:
    """Run this rank's experts on what came."""
    local = index - place.rank * place.own
    counts = place.ranks > UNCOUNTED or keeps_what_it_saves()
    most_rows = int(((local >= 0) & (local < place.own)).sum()) if counts else None
    return run(x, local, weights, most_rows=most_rows)


def _of_parts(rows: Tensor, parts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the rows of each part, from those of all tokens, which are in the order of ranks."""
    if len(parts) == 1:
        return [rows]
    pieces = rows.split([count for of_rank in zip(*parts, strict=True) for count in of_rank])
    return [torch.cat(pieces[first :: len(parts)]) for first in range(len(parts))]


def _ask(tokens: int, device: torch.device, place: ExpertRanks) -> tuple[int, ...]:
    """Return how many tokens each rank has."""
    own = torch.full((1,), tokens, device=device)
    return tuple(all_rows(own, [1] * place.ranks, place.group).tolist())


def _parts(tokens: Sequence[int]) -> list[list[int]]:
    """Return the tokens of each rank in each part."""
    total = sum(tokens)
    if total < FEWEST_IN_PARTS:
        return [[*tokens]]
    whole = max(1, total // PART)
    ends = [0, *range(1, 2 * whole, 2), 2 * whole]  # in half parts
    return [[count * b // ends[-1] - count * a // ends[-1] for count in tokens] for a, b in pairwise(ends)]


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.factor, None


def with_mean_gradient(weight: Tensor, ranks: int) -> Tensor:
    """Return a weight whose gradient, which sums up all ranks' losses, is that of their mean."""
    return _Scaled.apply(weight, 1 / ranks) if weight.requires_grad else weight
