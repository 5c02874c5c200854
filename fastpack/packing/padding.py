"""``Padding``: the slots of a batch that hold tokens, for un-padding and re-padding.

Shape suffixes: B rows and S columns of the original batch; T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastpack.ops.autograd import reshaped


@dataclass(frozen=True, eq=False)
class Padding:
    """The slots of a batch, and the token in each.

    Attributes:
        batch_shape: ``(B, S)``; None if only lengths are known.
        indices: int64 ``[T]``, the slot of each token in the batch flattened to ``[B * S]``; None if every slot holds a
            token.
        real_tokens: the number of the batch's own tokens, or None for all T. The tokens after them are bucket padding,
            which un-padding copies from the batch's first token and re-padding drops.
        bucket_start: 0-d int32 on the batch's device, the slot in which the bucket padding inside a row ``[1, T]``
            begins. It is a tensor, since a compiled region must not read a number that changes. None without a bucket.
        is_empty: whether the batch has no real token. The batch then runs as one throw-away token, whose results are
            dropped, so that every rank has gradients (of zero).
        starts_rows: whether the host knows that every sequence begins in column 0 of its row.
    """

    batch_shape: tuple[int, int] | None = None
    indices: Tensor | None = None
    real_tokens: int | None = None
    bucket_start: Tensor | None = None
    is_empty: bool = False
    starts_rows: bool = False

    @property
    def is_packed_row(self) -> bool:
        """True if the batch came as one row ``[1, T]`` without padding, so that un-padding changes nothing."""
        return self.indices is None and (self.batch_shape is None or self.batch_shape[0] == 1)

    def mask(self) -> Tensor | None:
        """Return a mask of the batch, int64 ``[B, S]``: 1 for real tokens, 0 for padding; None without padding."""
        if self.batch_shape is not None and self.bucket_start is not None:
            slots = torch.arange(self.batch_shape[1], device=self.bucket_start.device)
            return (slots < self.bucket_start).long()[None]
        if self.batch_shape is None or self.indices is None:
            return None
        slots = self.indices.new_zeros(self.batch_shape[0] * self.batch_shape[1])
        return slots.index_fill(0, self.indices, 0 if self.is_empty else 1).view(self.batch_shape)

    def unpad(self, x_BS: Tensor) -> Tensor:
        """Un-pad ``[B, S, ...]`` to ``[1, T, ...]``: the real tokens in order, then bucket padding."""
        flat = x_BS.reshape(-1, *x_BS.shape[2:])
        return (flat if self.indices is None else flat.index_select(0, self.indices))[None]

    def repad(self, x_1T: Tensor) -> Tensor:
        """Re-pad ``[1, T, ...]`` to ``[B, S, ...]``: each real token in its slot, zeros in the other slots."""
        if self.batch_shape is None:
            return x_1T if self.real_tokens is None else x_1T[:, : self.real_tokens]
        shape = (*self.batch_shape, *x_1T.shape[2:])
        x_T = x_1T.squeeze(0)
        slots = self.repad_flat(x_T)
        return reshaped(slots, shape) if len(slots) > len(x_T) else slots.reshape(shape)  # a new tensor, or x itself

    def repad_flat(self, x_T: Tensor) -> Tensor:
        """Re-pad ``[T, ...]`` to ``[B * S, ...]``, for outputs that a stock model returns without a batch dimension."""
        if self.real_tokens is not None:
            x_T = x_T[: self.real_tokens]
        if self.batch_shape is None or self.indices is None:
            return x_T
        rows, columns = self.batch_shape
        if self.is_empty:
            # keeps the graph, with a gradient of zero; the throw-away token is overwritten, since it may not be finite
            x_T = x_T.masked_fill(torch.ones_like(x_T, dtype=torch.bool), 0)
        elif rows * columns == len(x_T):
            return x_T  # every slot holds a real token, and the indices only serve the bucket padding
        slots = self.indices[: len(x_T)]
        return x_T.new_zeros(rows * columns, *x_T.shape[1:]).index_copy_(0, slots, x_T)
