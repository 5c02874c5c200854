"""The three steps of :func:`fastpack.data.token_budget.plan_batches`: fill batches, divide them, deal them to ranks.

1. **Fill** (:func:`fill_batches`). The examples are shuffled. The first ``look_ahead`` of them wait in a pool, sorted
   by length. A batch takes, in this order: the example that waits longest; the longest examples that fit and have more
   than a quarter of the budget (long examples are hard to place); the examples that wait longest, as long as they fit;
   and the longest examples that fit the gap, until none does. Then the pool is refilled from the shuffled order. This
   is best fit decreasing: D. S. Johnson et al., "Worst-case performance bounds for simple one-dimensional packing
   algorithms", SIAM J. Comput. 3 (1974); for sequences M. Krell et al., arXiv:2107.02027. Those methods sort all
   examples, so the first batches get the long ones and the last batches the short ones. Here most of a batch follows a
   random order, and only the gap is filled by length. No example waits longer than ``look_ahead`` batches. For n
   examples this takes O(n log look_ahead) comparisons.
2. **Divide** (:func:`divide_batches`). All ranks need the same number of batches, and no batch may be empty. The batch
   with the highest cost is halved until the number of batches divides by the ranks and is as large as requested:
   longest processing time first (R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17,
   1969).
3. **Deal** (:func:`deal_batches`). Ranks wait for each other, so the batches of one step should cost the same:
   ``a * sum(l) + b * sum(l ** 2)``. Batches are sorted by cost and cut into runs of ``ranks``, one run a step. This
   makes the sum over steps of the highest cost minimal (a swap between two steps can only raise it). The runs are
   shuffled. Within each, the rank with the least cost so far takes the most expensive batch (Graham's rule), so that
   the ranks' totals are even too.
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
    """The examples to plan, and the settings of the plan.

    Attributes:
        lengths: the tokens of each example.
        max_tokens: the budget of a batch.
        ranks: the number of processes.
        cost: ``(a, b)`` of ``a * l + b * l ** 2``.
    """

    lengths: list[int]
    max_tokens: int
    ranks: int
    cost: tuple[float, float]

    def price(self, example: int) -> float:
        """Return the cost of an example."""
        length = self.lengths[example]
        return self.cost[0] * length + self.cost[1] * length * length

    def total(self, batch: Batch) -> float:
        """Return the cost of a batch."""
        return math.fsum(map(self.price, batch))


class _Pool:
    """The examples that wait for a batch. The one that waits longest is taken, or the longest that fits."""

    def __init__(self, order: list[int], lengths: list[int], look_ahead: int) -> None:
        """Set up with an order of examples, none of which is taken."""
        self.order = order
        self.look_ahead = look_ahead
        # one int for each example, which sorts by length and holds the position in the order
        self.keys = [lengths[i] << _POSITION_BITS | position for position, i in enumerate(order)]
        self.taken = bytearray(len(order))
        self.waiting = self.added = self.oldest = 0
        self.by_length: list[int] = []  # keys; those of taken examples are dropped when met

    def refill(self) -> bool:
        """Add examples once half of the pool is gone, and return whether any example is left.

        Sorting costs as much for one new example as for many.
        """
        if self.waiting <= self.look_ahead // 2:
            new = self.keys[self.added : self.added + self.look_ahead - self.waiting]
            taken = self.taken
            self.by_length = [key for key in self.by_length if not taken[key & _POSITION]] + new
            self.by_length.sort()
            self.added += len(new)
            self.waiting += len(new)
        return self.waiting > 0

    def take_in_turn(self, batch: Batch, room: int, most: int) -> int:
        """Take the example that waits longest, up to ``most`` times while it fits, and return the room that is left."""
        while most and self.oldest < self.added:
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
        """Take the longest example that fits and has ``least`` tokens, repeatedly, and return the room that is left."""
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


def fill_batches(job: Job, order: list[int], look_ahead: int) -> list[Batch]:
    """Fill batches of at most ``max_tokens`` from examples in a shuffled order (step 1)."""
    pool = _Pool(order, job.lengths, look_ahead)
    batches: list[Batch] = []
    while pool.refill():
        batch: Batch = []
        room = pool.take_in_turn(batch, job.max_tokens, 1)  # so that no example waits for ever
        room = pool.take_longest(batch, room, job.max_tokens // 4 + 1)
        room = pool.take_in_turn(batch, room, len(order))
        pool.take_longest(batch, room, 1)
        batches.append(batch)
    return batches


def split(lengths: list[int], max_tokens: int, cost: tuple[float, float], parts: int = 1) -> list[Batch]:
    """Split the examples of one step into at least ``parts`` batches of at most ``max_tokens``.

    A longer example gets a batch of its own. Examples keep their order within a batch.
    """
    job = Job([min(length, max_tokens) for length in lengths], max_tokens, 1, cost)
    order = list(range(len(lengths)))
    return [sorted(batch) for batch in divide_batches(job, fill_batches(job, order, len(order)), parts)]


def divide_batches(job: Job, batches: list[Batch], micro_batches: int = 1) -> list[Batch]:
    """Divide batches until their number divides by the ranks, and each rank has ``micro_batches`` (step 2).

    Raises:
        PackingError: there are fewer examples than batches.
    """
    examples, number, ranks = len(job.lengths), len(batches), job.ranks
    target = max(math.ceil(number / ranks), micro_batches) * ranks
    if examples < target:
        raise PackingError(
            f"{examples} examples fill {number} batches of max_tokens={job.max_tokens}, but {ranks} ranks need "
            f"{target} batches, and some would be empty. Ask for fewer batches, pass a larger max_tokens, leave "
            f"{examples % ranks} examples out, or start a number of processes that divides {examples}."
        )
    return batches if target == number else _halve(job, batches, target - number)


def _halve(job: Job, batches: list[Batch], extra: int) -> list[Batch]:
    """Make ``extra`` more batches by halving the most expensive ones."""
    heap = [(-job.total(batch), at, batch) for at, batch in enumerate(batches)]
    heapq.heapify(heap)
    numbers = count(len(batches))  # the older of two batches of equal cost comes first
    indivisible: list[Batch] = []
    while extra:
        _, _, batch = heapq.heappop(heap)
        if len(batch) == 1:
            indivisible.append(batch)
            continue
        extra -= 1
        for half in _halves(job, batch):
            heapq.heappush(heap, (-job.total(half), next(numbers), half))
    return indivisible + [batch for _, _, batch in heap]


def _halves(job: Job, batch: Batch) -> list[Batch]:
    """Halve a batch: each example, from the longest on, goes to the half that costs less so far."""
    halves: list[Batch] = [[], []]
    costs = [0.0, 0.0]
    for i in sorted(batch, key=lambda i: -job.lengths[i]):
        at = int(costs[1] < costs[0])
        halves[at].append(i)
        costs[at] += job.price(i)
    return halves


def sums(job: Job, batches: list[Batch]) -> tuple[list[int], list[float]]:
    """Return the tokens and the cost of each batch, from sums of ints: so they are the same on every machine."""
    lengths = torch.tensor(job.lengths)[torch.tensor(list(chain.from_iterable(batches)))]
    ends = torch.tensor([len(batch) for batch in batches]).cumsum(0) - 1
    zero = torch.zeros(1, dtype=torch.long)
    tokens, squares = (x.cumsum(0)[ends].diff(prepend=zero).tolist() for x in (lengths, lengths * lengths))
    a, b = job.cost
    return tokens, [a * total + b * square for total, square in zip(tokens, squares, strict=True)]


def deal_batches(costs: list[float], ranks: int, generator: torch.Generator) -> list[list[int]]:
    """Return for each rank the indices of its batches in ``costs``, in the order of the steps (step 3)."""
    descending = sorted(range(len(costs)), key=lambda at: -costs[at])
    spent = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for step in torch.randperm(len(costs) // ranks, generator=generator).tolist():
        ascending = sorted(range(ranks), key=lambda rank: spent[rank])
        for rank, at in zip(ascending, descending[step * ranks : (step + 1) * ranks], strict=True):
            shares[rank].append(at)
            spent[rank] += costs[at]
    return shares
