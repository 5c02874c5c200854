"""Sums of values of tokens over the sequences of a batch, computed on the device.

Definition::

    segment_sums(values, offsets)[i] = values[offsets[i] : offsets[i + 1]].double().sum()

Shape suffixes: T tokens, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum the values between every two neighbouring offsets.

    Args:
        values: ``[T]``. Values past the last offset are left out.
        offsets: int64 ``[N + 1]``, where each sequence begins, and where the last one ends.

    Returns:
        The sums, float64 ``[N]`` (float32 on MPS).

    Example:
        >>> segment_sums(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 3]))
        tensor([3., 3.], dtype=torch.float64)
    """
    owner = torch.bucketize(torch.arange(len(values), device=values.device), offsets[1:].contiguous(), right=True)
    sum_dtype = torch.float32 if values.device.type == "mps" else torch.float64
    sums = torch.zeros(len(offsets), dtype=sum_dtype, device=values.device).index_add(0, owner, values.to(sum_dtype))
    return sums[:-1]
