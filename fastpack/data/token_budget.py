"""Token budgets: plan which examples share a micro-batch, from their lengths alone.

:mod:`fastpack.data.bin_packing` describes the method, and why the order stays random.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import index
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from fastpack.data.bin_packing import Job, deal_batches, divide_batches, fill_batches, sums
from fastpack.errors import PackingError

LOOK_AHEAD = 2048
COST = (1.0, 1 / (12 * 4096))
"""The ratio of FLOPs in a decoder layer of hidden size H = 4,096: 24 H**2 for each token in matmuls (12 H**2 weights),
and 2 H l**2 in causal attention over l tokens (two matmuls of l x l, of which half is computed)."""

TooLong = Literal["error", "truncate"]
TOO_LONG: tuple[str, ...] = get_args(TooLong)
T = TypeVar("T")
PerRank = tuple[tuple[T, ...], ...]


@dataclass(frozen=True)
class BatchPlan:
    """The micro-batches of one epoch, for every rank. Plans compare with ``==``.

    Attributes:
        batches: ``batches[rank][micro_batch]`` are the indices of at least one example. All ranks have the same number
            of micro-batches.
        tokens: ``tokens[rank][micro_batch]``, at most ``max_tokens``.
        costs: ``costs[rank][micro_batch]``, the sum of ``a * l + b * l ** 2`` over the examples of ``l`` tokens.
        max_tokens: the budget.
        truncated: the indices of examples over the budget. They count as ``max_tokens``, and the collator has to cut
            them.
    """

    batches: PerRank[tuple[int, ...]]
    tokens: PerRank[int]
    costs: PerRank[float]
    max_tokens: int
    truncated: tuple[int, ...] = ()

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of each rank."""
        return len(self.batches[0])

    @property
    def fill(self) -> float:
        """The share of all micro-batches' budgets that is filled with tokens, from 0 to 1."""
        return sum(chain.from_iterable(self.tokens)) / (self.max_tokens * self.micro_batches * len(self.batches))


def plan_batches(
    lengths: Sequence[int] | Tensor,
    max_tokens: int,
    *,
    seed: int,
    epoch: int,
    ranks: int = 1,
    look_ahead: int = LOOK_AHEAD,
    too_long: TooLong = "error",
    cost: tuple[float, float] = COST,
    micro_batches: int = 1,
) -> BatchPlan:
    """Plan an epoch: every example once, in micro-batches of at most ``max_tokens``, the same number for every rank.

    The same arguments give the same plan, with the same releases of fastpack and torch. A million lengths of
    instruction data take two seconds in batches of 4,096 tokens, and up to nine if each example fills a batch.

    Args:
        lengths: the tokens of each example, at least 1 (:func:`fastpack.data.lengths.lengths_of` reads them): ints, or
            a 1-D integer tensor.
        max_tokens: the budget of a micro-batch.
        seed: decides the order, together with ``epoch``.
        epoch: the epoch, from 0.
        ranks: the number of processes that share the epoch.
        look_ahead: the largest number of examples of the shuffled order that are considered to fill a batch.
        too_long: ``"error"`` to refuse examples longer than ``max_tokens``, or ``"truncate"`` to count them as
            ``max_tokens`` and list them in :attr:`BatchPlan.truncated`; the collator then cuts them.
        cost: ``(a, b)`` of ``a * l + b * l ** 2``, the cost of an example of ``l`` tokens. A pair counts as one
            sequence of both sides' tokens.
        micro_batches: the least number of micro-batches for each rank; the most expensive ones are halved until it is
            reached.

    Raises:
        PackingError: an argument has a value that is not allowed; an example is over the budget; or there are fewer
            examples than ranks, or than batches (if most batches hold one example, and the number of batches has to be
            rounded up to divide by the ranks).

    Example:
        >>> plan = plan_batches([5, 3, 2, 4], 7, seed=0, epoch=0)
        >>> plan.micro_batches, plan.fill
        (2, 1.0)
    """
    values = read_lengths(lengths)
    check_settings(
        max_tokens=max_tokens,
        ranks=ranks,
        look_ahead=look_ahead,
        too_long=too_long,
        cost=cost,
        micro_batches=micro_batches,
    )
    longer = [i for i, length in enumerate(values) if length > max_tokens] if max(values) > max_tokens else []
    if longer and too_long == "error":
        _refuse_long(longer, values, max_tokens)
    for i in longer:
        values[i] = max_tokens
    if len(values) < ranks:
        raise PackingError(
            f"{len(values)} examples for {ranks} ranks: each rank needs at least one. Start at most {len(values)} "
            "processes, or give more examples."
        )
    generator = torch.Generator().manual_seed(_mixed(seed, epoch))
    order = torch.randperm(len(values), generator=generator).tolist()
    job = Job(values, max_tokens, ranks, cost)
    batches = divide_batches(job, fill_batches(job, order, look_ahead), micro_batches)
    tokens, costs = sums(job, batches)
    shares = deal_batches(costs, ranks, generator)
    return BatchPlan(
        batches=tuple(tuple(tuple(batches[at]) for at in share) for share in shares),
        tokens=tuple(tuple(tokens[at] for at in share) for share in shares),
        costs=tuple(tuple(costs[at] for at in share) for share in shares),
        max_tokens=max_tokens,
        truncated=tuple(longer),
    )


