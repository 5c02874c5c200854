"""The number of a batch's real rows, known only to the device, and the sums of matmuls that read it.

Shape suffixes: T rows, K inner dimension, N columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from fastpack.ops.tile_schedule import BLOCK_BELOW, schedule
from fastpack.utils.thread_scope import ThreadScope

TERMS = 4
"""The maximum number of terms in a sum: three projections and LoRA's update."""
MOST_PROGRAMS = 1024
"""The maximum number of programs in a launch; no device has as many processors."""
MOST_KINDS = 256
"""Entries of the table of schedules. The first holds zeros, which leaves 255 for kinds of launches. A model whose
layers all differ may have more kinds."""


@dataclass(eq=False)
class RowCount:
    """The number of a batch's first rows that are real (not bucket padding), held on the device.

    Attributes:
        rows: int32 ``[1]``, the number. It may change between replays of a CUDA graph that was recorded with it.
        tokens: T, the largest possible number.
        launches: the number of launches that have read ``rows``.
        work: the floating-point operations that those launches leave out for each row of bucket padding.
        flags: int32 ``[MOST_PROGRAMS]``, through which the programs of a launch wait for each other. One launch runs at
            a time, and leaves zeros.
        schedules: int32 ``[MOST_KINDS, ceil(T / BLOCK_BELOW) + 1, 3]``, a :func:`fastpack.ops.tile_schedule.schedule`
            for each kind of launch and number of rows. The first entry is zeros (no tall tiles, no teams), for kinds
            that have no entry of their own.
        kinds: each kind of launch that has an entry, and its index.
    """

    rows: Tensor
    tokens: int
    launches: int = 0
    work: int = 0
    flags: Tensor = field(init=False)
    schedules: Tensor = field(init=False)
    kinds: dict[tuple[int, ...], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Allocate the flags and the table of schedules."""
        self.flags = torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=self.rows.device)
        self.schedules = self.flags.new_zeros(MOST_KINDS, ceil(self.tokens / BLOCK_BELOW) + 1, 3)

    def schedules_for(self, across: int, steps: int, programs: int, flattened: bool) -> Tensor:
        """Return the schedules of this kind of launch, int32 ``[ceil(T / BLOCK_BELOW) + 1, 3]``.

        They are computed at the first launch of a kind, without waiting for the device. A kind whose first launch is
        inside a recording gets zeros, as does every new kind once the table is full.

        Args:
            across: as for :func:`fastpack.ops.tile_schedule.schedule`.
            steps: as for :func:`fastpack.ops.tile_schedule.schedule`.
            programs: as for :func:`fastpack.ops.tile_schedule.schedule`.
            flattened: as for :func:`fastpack.ops.tile_schedule.schedule`.
        """
        kind = (across, steps, programs, flattened)
        if kind not in self.kinds:
            recording = self.rows.is_cuda and torch.cuda.is_current_stream_capturing()
            if recording or len(self.kinds) == MOST_KINDS - 1:
                return self.schedules[0]
            row_counts = [min(n * BLOCK_BELOW, self.tokens) for n in range(self.schedules.shape[1])]
            rows = torch.tensor([schedule(count, *kind) for count in row_counts], dtype=torch.int32)
            self.kinds[kind] = len(self.kinds) + 1
            self.schedules[self.kinds[kind]].copy_(rows.pin_memory() if self.rows.is_cuda else rows, non_blocking=True)
        return self.schedules[self.kinds[kind]]


class RowsOfRanks:
    """The number of rows on each rank over which experts are spread, which the first block of experts asks for.

    Each forward has one of its own, so that all ranks ask in the same block. It is no dataclass: FSDP2 copies those on
    their way into a layer.

    Attributes:
        own: the number on this rank.
        answer: the number on each, or None before it was asked for.
    """

    def __init__(self, own: int, answer: tuple[int, ...] | None = None) -> None:
        """Set up with the attributes."""
        self.own = own
        self.answer = answer


class RowScope(ThreadScope):
    """The numbers of rows in the layer that runs now, for modules inside that no keyword reaches.

    Attributes:
        count: the number of real rows, or None if all are real.
        of_ranks: the numbers of rows on each rank, or None if each block of experts is to ask for them.
    """

    def __init__(self) -> None:
        """Set up without numbers, once in each thread."""
        self.count: RowCount | None = None
        self.of_ranks: RowsOfRanks | None = None

    @contextmanager
    def of(self, count: RowCount | None, of_ranks: RowsOfRanks | None) -> Iterator[None]:
        """Keep these numbers while a part of a layer runs."""
        before = self.count, self.of_ranks
        self.count, self.of_ranks = count, of_ranks
        try:
            yield
        finally:
            self.count, self.of_ranks = before


@dataclass(frozen=True, eq=False)
class MatmulSum:
    """A sum of matmuls ``x_i [T, K_i] @ m_i [K_i, N]`` and a bias ``[N]``.

    Attributes:
        terms: each term's x_i and m_i; m_i may be a transposed view.
        bias: the bias, or None.
    """

    terms: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None = None

    def new_output(self) -> Tensor:
        """Allocate memory for the result, ``[T, N]``."""
        x, m = self.terms[0]
        return x.new_empty(len(x), m.shape[1])


def rows_of(count: RowCount | None) -> Tensor | None:
    """Return the tensor that kernels read the number of real rows from, or None if all rows are real."""
    return None if count is None else count.rows
