"""Routing: the rows of all experts, sorted by expert, with shapes that don't depend on the choices.

Slots and rows are defined in :mod:`fastpack.ops.expert_operands`. Nothing waits for the device: the numbers of rows
stay there.

Shape suffixes: T tokens, K choices of a token, E experts, R rows, H size of a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack.ops.expert_operands import Routing
from fastpack.ops.implementation import Implementation, use_triton
from fastpack.ops.row_count import RowCount, rows_of


def route(
    index: Tensor,
    experts: int,
    *,
    row_count: RowCount | None = None,
    most_rows: int | None = None,
    implementation: Implementation = "auto",
) -> Routing:
    """Sort the slots by expert.

    Args:
        index: ``[T, K]`` of int64 or int32, the experts that each token chose.
        experts: E, the number of experts. A choice of E or more, or a negative one, belongs to none.
        row_count: the number of tokens that are real, or None for all. Kernels leave the others out.
        most_rows: R, if no more slots than so many belong to an expert; None for T K.
        implementation: which implementation to run; the grouped matmuls over these rows must have the same.
    """
    if use_triton(implementation, index):
        from fastpack.ops.kernels import routing as kernels

        order, offsets, tiles, tile_count, rows = kernels.route(index, experts, rows_of(row_count))
        order = order if most_rows is None else order[:most_rows].clone()  # a slice would keep the whole
        return Routing(index, order, offsets, tiles, tile_count, rows, row_count)
    slots = index.reshape(-1)
    chosen, order = slots.where(slots >= 0, experts).sort(stable=True)
    offsets = torch.searchsorted(chosen, torch.arange(experts, device=index.device, dtype=index.dtype), right=True)
    return Routing(index, order[:most_rows].int(), offsets.int())


def gather_rows(x: Tensor, routing: Routing) -> Tensor:
    """Return each row's token: ``x [T, H]`` to ``[R, H]``. Of rows of no expert, kernels define those of one tile."""
    if routing.for_kernels:
        from fastpack.ops.kernels import routing as kernels

        assert routing.rows is not None
        return kernels.spread_rows(x, routing.rows, routing.offsets, routing.choices, len(routing.order))
    return x[routing.order // routing.choices]


def sum_rows(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Return the sum over each token's rows, in the order of its choices and in float32, rounded once.

    Args:
        y: ``[R, H]``. Rows of no expert are left out, whatever they hold.
        routing: the rows.
        weights: ``[T, K]``, a factor for each slot, or None for 1.

    Returns:
        ``[T, H]`` in y's dtype.
    """
    if routing.for_kernels:
        from fastpack.ops.kernels import routing as kernels

        assert routing.rows is not None
        count = rows_of(routing.row_count)
        return kernels.sum_rows(y, routing.rows, routing.index, routing.experts, weights, count)
    wide = torch.promote_types(y.dtype, torch.float32)
    slots = torch.zeros(routing.index.numel(), y.shape[1], dtype=wide, device=y.device)
    slots[routing.order] = y.to(wide).where(routing.real_rows()[:, None], 0)
    slots = slots.view(*routing.index.shape, y.shape[1])
    return (slots if weights is None else slots * weights[..., None].to(wide)).sum(1).to(y.dtype)


def row_weights(weights: Tensor, routing: Routing) -> Tensor:
    """Return the factor of each row, ``[R, 1]``, from those of the slots, ``[T, K]``."""
    return weights.reshape(-1, 1)[routing.order]
