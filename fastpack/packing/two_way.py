"""Blocks of tokens that see each other in both directions: the images of a batch, or a prompt as in PaliGemma.

A block is data for each token, never a mask of size T x T. How a layer combines blocks with its window is the layer's
own (:data:`TwoWay`); :func:`seen_ranges` turns both into the range of keys that each query sees.

Shape suffixes: T tokens of all sequences, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fastpack.errors import PackingError

TwoWay = Literal["in_window", "whole"]
"""How a layer uses a batch's blocks.

- ``in_window``: a query sees the later tokens of its block, and its window limits what it sees before itself, in its
  block too: ``window and (causal or block)`` (Gemma 3 and 4).
- ``whole``: a query sees its whole block, and its window limits the tokens before the block: ``(window and causal) or
  block`` (PaliGemma).

The two are the same without a window. A window never limits what a query sees after itself.
"""


class Sequences(Protocol):
    """The part of a :class:`fastpack.packing.seqlens.PackedSeqLens` that says where sequences begin."""

    @property
    def cu_seqlens(self) -> Tensor:
        """The offsets of the sequences, int32 ``[N + 1]``."""

    @property
    def seq_idx(self) -> Tensor:
        """The sequence that each token belongs to, int32 ``[1, T]``."""


@dataclass(frozen=True, eq=False)
class TwoWayBlocks:
    """The block that each token belongs to. A token outside of any image is a block of its own.

    Blocks lie inside sequences, and no token of a block is outside of it: neither ``first`` nor ``end`` falls from one
    token to the next.

    Attributes:
        first: int32 ``[T]``, the first token of each token's block, as an index of the T packed tokens.
        end: int32 ``[T]``, one past the last token of each token's block.
    """

    first: Tensor
    end: Tensor

    @classmethod
    def of(cls, packed: Sequences, number_1T: Tensor) -> TwoWayBlocks:
        """Build from block numbers. Everything is computed on their device, and the host does not wait.

        Args:
            packed: where sequences begin.
            number_1T: integers ``[1, T]``, -1 for a token without a block. Neighbours of one sequence with the same
                number that is not negative are one block; no block runs into the next sequence.

        Raises:
            PackingError: there is not one number for each token.

        Example:
            >>> packed = PackedSeqLens.from_lengths([4, 2])
            >>> blocks = TwoWayBlocks.of(packed, torch.tensor([[-1, 0, 0, 0, 0, -1]]))
            >>> blocks.first.tolist(), blocks.end.tolist()
            ([0, 1, 1, 1, 4, 5], [1, 4, 4, 4, 5, 6])
        """
        sequence = packed.seq_idx
        if number_1T.shape != sequence.shape or number_1T.is_floating_point():
            raise PackingError(
                f"block numbers are {tuple(number_1T.shape)} of {number_1T.dtype}; the batch needs integers "
                f"{tuple(sequence.shape)}, one for each packed token."
            )
        number, sequence = number_1T[0], sequence[0]
        joined = (number[1:] == number[:-1]) & (number[1:] >= 0) & (sequence[1:] == sequence[:-1])
        token = torch.arange(len(number), dtype=torch.int32, device=number.device)
        edge = joined.new_zeros(1)
        first = token.masked_fill(torch.cat([edge, joined]), 0).cummax(0).values
        end = (token + 1).masked_fill(torch.cat([joined, edge]), len(number))
        return cls(first, end.flip(0).cummin(0).values.flip(0))

    def padded(self, total_tokens: int) -> TwoWayBlocks:
        """Return the same blocks for ``total_tokens`` tokens, each further one a block of its own."""
        token = torch.arange(len(self.first), total_tokens, dtype=torch.int32, device=self.first.device)
        return TwoWayBlocks(torch.cat([self.first, token]), torch.cat([self.end, token + 1]))


@dataclass(frozen=True, eq=False)
class SeenRanges:
    """The range of keys that each query sees, and the range of queries that see each key.

    Each attribute is int32 ``[T]``, indices of the T packed tokens, and never falls from one token to the next. A
    query sees itself. So do queries of a key's range form a range.

    Attributes:
        first_key, end_key: the first key that a query sees, and one past the last.
        first_query, end_query: the first query that sees a key, and one past the last.
    """

    first_key: Tensor
    end_key: Tensor
    first_query: Tensor
    end_query: Tensor


def seen_ranges(packed: Sequences, blocks: TwoWayBlocks, window: int | None, two_way: TwoWay) -> SeenRanges:
    """Return what each query of a batch with blocks sees. The host does not wait for the device.

    Args:
        packed: where sequences begin.
        blocks: the batch's blocks.
        window: how many tokens a query sees up to itself, or None.
        two_way: how the layer uses the blocks.
    """
    first_key = packed.cu_seqlens[:-1].index_select(0, packed.seq_idx[0])
    token = torch.arange(len(first_key), dtype=torch.int32, device=first_key.device)
    if window is not None:
        edge = token - (window - 1)
        first_key = torch.maximum(first_key, edge if two_way == "in_window" else torch.minimum(edge, blocks.first))
    first_query = torch.searchsorted(blocks.end, token, right=True, out_int32=True)  # queries that end before the key
    end_query = torch.searchsorted(first_key, token, right=True, out_int32=True)
    return SeenRanges(first_key, blocks.end, first_query, end_query)
