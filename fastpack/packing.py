"""``PackedSeqLens``: where each sequence of a batch begins and ends.

Shape suffixes: B rows, S columns of the batch as it came; T tokens that are real; N sequences.

One object a batch, built once (:mod:`fastpack.packing_inputs` reads it from what a batch carries) and handed down by
keyword.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastpack.errors import PackingError

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class PackedSeqLens:
    """The lengths of the sequences of one batch, and what follows from them.

    Build one with :meth:`from_lengths`, or let the model build it from the batch. It is immutable; what is derived
    from it (a block mask, groups of equal length) is computed once and kept with it.

    Attributes:
        lengths: N Python ints, each at least 1: the tokens of each sequence, in order.
        cu_seqlens: int32 ``[N + 1]``, on the batch's device: offsets, from 0 to T.
        position_ids: int64 ``[1, T]``: the position of each token in its sequence.
        indices: int64 ``[T]``, where each token sits in the batch flattened to ``[B * S]``; None where every slot
            holds a real token.
        batch_shape: ``(B, S)`` of the batch that these lengths were read from; None where they were given alone.
        is_empty: True for a batch without a single real token. It is run as one throw-away token, whose results are
            dropped, so that gradients exist (and are zero) on every rank.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    position_ids: Tensor
    indices: Tensor | None = None
    batch_shape: tuple[int, int] | None = None
    is_empty: bool = False
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor, *, device: torch.device | str = "cpu") -> PackedSeqLens:
        """Build from the lengths of the sequences.

        Args:
            lengths: N ints, or a 1-D tensor of them. A tensor on a GPU costs one synchronisation.
            device: where the offsets and positions are made; the batch's device.

        Raises:
            PackingError: a length below 1, or no length at all.
        """
        return build_lengths(check_lengths(lengths), torch.device(device))

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.lengths)

    @cached_property
    def total_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @cached_property
    def max_seqlen(self) -> int:
        """The longest length."""
        return max(self.lengths)

    @cached_property
    def seq_idx(self) -> Tensor:
        """int32 ``[1, T]``: which sequence each token belongs to."""
        lengths = self.cu_seqlens.diff()
        order = torch.arange(self.num_sequences, dtype=torch.int32, device=lengths.device)
        return order.repeat_interleave(lengths, output_size=self.total_tokens)[None]

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Neighbouring sequences of equal length, as ``(first token, how many sequences, length)``."""
        found: list[tuple[int, int, int]] = []
        offset = 0
        for length in self.lengths:
            if found and found[-1][2] == length:
                first, count, _ = found[-1]
                found[-1] = (first, count + 1, length)
            else:
                found.append((offset, 1, length))
            offset += length
        return tuple(found)

    def memo(self, key: Any, build: Any) -> Any:
        """What ``build()`` returns, computed once for this batch under ``key``."""
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]

    def to(self, device: torch.device | str, non_blocking: bool = False, **_: Any) -> PackedSeqLens:
        """The same lengths with their tensors on ``device`` (accelerate calls this when it moves a batch)."""
        if torch.device(device) == self.cu_seqlens.device:
            return self
        indices = self.indices
        return PackedSeqLens(
            self.lengths,
            self.cu_seqlens.to(device, non_blocking=non_blocking),
            self.position_ids.to(device, non_blocking=non_blocking),
            None if indices is None else indices.to(device, non_blocking=non_blocking),
            self.batch_shape,
            self.is_empty,
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle leaves out what is only kept for speed: a block mask holds closures, which don't pickle.
        return {**self.__dict__, "_memo": {}}

    def flattened(self) -> PackedSeqLens:
        """The same sequences as the one row ``[1, T]`` that :meth:`unpad` makes of them."""
        return replace(self, indices=None, batch_shape=(1, self.total_tokens), _memo={})

    def unpad(self, x_BS: Tensor) -> Tensor:
        """``[B, S, ...]`` to ``[1, T, ...]``: the real tokens, in order."""
        flat = x_BS.reshape(-1, *x_BS.shape[2:])
        return (flat if self.indices is None else flat.index_select(0, self.indices))[None]

    def repad(self, x_1T: Tensor) -> Tensor:
        """``[1, T, ...]`` to ``[B, S, ...]``: each token back in its slot, zeros in the others."""
        if self.batch_shape is None:
            return x_1T
        rows, columns = self.batch_shape
        return self._scatter(x_1T.squeeze(0)).reshape(rows, columns, *x_1T.shape[2:])

    def repad_flat(self, x_T: Tensor) -> Tensor:
        """``[T, ...]`` to ``[B * S, ...]``, for what a stock model returns without a batch dimension."""
        return x_T if self.batch_shape is None else self._scatter(x_T)

    def _scatter(self, x_T: Tensor) -> Tensor:
        if self.batch_shape is None or self.indices is None:
            return x_T
        rows, columns = self.batch_shape
        if self.is_empty:
            # keeps the graph, with a gradient of zero, and drops the throw-away token, which may not be finite
            x_T = x_T.masked_fill(torch.ones_like(x_T, dtype=torch.bool), 0)
        return x_T.new_zeros(rows * columns, *x_T.shape[1:]).index_copy_(0, self.indices, x_T)

    def mask_first_labels(self, labels_BS: Tensor) -> Tensor:
        """A copy of ``labels`` in which the first label of each sequence is ignored.

        The loss shifts labels by one, so that label would be predicted from the last token of the sequence before.
        """
        slots = self.total_tokens if self.batch_shape is None else self.batch_shape[0] * self.batch_shape[1]
        if labels_BS.numel() != slots:
            raise PackingError(
                f"labels hold {labels_BS.numel()} entries (shape {tuple(labels_BS.shape)}), but the batch has {slots} "
                "slots. Pass labels of the same shape as input_ids."
            )
        if self.is_empty:
            return labels_BS
        starts = self.cu_seqlens[:-1].long()
        if self.indices is not None:
            starts = self.indices[starts]
        return labels_BS.reshape(-1).index_fill(0, starts, IGNORE_INDEX).reshape(labels_BS.shape)


def check_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """The lengths as Python ints; raise unless there are some and each is at least 1."""
    if isinstance(lengths, Tensor):
        check_vector(lengths)
    values = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    if not values or min(values) < 1:
        raise PackingError(f"packed_seq_lens must be lengths of at least 1 token each; got {values[:8]}.")
    return values


def check_vector(lengths: Tensor) -> None:
    """Raise unless a tensor of lengths is 1-D and whole."""
    if lengths.ndim != 1 or lengths.is_floating_point():
        raise PackingError(
            f"packed_seq_lens is a tensor of shape {tuple(lengths.shape)} and {lengths.dtype}; pass a 1-D tensor of "
            "whole lengths."
        )


def build_lengths(
    lengths: Sequence[int],
    device: torch.device,
    *,
    positions: Tensor | None = None,
    indices: Tensor | None = None,
    batch_shape: tuple[int, int] | None = None,
    is_empty: bool = False,
) -> PackedSeqLens:
    """Offsets and positions from lengths that were checked; ``positions`` and ``indices`` ``[T]`` as they are."""
    sizes = torch.tensor(lengths, dtype=torch.long)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.long)
    torch.cumsum(sizes, 0, out=offsets[1:])
    if positions is None:
        total = int(offsets[-1])
        positions = torch.arange(total) - offsets[:-1].repeat_interleave(sizes, output_size=total)
    return PackedSeqLens(
        lengths=tuple(lengths),
        cu_seqlens=offsets.to(device=device, dtype=torch.int32, non_blocking=True),
        position_ids=positions[None].to(device, non_blocking=True),
        indices=None if indices is None else indices.to(device, non_blocking=True),
        batch_shape=batch_shape,
        is_empty=is_empty,
    )
