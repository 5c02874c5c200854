"""A block of experts that are spread over ranks: a token's rows go to the ranks of the experts that it chose.

Every rank has tokens of its own, and some of the experts. Rows are sorted by expert, exchanged, run through the experts
there, and exchanged back; the results are added up where the token is, with its weights, in float32.

Shape suffixes: T tokens of this rank, K choices of a token, R = T K rows, S rows that came here, H hidden size; E
experts, e of them on each of G ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.exchange import Group, exchange
from fastpack.ops.linear.operands import Lora

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Runs this rank's experts on rows ``[S, H]`` with choices and weights ``[S, 1]``; returns ``[S, H]``."""


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """The ranks over which the experts of a block are spread, equally many on each, in order.

    Attributes:
        ranks: G.
        rank: this rank's place.
        group: the process group.
        own: e, the number of this rank's experts.
    """

    ranks: int
    rank: int
    group: Group
    own: int

    def lora(self, lora: Lora) -> Lora:
        """Return the part of an update that belongs to this rank's experts; its gradient is zero elsewhere.

        A ``[E r, I]`` holds the experts one after the other; in B ``[O, r E]`` the expert is the fastest index.
        """
        begin, experts = self.rank * self.own, self.ranks * self.own
        a = lora.a.unflatten(0, (experts, -1)).narrow(0, begin, self.own).flatten(0, 1)
        b = lora.b.unflatten(1, (-1, experts)).narrow(2, begin, self.own).flatten(1, 2)
        return Lora(a, b, lora.scale, lora.dropout)


def experts_across_ranks(x: Tensor, index: Tensor, weights: Tensor, run: Run, place: ExpertRanks) -> Tensor:
    """Run each token through the experts that it chose, wherever they are; every rank calls this at once.

    The host waits for the device once, to know how many rows come.

    Args:
        x: ``[T, H]``.
        index: int64 or int32 ``[T, K]``, the chosen experts of all E. A choice of E or more adds nothing.
        weights: ``[T, K]`` of any float dtype.
        run: runs this rank's experts.
        place: where the experts are.

    Returns:
        ``[T, H]`` in x's dtype.
    """
    tokens, choices = index.shape
    experts = place.ranks * place.own
    left_out = index >= experts
    weights = weights.masked_fill(left_out, 0.0)
    chosen = index.masked_fill(left_out, place.rank * place.own).flatten().long()  # such rows stay here
    order = chosen.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device).scatter_add_(0, chosen, torch.ones_like(chosen))
    coming = exchange(counts, [place.own] * place.ranks, [place.own] * place.ranks, place.group)
    send, receive = torch.stack([counts, coming]).view(2, place.ranks, place.own).sum(2).tolist()
    # a permutation, whose gradient adds nothing up; the sum over choices is that of the expanded dimension
    rows = x.unsqueeze(1).expand(tokens, choices, -1).flatten(0, 1).index_select(0, order)
    came = exchange(rows, send, receive, place.group)
    local = torch.arange(place.own, device=x.device).repeat(place.ranks)
    local = local.repeat_interleave(coming, output_size=len(came))
    results = run(came, local[:, None], torch.ones_like(local[:, None], dtype=weights.dtype))
    back = exchange(results, receive, send, place.group)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    each = back.index_select(0, inverse).view(tokens, choices, -1)
    return (each.float() * weights.float()[..., None]).sum(1).to(x.dtype)


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.factor, None


def with_mean_gradient(weight: Tensor, ranks: int) -> Tensor:
    """Return a weight whose gradient, which sums up all ranks' losses, is that of their mean."""
    return _Scaled.apply(weight, 1 / ranks) if weight.requires_grad else weight
