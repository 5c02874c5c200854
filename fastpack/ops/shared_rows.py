"""Rows of which there are copies: from each row once to all of its copies, and back.

Definition, for x ``[U, ...]`` and the row ``source[t]`` of which t is a copy::

    spread(x)[t] = x[source[t]]          its gradient: that of a row is the sum over its copies
    first_copies(y)[u] = y[first[u]]     its gradient: zero for all other copies

The sum is made copy by copy in float32, rounded once, and without atomic additions, so that it is the same each time.
``index_select`` has it made by ``index_add_``, whose order on a GPU is another each time, and which in half precision
rounds once a copy.

Shape suffixes: T rows with copies, U different rows, R rows of which there are c copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once


@dataclass(frozen=True, eq=False)
class Copies:
    """Which of T rows are copies of which of U.

    Attributes:
        source: int64 ``[T]``: the row of U that each is a copy of.
        first: int64 ``[U]``: one of the copies of each.
        several: for each number c > 1 of copies that occurs: int64 ``[R]``, the rows of U of which there are so many,
            and int64 ``[R, c]``, their copies.
    """

    source: Tensor
    first: Tensor
    several: tuple[tuple[Tensor, Tensor], ...]


def spread(x: Tensor, copies: Copies, *, only_first: bool = False) -> Tensor:
    """``[U, ...]`` to ``[T, ...]``, in the same dtype.

    Args:
        only_first: the gradient of all but the first copies is known to be zero, and is left out of the sum.
    """
    result: Tensor = _Spread.apply(x, copies, only_first)
    return result


def first_copies(y: Tensor, copies: Copies) -> Tensor:
    """``[T, ...]`` to ``[U, ...]``, in the same dtype."""
    result: Tensor = _FirstCopies.apply(y, copies)
    return result


def sum_copies(grad_T: Tensor, copies: Copies) -> Tensor:
    """``[T, ...]`` to ``[U, ...]``: the sum over the copies of each row, in float32 or wider."""
    total = grad_T.index_select(0, copies.first)
    wide = torch.promote_types(grad_T.dtype, torch.float32)
    for rows, members in copies.several:
        each = grad_T.index_select(0, members.flatten()).unflatten(0, members.shape)
        total.index_copy_(0, rows, each.sum(1, dtype=wide).to(total.dtype))
    return total


class _Spread(torch.autograd.Function):
    # Indices are kept beside what autograd saves: nobody is to offload or to compute them again.

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies, only_first: bool) -> Tensor:
        ctx.copies, ctx.only_first = copies, only_first
        return x.index_select(0, copies.source)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        copies: Copies = ctx.copies
        if ctx.only_first:
            return grad.index_select(0, copies.first), None, None
        return sum_copies(grad, copies), None, None


class _FirstCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return y.index_select(0, copies.first)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        copies: Copies = ctx.copies
        zeros = grad.new_zeros(len(copies.source), *grad.shape[1:])
        return zeros.index_copy_(0, copies.first, grad), None
