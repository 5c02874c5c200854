"""Fingerprints of a tensor's rows: equal rows have equal fingerprints, and different rows have different ones.

Definition, for x ``[N, ...]`` with F bit patterns b[n, i] in a row and fixed odd coefficients c[i, k]::

    fingerprint[n, k] = sum over i of b[n, i] * c[i, k]   (modulo 2 ** 64, k = 0, 1)

Two given rows that differ have the same fingerprint for about one in 2 ** 64 choices of the coefficients, or fewer. All
of it runs on the tensor's device, and the host does not wait.

Shape suffixes: N rows, F numbers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""The integers of each number of bytes. Eight bytes are two: with odd factors, two top bits of 64 would cancel."""
_AT_ONCE = 2**24
"""The numbers that are multiplied at once, 8 bytes each."""
_SEEDS = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""The factors of the finaliser of SplitMix64 (G. Steele et al., OOPSLA 2014), as signed numbers."""


@torch.no_grad()
def fingerprints(x: Tensor) -> Tensor:
    """Return a fingerprint of each row of ``x [N, ...]``, int64 ``[N, 2]``; two zeros are equal only in their sign."""
    if not x.numel():
        return torch.zeros(len(x), len(_SEEDS), dtype=torch.long, device=x.device)
    bits = x.detach().flatten(1).contiguous() if x.ndim > 1 else x.detach()[:, None].contiguous()
    bits = bits.view(_INTEGERS[x.element_size()])
    width = bits.shape[1]
    coefficients = [_coefficients(width, seed, x.device) for seed in _SEEDS]
    parts = bits.split(max(1, _AT_ONCE // width))
    return torch.cat([torch.stack([(part.long() * each).sum(1) for each in coefficients], 1) for part in parts])


def joined(prints: Sequence[Tensor]) -> Tensor:
    """Return one fingerprint, int64 ``[N, 2]``, for several of each row."""
    return fingerprints(torch.cat([*prints], 1))


def _coefficients(count: int, seed: int, device: torch.device) -> Tensor:
    """Return odd numbers that look random, int64 ``[count]``."""
    x = torch.arange(1, count + 1, device=device) * seed
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ (x >> shift)) * factor
    return (x ^ (x >> 31)) | 1
