"""Recurrences token by token, as their papers define them, and the lengths that the tests of ops run them on."""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 16
"""The tokens of a chunk in these tests."""
LENGTHS = [[1], [SIZE - 1], [SIZE], [SIZE + 1], [200], [3, 1, 40, 2, 1, 1, 33, 16], [2] * 30]


def token_by_token(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, lengths: list[int]) -> Tensor:
    """Compute Mamba-2's scan, ``[T, H, V]``."""
    B, C = (y.repeat_interleave(x.shape[1] // y.shape[1], 1) for y in (B, C))
    out = []
    for tokens in torch.arange(len(x)).split(lengths):
        state = x.new_zeros(x.shape[1], B.shape[2], x.shape[2])
        for t in tokens:
            state = (A * dt[t]).exp()[:, None, None] * state + torch.einsum("h,hk,hv->hkv", dt[t], B[t], x[t])
            out.append(torch.einsum("hk,hkv->hv", C[t], state))
    return torch.stack(out)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int], silu: bool) -> Tensor:
    """Convolve each sequence with zeros before it, ``[T, C]``."""
    taps = weight.shape[1]
    out = []
    for sequence in x.split(lengths):
        before = torch.cat([x.new_zeros(taps - 1, x.shape[1]), sequence])
        out.append(torch.stack([(before[t : t + taps] * weight.T).sum(0) for t in range(len(sequence))]))
    result = torch.cat(out) if bias is None else torch.cat(out) + bias
    return torch.nn.functional.silu(result) if silu else result
