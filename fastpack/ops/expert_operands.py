"""The operands of experts: the rows of each, a matrix for each, and the gated unit between two of these.

Token t's k-th choice has *slot* t K + k. A *row* is a slot's place after a stable sort by expert. Slots whose index is
E or more, or negative, belong to no expert here (another process has it), nor do those of bucket padding. Their rows
come last, and no matmul computes them.

Shape suffixes: T tokens, K choices of a token, E experts, R rows, I inner dimension, O columns. R is T K, or less if
the rows that are left out are known to be of no expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastpack.ops.row_count import RowCount

STEP = 64
"""The elements of the inner dimension that a kernel of grouped matmuls adds up in a step, in half precision."""
NARROWEST = 16
"""The smallest number of columns of a kernel's operand."""
ExpertActivation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
Columns = Literal["halves", "interleaved", "plain"]


@dataclass(frozen=True, eq=False)
class Routing:
    """The rows of T tokens.

    Attributes:
        index: int64 or int32 ``[T, K]``, the experts that each token chose.
        order: int32 ``[R]``, the slot of each row.
        offsets: int32 ``[E]``, the end of each expert's rows.
        tiles: int32 ``[*, 2]``, the expert and the first row of each tile of a grouped matmul; for kernels only.
        tile_count: int32 ``[1]``, the number of these tiles; for kernels only.
        rows: int32 ``[T K]``, the row of each slot, which may be R or more; for kernels only.
        row_count: the number of real tokens, for kernels only, or None if all are real. The slots of the others belong
            to no expert.
    """

    index: Tensor
    order: Tensor
    offsets: Tensor
    tiles: Tensor | None = None
    tile_count: Tensor | None = None
    rows: Tensor | None = None
    row_count: RowCount | None = None

    @property
    def choices(self) -> int:
        """K, the number of choices of a token."""
        return self.index.shape[1]

    @property
    def experts(self) -> int:
        """E, the number of experts."""
        return len(self.offsets)

    @property
    def for_kernels(self) -> bool:
        """True if it was made by kernels, for kernels."""
        return self.tiles is not None

    def real_rows(self) -> Tensor:
        """Return which rows belong to an expert, bool ``[R]``; they come first."""
        return torch.arange(len(self.order), device=self.order.device) < self.offsets[-1]

    def bounds(self) -> list[tuple[int, int]]:
        """Return the first row of each expert and the row after its last; the host waits for the device."""
        ends = self.offsets.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


@dataclass(frozen=True, eq=False)
class Stack:
    """A matrix for each expert.

    Attributes:
        weight: ``[E, I, O]``, contiguous; ``[E, O, I]`` if ``transposed``.
        transposed: whether the result's columns come before the inner dimension, as in ``nn.Linear``.
    """

    weight: Tensor
    transposed: bool = False

    @property
    def columns(self) -> int:
        """O, the number of columns of the result."""
        return self.weight.shape[1 if self.transposed else 2]

    def of(self, expert: int) -> Tensor:
        """Return one expert's matrix, ``[I, O]``."""
        matrix = self.weight[expert]
        return matrix.t() if self.transposed else matrix

    def flipped(self) -> Stack:
        """Return the stack of the transposed matrices, for the gradient of the input."""
        return Stack(self.weight, not self.transposed)


@dataclass(frozen=True)
class Gate:
    """A gated unit.

    Attributes:
        kind: the activation.
        columns: where gate and up are: in two ``halves``, ``interleaved``, or ``plain``: there is no gate.
        alpha: the slope of SiLU's sigmoid.
        limit: the limit L.
        offset: the offset o.
        clamps_after: whether the limit acts on the activated gate.
    """

    kind: ExpertActivation
    columns: Columns = "halves"
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0
    clamps_after: bool = False

    def width(self, columns: int) -> int:
        """Return I for this number of columns of the first matmul's result."""
        return columns if self.columns == "plain" else columns // 2
