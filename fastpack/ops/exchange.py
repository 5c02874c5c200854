"""Exchange rows between the ranks of a group, and their gradients back.

Definition, for ranks r and s, with x_r the rows of rank r, cut into one piece for each rank::

    exchange(x)_s = concatenation over r of piece s of x_r        gradient: the exchange of the gradients, back

A sum of what all ranks compute has these gradients. Where each rank computes the whole of one loss, as the ranks of a
context-parallel group do, a rank's gradients are therefore its own share times the number of ranks: their mean over the
ranks, which data-parallel engines take, is the gradient of the loss.

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


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Send a piece of ``x`` to each rank of a group, and return the pieces that the ranks send to this one, in order.

    Args:
        x: ``[sum(send), ...]``.
        send: the rows of the piece for each rank.
        receive: the rows that come from each rank.
        group: the process group; every rank calls this at once, with the same dtype and trailing shape.

    Returns:
        ``[sum(receive), ...]``.
    """
    out: Tensor = _Exchange.apply(x, list(send), list(receive), group)
    return out


def begin_exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Exchange:
    """Begin what :func:`exchange` does, with the same arguments; it can be differentiated once.

    The exchange of the gradients starts in the backward of :meth:`Exchange.wait`, and is waited for in that of this
    function.
    """
    link = _Link([*send], [*receive], group)
    return Exchange(_Begin.apply(x, link), link)


def send_rows(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, *, async_op: bool = False
) -> tuple[Tensor, Any]:
    """Do what :func:`exchange` does, without gradients, and return also torch's handle, None unless ``async_op``."""
    rows = x.new_empty(sum(receive), *x.shape[1:])
    return rows, dist.all_to_all_single(rows, x.contiguous(), [*receive], [*send], group, async_op=async_op)


@dataclass(frozen=True, eq=False)
class Exchange:
    """An exchange under way. The device may do other work meanwhile.

    Attributes:
        sent: stands for what was sent in autograd's graph; it has no memory.
        link: what both directions share.
    """

    sent: Tensor
    link: _Link

    def wait(self) -> Tensor:
        """Return the pieces that came; work that is launched from now on runs afterwards."""
        rows: Tensor = _End.apply(self.sent, self.link)
        return rows


@dataclass(eq=False)
class _Link:
    """An exchange, and in the backward that of its gradients.

    Attributes:
        send: the rows of the piece for each rank.
        receive: the rows that come from each rank.
        group: the process group.
        to_all: whether every rank gets the same piece, which is there once.
        under_way: the memory for what comes, and torch's handle, which holds memory, too; None before and after.
    """

    send: list[int]
    receive: list[int]
    group: Group
    to_all: bool = False
    under_way: tuple[Tensor, Any] | None = None

    def start(self, x: Tensor) -> None:
        if self.to_all and len(set(self.receive)) == 1:
            rows = x.new_empty(sum(self.receive), *x.shape[1:])
            self.under_way = rows, dist.all_gather_into_tensor(rows, x.contiguous(), self.group, async_op=True)
            return
        x = _copies(x, len(self.send)) if self.to_all else x
        self.under_way = send_rows(x, self.send, self.receive, self.group, async_op=True)

    def start_back(self, grad: Tensor) -> None:
        self.under_way = send_rows(grad, self.receive, self.send, self.group, async_op=True)

    def finish(self) -> Tensor:
        assert self.under_way is not None, "begin_exchange can be differentiated once, and waited for once"
        (rows, work), self.under_way = self.under_way, None
        work.wait()
        return rows


class _Begin(torch.autograd.Function):
    """Start an exchange; in the backward, wait for that of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        link.start(x)
        return without_memory(x, x.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        link = ctx.link
        grad = link.finish()
        return grad.unflatten(0, (len(link.send), link.send[0])).sum(0) if link.to_all else grad, None


class _End(torch.autograd.Function):
    """Wait for an exchange; in the backward, start that of the gradients."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, link: _Link) -> Tensor:
        ctx.link, ctx.shape = link, stand_in.shape
        return link.finish()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.link.start_back(grad)
        return without_memory(grad, ctx.shape), None


class _Exchange(torch.autograd.Function):
    """The autograd Function of :func:`exchange`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return send_rows(x, send, receive, group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def all_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Return the rows of all ranks, ``[T, ...]``, from those of this rank, ``[t, ...]``; gradients are summed."""
    return exchange(_copies(x, len(sizes)), [len(x)] * len(sizes), sizes, group)


def begin_all_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Exchange:
    """Begin what :func:`all_rows` does; where ranks have equally many rows, without copies of ``x``."""
    link = _Link([len(x)] * len(sizes), [*sizes], group, to_all=True)
    return Exchange(_Begin.apply(x, link), link)


def _copies(x: Tensor, ranks: int) -> Tensor:
    return x.expand(ranks, *x.shape).flatten(0, 1)
