"""What the layers of one patched model share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fastpack.ops.implementation import Implementation
from fastpack.packing.context import PackingContext
from fastpack.packing.seqlens import PackedSeqLens


@dataclass(frozen=True, eq=False)
class Runtime:
    """What the layers of one patched model share; a layer can be copied with it, by itself.

    Attributes:
        attention: the backend asked for, or ``auto``.
        kernels: what computes norms, RoPE, gated units and projections.
        context: where modules find the packing that no keyword brings; None where every one is told.
    """

    attention: str = "auto"
    kernels: Implementation = "auto"
    context: PackingContext | None = None

    def packing_of(self, module: nn.Module, packed: PackedSeqLens | None) -> PackedSeqLens | None:
        """The packing that came by keyword, else that of the context; None where the stock path runs."""
        return self.context.required(module) if packed is None and self.context is not None else packed
