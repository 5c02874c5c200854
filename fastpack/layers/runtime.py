"""The object that the layers of one patched model share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fastpack.ops.implementation import Implementation
from fastpack.packing.context import PackingContext
from fastpack.packing.seqlens import PackedSeqLens


@dataclass(frozen=True, eq=False)
class Runtime:
    """The settings that the layers of one patched model share; copies of a layer share it too.

    Attributes:
        attention: the name of the requested backend, or ``auto``.
        kernels: the implementation of norms, RoPE, gated units and projections.
        context: the packing for modules that no keyword reaches; None if every module gets the keyword.
    """

    attention: str = "auto"
    kernels: Implementation = "auto"
    context: PackingContext | None = None

    def packing_of(self, module: nn.Module, packed: PackedSeqLens | None) -> PackedSeqLens | None:
        """Return the packing that came by keyword, else that of the context, else None, for the stock path."""
        return self.context.required(module) if packed is None and self.context is not None else packed