def read_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """Return the lengths as a new list of Python ints.

    Raises:
        PackingError: there is no length, a length is below 1, or one is not a whole number.
    """
    numbers = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    try:
        values = [index(length) for length in numbers]
    except TypeError as error:
        raise PackingError(
            f"lengths is a {type(lengths).__name__} with items that are not whole numbers ({error}). Pass one int for "
            "each example, or a 1-D tensor of them."
        ) from error
    if not values:
        raise PackingError("there are no lengths: the data set is empty. Pass at least one example.")
    if min(values) < 1:
        at = next(i for i, length in enumerate(values) if length < 1)
        raise PackingError(
            f"example {at} has a length of {values[at]}; an example needs at least 1 token. Filter such examples out."
        )
    return values


def check_settings(
    *,
    max_tokens: int,
    ranks: int,
    look_ahead: int,
    too_long: str,
    cost: tuple[float, float],
    micro_batches: int = 1,
    rank: int = 0,
) -> None:
    """Raise a PackingError unless each setting has an allowed value."""
    whole = {"max_tokens": max_tokens, "ranks": ranks, "look_ahead": look_ahead, "micro_batches": micro_batches}
    for name, value in whole.items():
        if type(value) is not int or value < 1:
            raise PackingError(f"{name}={value!r}; it has to be an int from 1 on.")
    if type(rank) is not int or not 0 <= rank < ranks:
        raise PackingError(f"rank={rank!r} of ranks={ranks}; it has to be an int from 0 to {ranks - 1}.")
    if too_long not in TOO_LONG:
        raise PackingError(f'too_long={too_long!r}; it has to be "error" or "truncate".')
    if len(cost) != 2 or not all(0 <= weight < math.inf for weight in cost) or not sum(cost):
        raise PackingError(f"cost={cost!r}; it has to be (a, b) of a * l + b * l**2, both from 0 on, and not both 0.")


def digest(numbers: Iterable[int]) -> str:
    """Return the SHA-256 hash of ints, taken as 64 bits each, in hexadecimal."""
    return hashlib.sha256(array("q", numbers).tobytes()).hexdigest()


def _refuse_long(longer: list[int], lengths: list[int], max_tokens: int) -> None:
    first, longest = longer[0], max(lengths)
    others = ", ".join(f"{i} ({lengths[i]})" for i in longer[1:5]) + (", ..." if len(longer) > 5 else "")
    more = f", and so have {len(longer) - 1} more: {others}" if len(longer) > 1 else ""
    raise PackingError(
        f"example {first} has {lengths[first]} tokens, more than max_tokens={max_tokens}{more}. Pass max_tokens of at "
        f"least {longest}, remove long examples, or cut them: a trainer's max_length cuts sequences and the sides of "
        'pairs, and too_long="truncate" (--too_long truncate) cuts examples of one sequence.'
    )


def _mixed(seed: int, epoch: int) -> int:
    """Return another seed for each pair of seed and epoch: seed 0 in epoch 1 is not seed 1 in epoch 0."""
    if type(seed) is not int or type(epoch) is not int or epoch < 0:
        raise PackingError(f"seed={seed!r}, epoch={epoch!r}; both have to be ints, and epoch from 0 on.")
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:7], "big")
