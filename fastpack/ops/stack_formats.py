"""Formats of quantised stacks: what turns the packed bytes of all experts into a matrix for each.

A format doesn't hold the packed bytes, so that autograd saves these as any other weight. What it does hold (scales,
tables) is small, and frozen.

Shape suffixes: E experts, O columns of the result, I inner dimension.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from fastpack.ops.dequantize import dequantize
from fastpack.ops.implementation import Implementation
from fastpack.ops.mxfp4 import BLOCK, dequantize_mxfp4


class StackFormat(ABC):
    """The format of a quantised stack.

    Attributes:
        shape: the stack's shape, as if it was dense: ``[E, O, I]`` or ``[E, I, O]``.
        dtype: the dtype that a dense copy has by default.
        transposed: whether the matrices are stored transposed.
        name: the format's name.
    """

    shape: torch.Size
    dtype: torch.dtype
    transposed: bool = False
    name: str

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

    def dense(self, packed: Tensor) -> Tensor:
        """Return the dense stack in its own shape and dtype; a view of new memory."""
        matrices = self.stored(packed, self.dtype)
        return matrices.transpose(1, 2) if self.transposed else matrices

    @abstractmethod
    def expert(self, packed: Tensor, index: int) -> Tensor:
        """Return one expert's dense matrix in the format's dtype."""

    @abstractmethod
    def to(self, device: torch.device | None, dtype: torch.dtype) -> Self:
        """Return the format with its tensors on this device (None leaves them), and with another dtype of copies."""

    @abstractmethod
    def saved(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the entries of a state dict, by what follows the stack's name."""

    @abstractmethod
    def loaded(self, entries: Mapping[str, Tensor]) -> tuple[Tensor, Self] | None:
        """Return the packed bytes and their format from such entries, or None if they are of another format."""


