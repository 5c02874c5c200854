"""How many rows of a tensor count, where the device alone knows, and the sums of products that read it.

Shape suffixes: T rows, K summed over, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from fastpack.ops.tile_plan import BLOCK_BELOW, plan

TERMS = 4
"""At most: three projections and LoRA's update."""
MOST_PROGRAMS = 1024
"""As many as no device has processors."""
MOST_KINDS = 256
"""Places for plans. The first holds zeros, so that 255 kinds of launches have some of their own; a model whose layers
all differ may have more."""


@dataclass(eq=False)
class RowCount:
    """How many of the first rows count, where the device alone knows.

    Attributes:
        rows: int32 ``[1]``, which may change from replay to replay of whatever was recorded with it.
        tokens: T, the most that may count.
        products: how many launches have read it.
        work: floating-point operations that they left out for each row that does not count.
        flags: int32 ``[MOST_PROGRAMS]``, zeros between two sums of products, of which one runs at a time.
        plans: int32 ``[MOST_KINDS, ceil(T / BLOCK_BELOW) + 1, 3]``, for each kind of launch and number of rows a
            :func:`fastpack.ops.tile_plan.plan`; in the first place zeros, for all others: no tall tiles, no teams.
        kinds: those of which there are plans, and where.
    """

    rows: Tensor
    tokens: int
    products: int = 0
    work: int = 0
    flags: Tensor = field(init=False)
    plans: Tensor = field(init=False)
    kinds: dict[tuple[int, ...], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.flags = torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=self.rows.device)
        self.plans = self.flags.new_zeros(MOST_KINDS, ceil(self.tokens / BLOCK_BELOW) + 1, 3)

    def plans_for(self, across: int, steps: int, programs: int, flattened: bool) -> Tensor:
        """int32 ``[ceil(T / BLOCK_BELOW) + 1, 3]``, of launches of this kind; see :func:`fastpack.ops.tile_plan.plan`.

        They are made when a kind is first met, without waiting for the device. A recording makes none: it reads what is
        there, which for a kind that it is the first to meet is zeros, as it is where all places are taken.
        """
        kind = (across, steps, programs, flattened)
        if kind not in self.kinds:
            recording = self.rows.is_cuda and torch.cuda.is_current_stream_capturing()
            if recording or len(self.kinds) == MOST_KINDS - 1:
                return self.plans[0]
            units = range(self.plans.shape[1])
            made = torch.tensor([plan(min(n * BLOCK_BELOW, self.tokens), *kind) for n in units], dtype=torch.int32)
            self.kinds[kind] = len(self.kinds) + 1
            self.plans[self.kinds[kind]].copy_(made.pin_memory() if self.rows.is_cuda else made, non_blocking=True)
        return self.plans[self.kinds[kind]]


@dataclass(frozen=True, eq=False)
class Sum:
    """Terms x_i ``[T, K_i]`` and m_i ``[K_i, N]``, of which m_i may be a transposed view, and a bias ``[N]``."""

    terms: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None = None

    def new_output(self) -> Tensor:
        """Memory for it."""
        x, m = self.terms[0]
        return x.new_empty(len(x), m.shape[1])


def rows_of(count: RowCount | None) -> Tensor | None:
    """What kernels take."""
    return None if count is None else count.rows
