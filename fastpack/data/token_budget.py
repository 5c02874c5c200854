"""Token budgets: which examples share a micro-batch, planned from their lengths alone.

:mod:`fastpack.data.bin_packing` says how, and why the order stays random.
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

from fastpack.data.bin_packing import Job, dealt, divided, filled, sums
from fastpack.errors import PackingError

LOOK_AHEAD = 2048
COST = (1.0, 1 / (12 * 4096))
"""FLOPs of a decoder layer of hidden size H, as a ratio: 24 H**2 a token in its matrix products (12 H**2 weights), and
2 H l**2 in causal attention over l tokens (two products of l x l, of which half is computed). Here for H = 4,096."""

TooLong = Literal["error", "truncate"]
TOO_LONG: tuple[str, ...] = get_args(TooLong)
T = TypeVar("T")
PerRank = tuple[tuple[T, ...], ...]


@dataclass(frozen=True)
class BatchPlan:
    """One epoch's micro-batches, of every rank. Compare two with ``==``.

    Attributes:
        batches: ``batches[rank][micro_batch]`` are indices of examples, at least one; equally many for each rank.
        tokens: ``tokens[rank][micro_batch]``, at most ``max_tokens``.
        costs: ``costs[rank][micro_batch]``, in units of ``a * tokens``.
        max_tokens: the budget.
        truncated: indices of examples that are longer, and count as ``max_tokens``: the collator has to cut them.
    """

    batches: PerRank[tuple[int, ...]]
    tokens: PerRank[int]
    costs: PerRank[float]
    max_tokens: int
    truncated: tuple[int, ...] = ()

    @property
    def micro_batches(self) -> int:
        """How many micro-batches each rank has."""
        return len(self.batches[0])

    @property
    def fill(self) -> float:
        """Tokens over the budgets of all micro-batches, from 0 to 1."""
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
    """Every example exactly once, in micro-batches of at most ``max_tokens`` tokens, equally many for every rank.

    A pure function: the same arguments give the same plan, with the same releases of fastpack and torch. A million
    lengths of instructions take two seconds in batches of 4,096 tokens; up to nine where each fills a batch.

    Args:
        lengths: tokens of each example, at least 1 (:func:`fastpack.data.lengths.lengths_of` reads them): n ints,
            or a whole 1-D tensor of them.
        max_tokens: tokens of a micro-batch at most.
        seed: with ``epoch`` decides the order.
        epoch: from 0.
        ranks: how many processes share the epoch.
        look_ahead: how many examples of the shuffled order are looked at, at most, to fill a batch.
        too_long: what becomes of examples longer than ``max_tokens``: ``"error"``, or ``"truncate"``, which counts them
            as ``max_tokens`` and lists them in :attr:`BatchPlan.truncated`; whoever collates them cuts them.
        cost: ``(a, b)`` of ``a * l + b * l ** 2``, what an example of ``l`` tokens costs. A pair counts as one sequence
            of both sides' tokens.
        micro_batches: at least so many for each rank: the dearest are halved until there are.

    Raises:
        PackingError: an argument is not what it has to be; an example is over the budget, and named; there are fewer
            examples than ranks; or hardly two examples fit one batch, and their number does not divide by the ranks.
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
    batches = divided(job, filled(job, order, look_ahead), micro_batches)
    tokens, costs = sums(job, batches)
    shares = dealt(costs, ranks, generator)
    return BatchPlan(
        batches=tuple(tuple(tuple(batches[at]) for at in share) for share in shares),
        tokens=tuple(tuple(tokens[at] for at in share) for share in shares),
        costs=tuple(tuple(costs[at] for at in share) for share in shares),
        max_tokens=max_tokens,
        truncated=tuple(longer),
    )


def read_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """The lengths as a new list of Python ints; raise unless there are some and each is a whole number from 1 on."""
    given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    try:
        values = [index(length) for length in given]
    except TypeError as error:
        raise PackingError(
            f"lengths are {type(lengths).__name__}, and not all of them whole numbers ({error}). Pass one int an "
            "example, or a 1-D tensor of them."
        ) from error
    if not values:
        raise PackingError("no lengths: the data set has no examples, and there is nothing to plan.")
    if min(values) < 1:
        at = next(i for i, length in enumerate(values) if length < 1)
        raise PackingError(
            f"example {at} has a length of {values[at]}; each needs at least 1 token. Filter such examples out."
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
    """Raise unless each setting is one that is allowed."""
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
    """SHA-256 of ints of 64 bits."""
    return hashlib.sha256(array("q", numbers).tobytes()).hexdigest()


def _refuse_long(longer: list[int], lengths: list[int], max_tokens: int) -> None:
    first, longest = longer[0], max(lengths)
    others = ", ".join(f"{i} ({lengths[i]})" for i in longer[1:5]) + (", ..." if len(longer) > 5 else "")
    more = f", and so have {len(longer) - 1} more: {others}" if len(longer) > 1 else ""
    raise PackingError(
        f"example {first} has {lengths[first]} tokens, more than max_tokens={max_tokens}{more}. Pass max_tokens of at "
        f"least {longest}, take them out of the data set, or have them cut: a trainer's max_length cuts sequences and "
        'the sides of pairs, too_long="truncate" (--too_long truncate) examples of one sequence.'
    )


def _mixed(seed: int, epoch: int) -> int:
    """A seed of its own for each pair: seed 0 in epoch 1 is not seed 1 in epoch 0."""
    if type(seed) is not int or type(epoch) is not int or epoch < 0:
        raise PackingError(f"seed={seed!r}, epoch={epoch!r}; both have to be ints, and epoch from 0 on.")
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:7], "big")
