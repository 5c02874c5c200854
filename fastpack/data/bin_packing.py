"""The three steps of :func:`fastpack.data.token_budget.plan_batches`: fill batches, divide them, deal them to ranks.

1. **Fill** (:func:`filled`). The examples are shuffled, and the first ``look_ahead`` of them wait in a pool, sorted by
   length. A batch takes the one that waits longest; then the longest that fits, while that is more than a quarter of
   the budget (long ones are hard to place); then whoever waits longest, while they fit; then the longest that fits the
   gap that is left, until none does. The pool is filled up again from the shuffled order. Best fit, of longest first:
   D. S. Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms", SIAM J. Comput.
   3 (1974); for sequences M. Krell et al., arXiv:2107.02027. Those sort all examples, which puts the longest into the
   first batches and leaves the last to the short ones. Here most of a batch is a stretch of a random order, and only
   the gap behind it is filled by length, so a batch is a random mixture where examples are short beside the budget.
   Nobody waits longer than ``look_ahead`` batches. O(n log look_ahead) comparisons.
2. **Divide** (:func:`divided`). Ranks need equally many batches, none of them empty. Until their number divides by the
   ranks, and is as large as was asked for, the dearest batch is halved: longest processing time first (R. L. Graham,
   "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969). An epoch has no more
   steps than it needs.
3. **Deal** (:func:`dealt`). Ranks wait for each other, so the batches of one step should cost the same:
   ``a * sum(l) + b * sum(l ** 2)``. Sorted by cost and cut into runs of ``ranks``, the sum over steps of the dearest is
   the least there is for these batches (any swap between two steps can only raise it). The runs are shuffled. Within
   each, the rank with the least so far takes the dearest, Graham's rule again, so that steps add up evenly too.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import chain, count

import torch

from fastpack.errors import PackingError

Batch = list[int]
_POSITION_BITS = 40
_POSITION = (1 << _POSITION_BITS) - 1


@dataclass(frozen=True)
class Job:
    """What is the same for every batch."""

    lengths: list[int]
    max_tokens: int
    ranks: int
    cost: tuple[float, float]

    def price(self, example: int) -> float:
        length = self.lengths[example]
        return self.cost[0] * length + self.cost[1] * length * length

    def total(self, batch: Batch) -> float:
        return math.fsum(map(self.price, batch))


class _Pool:
    """Examples that wait, of which either the one that waits longest is taken or the longest that fits."""

    def __init__(self, order: list[int], lengths: list[int], look_ahead: int) -> None:
        self.order = order
        self.look_ahead = look_ahead
        # One int an example: they sort by length, and tell the position in the order.
        self.keys = [lengths[i] << _POSITION_BITS | position for position, i in enumerate(order)]
        self.taken = bytearray(len(order))
        self.waiting = self.seen = self.oldest = 0
        self.by_length: list[int] = []  # keys, also of some that were taken in turn: those are dropped when met

    def refill(self) -> bool:
        """Look further ahead once half of the pool is gone (sorting costs as much for one as for many); any left?"""
        if self.waiting <= self.look_ahead // 2:
            new = self.keys[self.seen : self.seen + self.look_ahead - self.waiting]
            taken = self.taken
            self.by_length = [key for key in self.by_length if not taken[key & _POSITION]] + new
            self.by_length.sort()
            self.seen += len(new)
            self.waiting += len(new)
        return self.waiting > 0

    def take_in_turn(self, batch: Batch, room: int, most: int) -> int:
        """Whoever waits longest, ``most`` times or until one does not fit; returns the room that is left."""
        while most and self.oldest < self.seen:
            if not self.taken[self.oldest]:
                length = self.keys[self.oldest] >> _POSITION_BITS
                if length > room:
                    break
                self.taken[self.oldest] = 1
                self.waiting -= 1
                batch.append(self.order[self.oldest])
                room -= length
                most -= 1
            self.oldest += 1
        return room

    def take_longest(self, batch: Batch, room: int, least: int) -> int:
        """The longest that fits, again and again, of ``least`` tokens or more; returns the room that is left."""
        while room >= least:
            at = bisect_left(self.by_length, (room + 1) << _POSITION_BITS) - 1
            if at < 0 or self.by_length[at] >> _POSITION_BITS < least:
                break
            key = self.by_length.pop(at)
            position = key & _POSITION
            if not self.taken[position]:
                self.taken[position] = 1
                self.waiting -= 1
                batch.append(self.order[position])
                room -= key >> _POSITION_BITS
        return room


def filled(job: Job, order: list[int], look_ahead: int) -> list[Batch]:
    """Step 1: batches of at most ``max_tokens``, of the examples in a shuffled order."""
    pool = _Pool(order, job.lengths, look_ahead)
    batches: list[Batch] = []
    while pool.refill():
        batch: Batch = []
        room = pool.take_in_turn(batch, job.max_tokens, 1)  # so that nobody waits for ever
        room = pool.take_longest(batch, room, job.max_tokens // 4 + 1)
        room = pool.take_in_turn(batch, room, len(order))
        pool.take_longest(batch, room, 1)
        batches.append(batch)
    return batches


def split(lengths: list[int], max_tokens: int, cost: tuple[float, float], parts: int = 1) -> list[Batch]:
    """Examples that are to be gone through together, in batches of at most ``max_tokens``: at least ``parts`` of them.

    An example that is longer has a batch of its own. The order of examples within a batch is theirs.
    """
    job = Job([min(length, max_tokens) for length in lengths], max_tokens, 1, cost)
    order = list(range(len(lengths)))
    return [sorted(batch) for batch in divided(job, filled(job, order, len(order)), parts)]


def divided(job: Job, batches: list[Batch], micro_batches: int = 1) -> list[Batch]:
    """Step 2: as many batches as divide by the ranks, none empty, and at least ``micro_batches`` for each.

    Raises:
        PackingError: there are fewer examples than such batches.
    """
    examples, made, ranks = len(job.lengths), len(batches), job.ranks
    wanted = max(math.ceil(made / ranks), micro_batches) * ranks
    if examples < wanted:
        raise PackingError(
            f"{examples} examples fill {made} batches of max_tokens={job.max_tokens}, and of {wanted} (so many for "
            f"each of {ranks} ranks) some would be empty. Ask for fewer batches, pass a larger max_tokens, leave "
            f"{examples % ranks} examples out, or start a number of processes that divides {examples}."
        )
    return batches if wanted == made else _halved(job, batches, wanted - made)


def _halved(job: Job, batches: list[Batch], extra: int) -> list[Batch]:
    """``extra`` more batches, by halving whichever is dearest; halves of what fits fit."""
    heap = [(-job.total(batch), at, batch) for at, batch in enumerate(batches)]
    heapq.heapify(heap)
    numbers = count(len(batches))  # of batches that cost the same, the older one first
    found: list[Batch] = []
    while extra:
        _, _, batch = heapq.heappop(heap)
        if len(batch) == 1:
            found.append(batch)
            continue
        extra -= 1
        for half in _halves(job, batch):
            heapq.heappush(heap, (-job.total(half), next(numbers), half))
    return found + [batch for _, _, batch in heap]


def _halves(job: Job, batch: Batch) -> list[Batch]:
    """Longest processing time first: each example, from the longest on, goes to the half that costs less so far."""
    halves: list[Batch] = [[], []]
    costs = [0.0, 0.0]
    for i in sorted(batch, key=lambda i: -job.lengths[i]):
        at = int(costs[1] < costs[0])
        halves[at].append(i)
        costs[at] += job.price(i)
    return halves


def sums(job: Job, batches: list[Batch]) -> tuple[list[int], list[float]]:
    """Tokens and cost of each batch. Sums of ints, so that the cost is the same on every machine, to the last bit."""
    lengths = torch.tensor(job.lengths)[torch.tensor(list(chain.from_iterable(batches)))]
    ends = torch.tensor([len(batch) for batch in batches]).cumsum(0) - 1
    nothing = torch.zeros(1, dtype=torch.long)
    tokens, squares = (x.cumsum(0)[ends].diff(prepend=nothing).tolist() for x in (lengths, lengths * lengths))
    a, b = job.cost
    return tokens, [a * total + b * square for total, square in zip(tokens, squares, strict=True)]


def dealt(costs: list[float], ranks: int, generator: torch.Generator) -> list[list[int]]:
    """Step 3: for each rank the places of its batches in ``costs``, in the order of the steps."""
    dearest_first = sorted(range(len(costs)), key=lambda at: -costs[at])
    spent = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for step in torch.randperm(len(costs) // ranks, generator=generator).tolist():
        poorest_first = sorted(range(ranks), key=lambda rank: spent[rank])
        for rank, at in zip(poorest_first, dearest_first[step * ranks : (step + 1) * ranks], strict=True):
            shares[rank].append(at)
            spent[rank] += costs[at]
    return shares
