"""A batch sampler for torch's ``DataLoader`` with batches of a token budget."""

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

EVEN_EPOCHS = 64
"""The largest number of epochs that :meth:`TokenBudgetSampler.even_out` plans; later epochs repeat these epochs."""


class TokenBudgetSampler(Sampler[list[int]]):
    """A batch sampler whose micro-batches hold whole examples, at most ``max_tokens`` tokens in all.

    :func:`plan_batches` decides which examples share a batch, and how ranks share batches. The sampler yields the
    batches of its own rank only, so nothing may divide them among ranks again.

    ``len()`` is the number of micro-batches of this rank in the epoch; it is the same on every rank. It may differ by a
    few from epoch to epoch until :meth:`even_out` is called. The same lengths, settings and epoch give the same
    batches. To resume in mid-epoch, skip the batches that were trained on (``itertools.islice``, or accelerate's
    ``skip_first_batches``).

    Args:
        lengths: the tokens of each example, from :func:`lengths_of`: ints or a 1-D integer tensor, the same on every
            rank.
        max_tokens: the budget of a micro-batch.
        seed: decides the order, together with the epoch.
        rank: the index of this process, from 0. By default ``rank`` and ``ranks`` are those of ``torch.distributed`` if
            a process group exists; all ranks then compare their data and settings in a collective call.
        ranks: the number of processes.
        look_ahead, too_long, cost: as in :func:`plan_batches`.

    Raises:
        PackingError: as :func:`plan_batches`; or only one of ``rank`` and ``ranks`` is passed; or ranks have different
            data.

    Example:
        >>> sampler = TokenBudgetSampler(lengths_of(dataset), 8192)
        >>> loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackedSFTCollator())
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
        """Check the settings, compare them among ranks, and plan the first epoch."""
        if (rank is None) != (ranks is None):
            raise PackingError(f"rank={rank} and ranks={ranks}: pass both, or neither to use torch.distributed's.")
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
        if grouped:  # before planning: that may raise on one rank while the others would wait for this rank
            self._compare(self._settings())
        self._epoch = 0
        self._micro_batches, self._evened = 1, False
        self._plan = self._planned(0)

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._epoch

    @property
    def plan(self) -> BatchPlan:
        """The epoch's plan, for all ranks."""
        return self._plan

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches in the epoch."""
        return self._plan.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each micro-batch of this rank, from the start of the epoch."""
        yield from map(list, self._plan.batches[self.rank])

    def set_epoch(self, epoch: int) -> None:
        """Plan another epoch. The current one is not planned again.

        Args:
            epoch: the epoch, from 0.

        Raises:
            PackingError: ``epoch`` is not an int from 0 on, or as :func:`plan_batches`. Nothing has changed then.
        """
        if epoch != self._epoch:
            self._plan = self._planned(epoch)
            self._epoch = epoch

    def even_out(self, epochs: int) -> None:
        """Give all epochs of a run the same number of micro-batches, as trainers expect.

        The number is that of the epoch that needs most. At most the first :data:`EVEN_EPOCHS` epochs are planned for
        this, so that long runs need not wait. Later epochs repeat their orders. Call it before the first epoch begins.
        A single epoch does not change.

        Args:
            epochs: the number of epochs of the run.
        """
        if epochs > 1:
            planned = range(min(epochs, EVEN_EPOCHS))
            self._micro_batches = max(self._planned(epoch).micro_batches for epoch in planned)
            self._evened = True
            self._plan = self._planned(self._epoch)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that the batches of an epoch depend on, which must be the same on every rank."""
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
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, {"rank": self.rank, **state})
        compare_ranks(states)

    def _planned(self, epoch: int) -> BatchPlan:
        return plan_batches(
            self.lengths,
            self.max_tokens,
            seed=self.seed,
            epoch=epoch % EVEN_EPOCHS if self._evened else epoch,
            ranks=self.ranks,
            look_ahead=self.look_ahead,
            too_long=self.too_long,
            cost=self.cost,
            micro_batches=self._micro_batches,
        )


def compare_ranks(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless all processes have the same state, and are the ranks 0, 1, ... of their number.

    Args:
        states: the state of each process, in order: its ``rank``, and the entries that have to be the same.

    Raises:
        PackingError: an entry differs; the message has its name and each process's value.
    """
    ranks = [state["rank"] for state in states]
    if sorted(ranks) != list(range(len(states))) or any(state["ranks"] != len(states) for state in states):
        raise PackingError(
            f"{len(states)} processes have the ranks {ranks} of {[state['ranks'] for state in states]}: examples would "
            "be lost or seen twice. Leave rank and ranks out to use torch.distributed's."
        )
    for name in sorted(set(states[0]) - {"rank"}):
        values = [state[name] for state in states]
        if any(value != values[0] for value in values):
            raise PackingError(
                f"{name} is not the same on every rank: {values}. Each rank plans for all of them, so examples would "
                "be lost or seen twice. Give every rank the whole data set, in the same order, and the same settings."
            )
