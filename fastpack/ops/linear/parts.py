"""What projections are made of, as the Functions that compute with them take it.

Shape suffixes: H size of the input, O of an output, R rank of LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.implementation import Implementation
from fastpack.ops.kinds import Rounding
from fastpack.ops.row_count import RowCount


@dataclass(frozen=True, eq=False)
class Lora:
    """A low-rank update: a ``[R, H]``, b ``[O, R]``, in any float dtype; dropout is a probability."""

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0


@dataclass(frozen=True, eq=False)
class Projection:
    """What a linear layer computes with.

    Attributes:
        weight: ``[O, H]``, or bitsandbytes' packed 4-bit weight where there is a ``quant_state``.
        bias: ``[O]`` or None.
        dtype: what the product is computed in.
    """

    weight: Tensor
    dtype: torch.dtype
    bias: Tensor | None = None
    lora: Lora | None = None
    quant_state: object = None


@dataclass(frozen=True, eq=False)
class Norm:
    """A root-mean-square norm before a group; see :func:`fastpack.ops.norm.rms_norm`."""

    weight: Tensor
    eps: float
    rounding: Rounding = "before"
    unit_offset: bool = False

    def result_dtype(self, x: Tensor) -> torch.dtype:
        """That of norm(x): a wider weight promotes it, where it is applied after rounding."""
        return torch.promote_types(x.dtype, self.weight.dtype) if self.rounding == "before" else x.dtype


@dataclass(frozen=True, eq=False)
class Settings:
    """What a group of projections has beside tensors; one entry of each tuple for each projection.

    ``loras`` holds ``(scale, dropout)``, or None for a projection without an update; ``lora_dtype`` is that of every A
    and B, None where they differ. ``row_count`` says how many of the first tokens count; all, where it is None.
    """

    dtype: torch.dtype
    loras: tuple[tuple[float, float] | None, ...]
    quant_states: tuple[Any, ...]
    implementation: Implementation = "auto"
    lora_dtype: torch.dtype | None = None
    row_count: RowCount | None = None

    @classmethod
    def of(
        cls, projections: Sequence[Projection], implementation: Implementation, row_count: RowCount | None = None
    ) -> Settings:
        """Those of a group, all of which compute in the same dtype."""
        quant_states = tuple(p.quant_state for p in projections)
        return cls.of_updates(
            projections[0].dtype, [p.lora for p in projections], quant_states, implementation, row_count
        )

    @classmethod
    def of_updates(
        cls,
        dtype: torch.dtype,
        loras: Sequence[Lora | None],
        quant_states: tuple[Any, ...],
        implementation: Implementation = "auto",
        row_count: RowCount | None = None,
    ) -> Settings:
        """Those of a group with these updates."""
        found = {tensor.dtype for lora in loras if lora is not None for tensor in (lora.a, lora.b)}
        return cls(
            dtype,
            tuple(None if lora is None else (lora.scale, lora.dropout) for lora in loras),
            quant_states,
            implementation,
            found.pop() if len(found) == 1 else None,
            row_count,
        )

    @property
    def uniform(self) -> bool:
        """True where one product with all A at once serves every update: one scale, no dropout."""
        found = {lora for lora in self.loras if lora is not None}
        return len(found) <= 1 and not any(dropout for _, dropout in found)

    @property
    def owners(self) -> list[int]:
        """Which projections have an update."""
        return [i for i, lora in enumerate(self.loras) if lora is not None]

    def scale(self, i: int) -> float:
        """Of projection i's update."""
        return self._lora(i)[0]

    def dropout(self, i: int) -> float:
        """The probability with which projection i's update drops an element of its input."""
        return self._lora(i)[1]

    def _lora(self, i: int) -> tuple[float, float]:
        lora = self.loras[i]
        assert lora is not None
        return lora


def product_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What a product in ``dtype`` is computed in on x's device: autocast's where it is on, but for float64."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and dtype != torch.float64 else dtype


def tensors_of(projections: Sequence[Projection]) -> list[Tensor | None]:
    """weight, bias, A and B of each projection, flat: what a Function is given and returns gradients for."""
    flat: list[Tensor | None] = []
    for p in projections:
        flat += [p.weight, p.bias, None if p.lora is None else p.lora.a, None if p.lora is None else p.lora.b]
    return flat