@dataclass(frozen=True, eq=False)
class FourBitFormat(StackFormat):
    """bitsandbytes' 4-bit format (NF4 or FP4), of the whole stack as one tensor.

    Attributes:
        state: bitsandbytes' ``QuantState``. Values are rounded to its dtype first.
        dtype: the dtype that a dense copy has by default.
    """

    state: Any
    dtype: torch.dtype

    @property
    def name(self) -> str:  # type: ignore[override]
        """The format's name."""
        return str(self.state.quant_type).upper()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The stack's shape, as if it was dense."""
        return torch.Size(self.state.shape)

    def stored(
        self, packed: Tensor, dtype: torch.dtype, implementation: Implementation = "auto", offsets: Tensor | None = None
    ) -> Tensor:
        """Return the dense stack, rounded to the state's dtype first."""
        return dequantize(packed, _in_rows(self.state), dtype, implementation).view(self.shape)

    def expert(self, packed: Tensor, index: int) -> Tensor:
        """Return one expert's dense matrix in the format's dtype."""
        from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

        state, count = self.state, self.shape[1] * self.shape[2]
        if count % state.blocksize or count % 2:  # an expert begins inside a block
            return self.stored(packed, self.dtype)[index]
        absmax = state.absmax
        if state.nested:
            absmax = (dequantize_blockwise(absmax, state.state2) + state.offset).float()
        blocks, size = slice(*(count // state.blocksize * i for i in (index, index + 1))), count // 2
        rows = torch.Size((count // state.blocksize, state.blocksize))
        alone = QuantState(absmax[blocks], rows, state.code, state.blocksize, state.quant_type, state.dtype)
        bytes_here = packed.reshape(-1).view(torch.uint8)[index * size : (index + 1) * size]
        matrix: Tensor = dequantize_4bit(bytes_here[:, None], alone)
        return matrix.to(self.dtype).view(self.shape[1:])

    def to(self, device: torch.device | None, dtype: torch.dtype) -> Self:
        """Return the format with its tensors on this device (None leaves them), and with another dtype of copies."""
        state = copy.copy(self.state)
        if device is not None:
            state.absmax, state.code = _moved(state.absmax, device), _moved(state.code, device)
            if state.nested:
                state.offset, state.state2 = _moved(state.offset, device), copy.copy(state.state2)
                state.state2.absmax = _moved(state.state2.absmax, device)
                state.state2.code = _moved(state.state2.code, device)
        return replace(self, state=state, dtype=dtype)

    def saved(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the entries of a state dict: those that bitsandbytes saves for a 4-bit weight."""
        return {"": packed, **{f".{name}": value for name, value in self.state.as_dict(packed=True).items()}}

    def loaded(self, entries: Mapping[str, Tensor]) -> tuple[Tensor, Self] | None:
        """Return the packed bytes and their format from such entries, or None if they are of another format."""
        from bitsandbytes.functional import QuantState

        states = {name[1:]: value for name, value in entries.items() if name.startswith(".")}
        if "" not in entries or not any(name.startswith("quant_state.") for name in states):
            return None
        packed = entries[""]
        return packed, replace(self, state=QuantState.from_dict(states, packed.device))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on this device; from the meta device it comes with undefined values, as in ``to_empty``."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


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

    The bytes of a library whose kernels need another order have *layouts*: objects with a method ``unswizzle_data``,
    which returns bytes as ``[E, I / 2, O]``, and scales as ``[E, G, O]``.

    Attributes:
        scales: uint8 ``[E, O, G]``.
        shape: the stack's shape, as if it was dense: ``[E, O, I]``, or ``[E, I, O]`` if transposed.
        transposed: whether the stack is ``[E, I, O]``, as gpt-oss has it; the bytes don't differ.
        dtype: the dtype that a dense copy has by default.
        layout: the layout of the bytes, or None for the order above.
        scale_layout: the layout of the scales, or None.
    """

    scales: Tensor
    shape: torch.Size
    transposed: bool = False
    dtype: torch.dtype = torch.bfloat16
    layout: Any = None
    scale_layout: Any = None
    name = "MXFP4"

    @classmethod
    def of(cls, scales: Tensor, *, transposed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Self:
        """Return the format of a stack with these scales ``[E, O, G]``."""
        count, columns, groups = scales.shape
        inner = groups * BLOCK
        shape = torch.Size((count, inner, columns) if transposed else (count, columns, inner))
        return cls(scales, shape, transposed, dtype)

    def stored(
        self, packed: Tensor, dtype: torch.dtype, implementation: Implementation = "auto", offsets: Tensor | None = None
    ) -> Tensor:
        """Return the dense matrices, ``[E, O, I]``."""
        return dequantize_mxfp4(*self.plain(packed), dtype, implementation, offsets)

    def plain(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Return bytes ``[E, O, I / 2]`` and scales ``[E, O, G]``, in the order of the specification."""
        scales = self.scales
        if self.layout is not None:
            packed = self.layout.unswizzle_data(packed).transpose(-1, -2).contiguous()
        if self.scale_layout is not None:
            scales = self.scale_layout.unswizzle_data(scales).transpose(-1, -2).contiguous()
        return packed.reshape(*scales.shape[:2], -1), scales

    def expert(self, packed: Tensor, index: int) -> Tensor:
        """Return one expert's dense matrix in the format's dtype."""
        blocks, scales = self.plain(packed)
        matrix = dequantize_mxfp4(blocks[index, None], scales[index, None], self.dtype)[0]
        return matrix.t() if self.transposed else matrix

    def to(self, device: torch.device | None, dtype: torch.dtype) -> Self:
        """Return the format with its tensors on this device (None leaves them), and with another dtype of copies."""
        return replace(self, scales=self.scales if device is None else _moved(self.scales, device), dtype=dtype)

    def saved(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the entries of a state dict: those of gpt-oss's checkpoints."""
        blocks, scales = self.plain(packed)
        return {"_blocks": blocks.view(*scales.shape, BLOCK // 2), "_scales": scales}

    def loaded(self, entries: Mapping[str, Tensor]) -> tuple[Tensor, Self] | None:
        """Return the packed bytes and their format from such entries, or None if they are of another format."""
        if not {"_blocks", "_scales"} <= entries.keys():
            return None
        return entries["_blocks"], self.of(entries["_scales"], transposed=self.transposed, dtype=self.dtype)
