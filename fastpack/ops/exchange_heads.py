"""Exchange this rank's tokens of all heads for all tokens of this rank's heads, between the ranks of a group, and back.

Each way is the gradient of the other. Heads go into one buffer, with one copy, and so come tokens out of one.

Shape suffixes: T tokens of all ranks, t of them on this rank, G ranks, H heads, h = H / G of one rank, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.exchange import Group, exchange

WORD = torch.complex128
"""The dtype of the words that are copied: 16 bytes, so that a strided copy is as fast as another one."""


@dataclass(frozen=True, eq=False)
class _Ranks:
    """The ranks of a group, and their tokens.

    Attributes:
        sizes: the tokens of each rank, G numbers.
        own: t, those of this rank.
        group: the process group.
    """

    sizes: Sequence[int]
    own: int
    group: Group


def to_heads(tensors: Sequence[Tensor], sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Return all tokens of this rank's heads, from this rank's tokens of all heads, in one exchange.

    Args:
        tensors: each ``[t, H, D]``; H is a multiple of G. Dtypes are promoted to one.
        sizes: the tokens of each rank, G numbers that sum to T.
        group: the process group.

    Returns:
        Each ``[T, h, D]``, contiguous in the last two dimensions.
    """
    return list(_ToHeads.apply(_Ranks(sizes, len(tensors[0]), group), *tensors))


def to_tokens(x: Tensor, sizes: Sequence[int], rank: int, group: Group) -> Tensor:
    """Return this rank's tokens of all heads, ``[t, H, D]``, from all tokens of this rank's heads, ``[T, h, D]``."""
    (out,) = _ToTokens.apply(_Ranks(sizes, sizes[rank], group), x)
    return out


class _ToHeads(torch.autograd.Function):
    """The autograd Function of :func:`to_heads`."""

    @staticmethod
    def forward(ctx: Any, ranks: _Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        count = len(ranks.sizes)
        sides = [(x.shape[1] // count, x.shape[2]) for x in tensors]
        widths = [heads * size for heads, size in sides]
        buffer = tensors[0].new_empty(count, ranks.own, sum(widths), dtype=_promoted(tensors))
        for x, part, side in zip(tensors, buffer.split(widths, 2), sides, strict=True):
            _copy(x.unflatten(1, (count, -1)).transpose(0, 1), part.unflatten(2, side))
        rows, _ = exchange(buffer.flatten(0, 1), [ranks.own] * count, ranks.sizes, ranks.group)
        return tuple(part.unflatten(1, side) for part, side in zip(rows.split(widths, 1), sides, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_ToTokens.apply(ctx.ranks, *grads)


class _ToTokens(torch.autograd.Function):
    """The autograd Function of :func:`to_tokens`, for several tensors."""

    @staticmethod
    def forward(ctx: Any, ranks: _Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        count = len(ranks.sizes)
        widths = [x.shape[1] * x.shape[2] for x in tensors]
        if len(tensors) == 1:
            buffer = tensors[0].flatten(1)
        else:
            buffer = tensors[0].new_empty(len(tensors[0]), sum(widths), dtype=_promoted(tensors))
            for x, part in zip(tensors, buffer.split(widths, 1), strict=True):
                _copy(x, part.unflatten(1, x.shape[1:]))
        rows, _ = exchange(buffer, ranks.sizes, [ranks.own] * count, ranks.group)
        outs = [rows.new_empty(ranks.own, count * x.shape[1], x.shape[2]) for x in tensors]
        for x, out, part in zip(tensors, outs, rows.unflatten(0, (count, ranks.own)).split(widths, 2), strict=True):
            _copy(part.unflatten(2, x.shape[1:]), out.unflatten(1, (count, -1)).transpose(0, 1))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_ToHeads.apply(ctx.ranks, *grads)


def _promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors))


def _copy(x: Tensor, out: Tensor) -> None:
    """Copy ``x`` to ``out``, of the same shape, in words if the last dimension of both consists of these."""
    if x.dtype == out.dtype and _has_words(x) and _has_words(out):
        x, out = x.view(WORD), out.view(WORD)
    out.copy_(x)


def _has_words(x: Tensor) -> bool:
    elements = WORD.itemsize // x.element_size()
    steps = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
    return x.stride(-1) == 1 and x.data_ptr() % WORD.itemsize == 0 and all(step % elements == 0 for step in steps)
