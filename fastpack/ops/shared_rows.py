"""Gathers between unique rows and their copies, such as the tokens of a prefix that several rows share.

Definition, for x ``[U, ...]``, y ``[T, ...]``, and t a copy of row ``source[t]``::

    spread(x)[t] = x[source[t]]          gradient of a row: the sum over its copies
    first_copies(y)[u] = y[first[u]]     gradient of all other copies: zero

The sum over copies is computed in float32 and rounded once, without atomic additions, so that it is the same on every
run. The backward of ``index_select`` uses ``index_add_`` instead: its order on a GPU differs from run to run, and in
half precision it rounds once for each copy.

Shape suffixes: T rows with copies, U unique rows, R rows that have c copies each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once


@dataclass(frozen=True, eq=False)
class Copies:
    """A map between T rows and the U unique rows that they are copies of.

    Attributes:
        source: int64 ``[T]``: for each of the T rows, the index of its unique row.
        first: int64 ``[U]``: for each unique row, the index of one of its copies.
        several: one pair for each number of copies c > 1 that occurs: int64 ``[R]``, the unique rows with c copies, and
            int64 ``[R, c]``, the indices of their copies.
    """

    source: Tensor
    first: Tensor
    several: tuple[tuple[Tensor, Tensor], ...]


def copies_of(source: Tensor, first: Tensor) -> Copies:
    """Return the map for :attr:`Copies.source` and :attr:`Copies.first`, on the host."""
    counts = source.bincount(minlength=len(first))
    members = source.argsort(stable=True)
    begins = counts.cumsum(0) - counts
    by_count = [(counts == count).nonzero()[:, 0] for count in counts.unique().tolist() if count > 1]
    several = [(rows, members[begins[rows][:, None] + torch.arange(int(counts[rows[0]]))]) for rows in by_count]
    return Copies(source, first, tuple(several))


def spread(x: Tensor, copies: Copies, *, only_first: bool = False) -> Tensor:
    """Copy each unique row to all of its copies.

    Args:
        x: ``[U, ...]``, the unique rows.
        copies: the map of copies.
        only_first: leave all but the first copies out of the gradient's sum, since their gradients are known to be
            zero.

    Returns:
        ``[T, ...]``, in the dtype of ``x``.
    """
    return _Spread.apply(x, copies, only_first)


def first_copies(y: Tensor, copies: Copies) -> Tensor:
    """Return the first copy of each unique row: ``[T, ...]`` to ``[U, ...]``, in the same dtype."""
    return _FirstCopies.apply(y, copies)


def sum_copies(grad_T: Tensor, copies: Copies) -> Tensor:
    """Sum over the copies of each unique row, ``[T, ...]`` to ``[U, ...]``, in float32 or wider."""
    total = grad_T.index_select(0, copies.first)
    sum_dtype = torch.promote_types(grad_T.dtype, torch.float32)
    for rows, members in copies.several:
        each = grad_T.index_select(0, members.flatten()).unflatten(0, members.shape)
        total.index_copy_(0, rows, each.sum(1, dtype=sum_dtype).to(total.dtype))
    return total


class _Spread(torch.autograd.Function):
    # The indices are attributes, not saved tensors: hooks should neither offload nor recompute them.

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
