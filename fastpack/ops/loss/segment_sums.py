"""Sums of tokens' values over the sequences of a batch, on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """The sum of ``[T]`` values between each two of int64 offsets ``[N + 1]``, float64 ``[N]`` (float32 on MPS).

    Values past the last offset belong to none.
    """
    owner = torch.bucketize(torch.arange(len(values), device=values.device), offsets[1:].contiguous(), right=True)
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    sums = torch.zeros(len(offsets), dtype=wide, device=values.device).index_add(0, owner, values.to(wide))
    return sums[:-1]
