"""Formats of quantised stacks: what turns the packed bytes of all experts into a matrix for each.

A format doesn't hold the packed bytes, so that autograd saves these as any other weight. What it does hold (scales,
tables) is small, and frozen.

Shape suffixes: E experts, O columns of the result, I inner dimension.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.dequantize import dequantize
from fastpack.ops.implementation import Implementation
from fastpack.ops.mxfp4 import dequantize_mxfp4


class StackFormat(ABC):
    """The format of a quantised stack.

    Attributes:
        shape: the stack's shape, as if it was dense: ``[E, O, I]`` or ``[E, I, O]``.
        transposed: whether the matrices are stored transposed.
    """

    shape: torch.Size
    transposed: bool = False

    @abstractmethod
    def stored(
        self, packed: Tensor, dtype: torch.dtype, implementation: Implementation = "auto", offsets: Tensor | None = None
    ) -> Tensor:
        """Return the dense matrices as they are stored, new and contiguous.

        Args:
            packed: the packed bytes.
            dtype: the dtype of the result.
            implementation: which implementation to run.
            offsets: int32 ``[E]``, the end of each expert's rows, or None. With it, the matrices of experts without
                rows may be left undefined.
        """

    def dense(self, packed: Tensor, dtype: torch.dtype, implementation: Implementation = "auto") -> Tensor:
        """Return the dense stack in its own shape; a view of new memory."""
        matrices = self.stored(packed, dtype, implementation)
        return matrices.transpose(1, 2) if self.transposed else matrices

    @abstractmethod
    def expert(self, packed: Tensor, index: int, dtype: torch.dtype) -> Tensor:
        """Return one expert's dense matrix."""


@dataclass(frozen=True, eq=False)
class FourBitFormat(StackFormat):
    """bitsandbytes' 4-bit format (NF4 or FP4), of the whole stack as one tensor.

    Attributes:
        state: bitsandbytes' ``QuantState``.
    """

    state: Any

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The stack's shape, as if it was dense."""
        return torch.Size(self.state.shape)

    def stored(
        self, packed: Tensor, dtype: torch.dtype, implementation: Implementation = "auto", offsets: Tensor | None = None
    ) -> Tensor:
        """Return the dense stack, rounded to the state's dtype first."""
        return dequantize(packed, _in_rows(self.state), dtype, implementation).view(self.shape)

    def expert(self, packed: Tensor, index: int, dtype: torch.dtype) -> Tensor:
        """Return one expert's dense matrix."""
        from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

        state, count = self.state, self.shape[1] * self.shape[2]
        if count % state.blocksize or count % 2:  # an expert begins inside a block
            return self.stored(packed, dtype)[index]
        absmax = state.absmax
        if state.nested:
            absmax = (dequantize_blockwise(absmax, state.state2) + state.offset).float()
        blocks, size = slice(*(count // state.blocksize * i for i in (index, index + 1))), count // 2
        rows = torch.Size((count // state.blocksize, state.blocksize))
        alone = QuantState(absmax[blocks], rows, state.code, state.blocksize, state.quant_type, state.dtype)
        bytes_here = packed.reshape(-1).view(torch.uint8)[index * size : (index + 1) * size]
        matrix: Tensor = dequantize_4bit(bytes_here[:, None], alone)
        return matrix.to(dtype).view(self.shape[1:])


def _in_rows(state: Any) -> Any:
    """Return the state of the same weight as rows of one block.

    On a CPU, bitsandbytes 0.50 reads wrong scales where a row is not a whole number of blocks.
    """
    rows, rest = divmod(math.prod(state.shape), state.blocksize)
    if rest:
        return state
    state = copy.copy(state)
    state.shape = torch.Size((rows, state.blocksize))
    return state


@dataclass(frozen=True, eq=False)
class Mxfp4Format(StackFormat):
    """MXFP4: the packed bytes are ``[E, O, I / 2]``, or ``[E, O, G, 16]``; see :mod:`fastpack.ops.mxfp4`.

    Attributes:
        scales: uint8 ``[E, O, G]``.
        transposed: whether the stack is ``[E, I, O]``, as gpt-oss has it; the bytes don't differ.
        layout: an order of the bytes that a library's kernels need, with a method ``unswizzle_data``, which returns
            them as ``[E, I / 2, O]``; None for the order above.
    """

    scales: Tensor
    transposed: bool = False
    layout: Any = None

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The stack's shape, as if it was dense."""
        count, columns, groups = self.scales.shape
        return torch.Size((count, groups * 32, columns) if self.transposed else (count, columns, groups * 32))

    def stored(
        self, packed: Tensor, dtype: torch.dtype, implementation: Implementation = "auto", offsets: Tensor | None = None
    ) -> Tensor:
        """Return the dense matrices, ``[E, O, I]``."""
        return dequantize_mxfp4(self.blocks(packed), self.scales, dtype, implementation, offsets)

    def blocks(self, packed: Tensor) -> Tensor:
        """Return the packed bytes in the order of the specification, ``[E, O, I / 2]``."""
        if self.layout is not None:
            packed = self.layout.unswizzle_data(packed).transpose(-1, -2).contiguous()
        return packed.reshape(*self.scales.shape[:2], -1)

    def expert(self, packed: Tensor, index: int, dtype: torch.dtype) -> Tensor:
        """Return one expert's dense matrix."""
        here = slice(index, index + 1)
        matrix = dequantize_mxfp4(self.blocks(packed)[here], self.scales[here], dtype)[0]
        return matrix.t() if self.transposed else matrix
