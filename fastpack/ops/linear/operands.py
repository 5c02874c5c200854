"""The operands of projections: weights, LoRA updates, norms, and the settings that autograd Functions take with them.

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
    """A LoRA update of a projection, ``scale dropout(n) a^T b^T``.

    Attributes:
        a: ``[R, H]`` of any float dtype.
        b: ``[O, R]`` of any float dtype.
        scale: the factor on the update.
        dropout: the probability with which an element of the input is dropped.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0


@dataclass(frozen=True, eq=False)
class Projection:
    """The operands of a linear layer.

    Attributes:
        weight: ``[O, H]``, or bitsandbytes' packed 4-bit weight if there is a ``quant_state``.
        dtype: the dtype of the matmul.
        bias: ``[O]`` or None.
        lora: the low-rank update, or None.
        quant_state: bitsandbytes' ``QuantState`` of a 4-bit weight, or None.
    """

    weight: Tensor
    dtype: torch.dtype
    bias: Tensor | None = None
    lora: Lora | None = None
    quant_state: Any = None

    @property
    def in_features(self) -> int:
        """H."""
        shape = self.weight.shape if self.quant_state is None else self.quant_state.shape
        return int(shape[-1])


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMSNorm before a group of projections; for the attributes see :func:`fastpack.ops.norm.rms_norm`."""

    weight: Tensor
    eps: float
    rounding: Rounding = "before"
    unit_offset: bool = False

    def result_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of norm(x). A wider weight that is applied after rounding promotes it."""
        return torch.promote_types(x.dtype, self.weight.dtype) if self.rounding == "before" else x.dtype


@dataclass(frozen=True, eq=False)
class ProjectionSettings:
    """The settings of a group of projections: everything but its tensors. Tuples have one entry for each projection.

    Attributes:
        dtype: the dtype of the group's matmuls.
        loras: each projection's ``(scale, dropout)``, or None for a projection without an update.
        quant_states: each projection's ``QuantState``, or None for a dense weight.
        implementation: which implementation of the ops to run.
        lora_dtype: the dtype of every A and B; None if they differ.
        row_count: how many of the first tokens are real; None if all are.
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
    ) -> ProjectionSettings:
        """Return the settings of a group, whose projections all have one dtype."""
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
    ) -> ProjectionSettings:
        """Return the settings of a group with these updates."""
        dtypes = {tensor.dtype for lora in loras if lora is not None for tensor in (lora.a, lora.b)}
        return cls(
            dtype,
            tuple(None if lora is None else (lora.scale, lora.dropout) for lora in loras),
            quant_states,
            implementation,
            dtypes.pop() if len(dtypes) == 1 else None,
            row_count,
        )

    @property
    def uniform(self) -> bool:
        """Return whether one matmul with all A at once is enough: there is one scale, and no dropout."""
        distinct = {lora for lora in self.loras if lora is not None}
        return len(distinct) <= 1 and not any(dropout for _, dropout in distinct)

    @property
    def owners(self) -> list[int]:
        """Return the indices of the projections that have an update."""
        return [i for i, lora in enumerate(self.loras) if lora is not None]

    def scale(self, i: int) -> float:
        """Return the scale of projection i's update."""
        return self._lora(i)[0]

    def dropout(self, i: int) -> float:
        """Return the probability with which projection i's update drops an element of its input."""
        return self._lora(i)[1]

    def _lora(self, i: int) -> tuple[float, float]:
        lora = self.loras[i]
        assert lora is not None
        return lora


def product_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a matmul in ``dtype`` on x's device: autocast's if it is on, except for float64."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and dtype != torch.float64 else dtype


def tensors_of(projections: Sequence[Projection]) -> list[Tensor | None]:
    """Return weight, bias, A and B of each projection as one flat list, the form in which a Function takes them."""
    flat: list[Tensor | None] = []
    for p in projections:
        flat += [p.weight, p.bias, None if p.lora is None else p.lora.a, None if p.lora is None else p.lora.b]
    return flat
