"""The processes that share the work: one, where ``torch.distributed`` was not begun."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from fastpack.errors import FastpackError, ReferenceCacheError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is. Each method is called by all of them, in the same order."""

    rank: int
    count: int

    @classmethod
    def here(cls) -> Ranks:
        """Those of the default process group."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on each of them."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def on_first(self, function: Callable[[], T]) -> T:
        """What the first rank's call returns, or raises, on each of them: the disk is asked by one."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except (FastpackError, OSError) as error:
                if self.count == 1:
                    raise
                outcome[1] = error
        if self.count > 1:
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raise on each of them unless all hold the same."""
        everyone = self.gather(dict(facts))
        for name in facts:
            values = [theirs[name] for theirs in everyone]
            if any(value != values[0] for value in values):
                raise ReferenceCacheError(
                    f"{name} is not the same on every rank: {', '.join(str(value)[:40] for value in values)}. Load "
                    "the same model and the same data on each, and pass the same arguments."
                )
