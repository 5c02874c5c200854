"""The settings that the layers of one patched model share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fastpack.ops.implementation import Implementation
from fastpack.ops.row_count import RowScope
from fastpack.packing.context import PackingContext
from fastpack.packing.seqlens import PackedSeqLens


@dataclass(frozen=True, eq=False)
class Runtime:
    """The settings that the layers of one patched model share. A copy of a single layer keeps them.

    Attributes:
        attention: the requested backend, or ``auto``.
        kernels: the implementation of norms, RoPE, gated units and projections.
        rows: holds the numbers of rows for blocks of experts, which get no keyword.
        context: holds the packing for modules that get no keyword; None if every module gets the keyword.
    """

    attention: str = "auto"
    kernels: Implementation = "auto"
    context: PackingContext | None = None
    rows: RowScope = field(default_factory=RowScope)

    def packing_of(self, module: nn.Module, packed: PackedSeqLens | None) -> PackedSeqLens | None:
        """Return the packing from the keyword, else from the context; None on the stock path."""
        return self.context.required(module) if packed is None and self.context is not None else packed
