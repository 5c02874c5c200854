"""A batch sampler for torch's ``DataLoader``, whose batches are those of a token-budget plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from fastpack.data.token_budget import (
    COST,
    LOOK_AHEAD,
    BatchPlan,
    TooLong,
    check_settings,
    digest,
    plan_batches,
    read_lengths,
)
from fastpack.errors import PackingError

EVENED = 64
"""Epochs that :meth:`TokenBudgetSampler.even_out` plans at most; later ones are as the first ones were."""


class TokenBudgetSampler(Sampler[list[int]]):
    """Lists of indices of whole examples, of at most ``max_tokens`` tokens together: one micro-batch each.

    ``DataLoader(dataset, batch_sampler=TokenBudgetSampler(lengths_of(dataset), 8192), collate_fn=...)``. What is in
    which batch, and how ranks share them, is :func:`plan_batches`'s to say. It makes the batches of its own rank:
    nothing may divide them among ranks again.

    ``len()`` is the number of micro-batches of this rank in the whole epoch, the same on every rank; it may differ by
    a few from epoch to epoch until :meth:`even_out` is called. Iterating goes through the epoch from its start. The
    same lengths, settings and epoch give the same batches, so who goes on in mid-epoch skips those that were trained on
    (``itertools.islice``, or accelerate's ``skip_first_batches``).

    Args:
        lengths: tokens of each example, from :func:`lengths_of`; n ints or a whole 1-D tensor. The same on every rank.
        max_tokens: of a micro-batch at most.
        seed: decides the order, together with the epoch.
        rank: which process this is, from 0. By default ``rank`` and ``ranks`` are those of ``torch.distributed`` where
            a process group exists, and all ranks then compare their data and settings: a collective call.
        ranks: how many processes there are.
        look_ahead, too_long, cost: as in :func:`plan_batches`.

    Raises:
        PackingError: as :func:`plan_batches`; only one of ``rank`` and ``ranks`` is given; ranks have different data.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        max_tokens: int,
        *,
        seed: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
        look_ahead: int = LOOK_AHEAD,
        too_long: TooLong = "error",
        cost: tuple[float, float] = COST,
    ) -> None:
        if (rank is None) != (ranks is None):
            raise PackingError(f"rank={rank} and ranks={ranks}: pass both, or neither to ask torch.distributed.")
        grouped = rank is None and dist.is_available() and dist.is_initialized()
        if rank is None or ranks is None:
            rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        check_settings(
            max_tokens=max_tokens, ranks=ranks, rank=rank, look_ahead=look_ahead, too_long=too_long, cost=cost
        )
        self.lengths = read_lengths(lengths)
        self.max_tokens = max_tokens
        self.seed = seed
        self.rank = rank
        self.ranks = ranks
        self.look_ahead = look_ahead
        self.too_long = too_long
        self.cost = cost
        self.fingerprint = digest(self.lengths)
        if grouped:  # before planning, which may raise on one rank alone, while the others would wait for it
            self._compare(self._settings())
        self._epoch = 0
        self._micro_batches, self._evened = 1, False
        self._plan = self._planned(0)

    @property
    def epoch(self) -> int:
        """From 0."""
        return self._epoch

    @property
    def plan(self) -> BatchPlan:
        """This epoch's plan, for all ranks."""
        return self._plan

    def __len__(self) -> int:
        return self._plan.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        yield from map(list, self._plan.batches[self.rank])

    def set_epoch(self, epoch: int) -> None:
        """Plan another epoch; the one that it is in already is left as it is.

        Raises:
            PackingError: not an int from 0 on, or as :func:`plan_batches`; then nothing has changed.
        """
        if epoch != self._epoch:
            self._plan = self._planned(epoch)
            self._epoch = epoch

    def even_out(self, epochs: int) -> None:
        """Give the first so many epochs as many micro-batches as the one of them that needs most.

        Trainers count on it. These epochs are planned for it, or the first :data:`EVENED` of them, since runs of many
        epochs would wait for it: those behind them go through the same orders again. Call it before the first of them
        begins. One epoch is left as it is.
        """
        if epochs > 1:
            planned = range(min(epochs, EVENED))
            self._micro_batches = max(self._planned(epoch).micro_batches for epoch in planned)
            self._evened = True
            self._plan = self._planned(self._epoch)

    def _settings(self) -> dict[str, Any]:
        """Return all that the batches of an epoch depend on, as ints, floats and strings; the same on every rank."""
        return {
            "examples": len(self.lengths),
            "lengths": self.fingerprint,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "ranks": self.ranks,
            "look_ahead": self.look_ahead,
            "too_long": self.too_long,
            "cost": list(self.cost),
        }

    def _compare(self, state: dict[str, Any]) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {"rank": self.rank, **state})
        compare_ranks(found)

    def _planned(self, epoch: int) -> BatchPlan:
        return plan_batches(
            self.lengths,
            self.max_tokens,
            seed=self.seed,
            epoch=epoch % EVENED if self._evened else epoch,
            ranks=self.ranks,
            look_ahead=self.look_ahead,
            too_long=self.too_long,
            cost=self.cost,
            micro_batches=self._micro_batches,
        )


def compare_ranks(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless processes hold the same, and are the ranks 0, 1, ... of it.

    Args:
        states: of each process, in order, its ``rank`` and whatever else has to be the same.

    Raises:
        PackingError: names what differs, and what each process has.
    """
    ranks = [state["rank"] for state in states]
    if sorted(ranks) != list(range(len(states))) or any(state["ranks"] != len(states) for state in states):
        raise PackingError(
            f"{len(states)} processes say that they are ranks {ranks} of {[state['ranks'] for state in states]}: "
            "examples would be lost or seen twice. Leave rank and ranks out to have them asked for."
        )
    for name in sorted(set(states[0]) - {"rank"}):
        values = [state[name] for state in states]
        if any(value != values[0] for value in values):
            raise PackingError(
                f"{name} is not the same on every rank: {values}. Each rank plans for all of them, so examples would "
                "be lost or seen twice. Give every rank the whole data set, in the same order, and the same settings."
            )
