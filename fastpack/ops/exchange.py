"""The rows of all ranks of a group, and sums over the ranks of rows for each rank: either is the other's gradient.

Definition, for ranks r and s, with x_r the rows of rank r, and y_r rows on rank r for all ranks, in pieces::

    all_rows(x) = concatenation over r of x_r
    sums(y)_s = sum over r of piece s of y_r, in float32, rounded once

Where each rank computes the whole of one loss, as the ranks of a context-parallel group do, a rank's gradients are its
own share times the number of ranks: their mean over the ranks, which data-parallel engines take, is the gradient of the
loss.

Shape suffixes: T rows of all ranks, t rows of this rank, G ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastpack.ops.autograd import differentiable_once, without_memory

Group = Any
"""A ``torch.distributed`` process group; torch builds without the package have no such class."""


def all_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Return the rows of all ranks, ``[T, ...]``, from those of this rank, ``[t, ...]``.

    Args:
        x: this rank's rows.
        sizes: the rows of each rank, G numbers that sum to T.
        group: the process group; every rank calls this at once, with the same dtype and trailing shape.
    """
    return begin_all_rows(x, sizes, group).wait()


def begin_all_rows(x: Tensor, sizes: Sequence[int], group: Group) -> UnderWay:
    """Begin what :func:`all_rows` does; see :class:`UnderWay`."""
    return _begin(x, _Link([*sizes], len(x), group, sums=False))


class Sums:
    """Sums over the ranks of their rows for this one: ``[T, ...]`` to ``[t, ...]``, which begin later.

    Args:
        sizes: how many rows are for each rank, G numbers that sum to T.
        rank: this rank's place.
        group: the process group.
    """

    def __init__(self, sizes: Sequence[int], rank: int, group: Group) -> None:
        """Set up; nothing is sent."""
        self._link = _Link([*sizes], sizes[rank], group, sums=True)

    def await_gradient(self, stand_in: Tensor) -> Tensor:
        """Return ``stand_in``, in whose backward the gradient of what :meth:`begin` gets is waited for.

        Without this it is waited for in the backward of the beginning. Autograd runs last what was recorded first: with
        several sums, it would wait for all before the backward of what was recorded between this and the beginnings.

        Args:
            stand_in: ``[T, ...]``. From the result, functions that return their gradient unread lead to the input of
                :meth:`begin`.
        """
        self._link.awaited_before = stand_in.requires_grad
        result: Tensor = _Await.apply(stand_in, self._link)
        return result

    def begin(self, y: Tensor) -> UnderWay:
        """Begin to add up rows for each rank, in order; see :class:`UnderWay`.

        Every rank calls this at once, with the same dtype and trailing shape.
        """
        return _begin(y, self._link)


def exchange(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, *, async_op: bool = False
) -> tuple[Tensor, Any]:
    """Send a piece of ``x`` to each rank, and return the pieces that come, in order, and torch's handle or None.

    It has no gradient.

    Args:
        x: ``[sum(send), ...]``.
        send: the rows of the piece for each rank.
        receive: the rows that come from each rank.
        group: the process group; every rank calls this at once, with the same dtype and trailing shape.
        async_op: whether to return before the rows are there; the handle's ``wait()`` waits for them.
    """
    rows = x.new_empty(sum(receive), *x.shape[1:])
    return rows, dist.all_to_all_single(rows, x.contiguous(), [*receive], [*send], group, async_op=async_op)


@dataclass(frozen=True, eq=False)
class UnderWay:
    """Rows or sums under way. The device may do other work meanwhile. Its gradients have no gradients.

    The exchange of the gradients starts in the backward of :meth:`wait`, and is waited for in that of the beginning, or
    of :meth:`Sums.await_gradient`.

    Attributes:
        sent: stands for what was sent in autograd's graph; it has no memory.
        link: what both directions share.
    """

    sent: Tensor
    link: _Link

    def wait(self) -> Tensor:
        """Return what came; work that is launched from now on runs afterwards."""
        rows: Tensor = _End.apply(self.sent, self.link)
        return rows


@dataclass(eq=False)
class _Link:
    """An exchange, and in the backward that of its gradients.

    Attributes:
        sizes: the rows of each rank.
        own: t, those of this rank.
        group: the process group.
        sums: whether the forward returns sums, and the backward all rows; else the other way around.
        awaited_before: whether what was recorded before the beginning waits in the backward, and not the beginning.
        under_way: the memory for what comes, and torch's handle, which holds memory, too; None before and after.
    """

    sizes: list[int]
    own: int
    group: Group
    sums: bool
    awaited_before: bool = False
    under_way: tuple[Tensor, Any] | None = None

    def start(self, x: Tensor, *, backward: bool = False) -> None:
        alike = [self.own] * len(self.sizes)
        if self.sums != backward:
            self.under_way = exchange(x, self.sizes, alike, self.group, async_op=True)
        elif self.sizes == alike:
            rows = x.new_empty(sum(self.sizes), *x.shape[1:])
            gather = (
                getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            )  # its name up to torch 2.12
            self.under_way = rows, gather(rows, x.contiguous(), self.group, async_op=True)
        else:
            copies = x.expand(len(self.sizes), *x.shape).flatten(0, 1)
            self.under_way = exchange(copies, alike, self.sizes, self.group, async_op=True)

    def finish(self, *, backward: bool = False) -> Tensor:
        assert self.under_way is not None, "nothing was started"
        (rows, work), self.under_way = self.under_way, None
        work.wait()
        if self.sums == backward:
            return rows
        pieces = rows.unflatten(0, (len(self.sizes), self.own))
        return pieces[0] + pieces[1] if len(pieces) == 2 else pieces.sum(0)  # the same, but torch's sum is slower


def _begin(x: Tensor, link: _Link) -> UnderWay:
    return UnderWay(_Begin.apply(x, link), link)


class _Begin(torch.autograd.Function):
    """Start an exchange; in the backward, wait for that of the gradients, or pass on a tensor that stands for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        link.start(x)
        return without_memory(x, x.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad if ctx.link.awaited_before else ctx.link.finish(backward=True), None


class _Await(torch.autograd.Function):
    """The identity; in the backward, wait for the gradients."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        return stand_in.view_as(stand_in)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.link.finish(backward=True), None


class _End(torch.autograd.Function):
    """Wait for an exchange; in the backward, start that of the gradients."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, link: _Link) -> Tensor:
        ctx.link, ctx.shape = link, stand_in.shape
        return link.finish()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.link.start(grad, backward=True)
        return without_memory(grad, ctx.shape), None
