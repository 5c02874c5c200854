"""Kernels of the gated units of experts. A program computes a few rows, one after the other, in float32.

The definition is in :mod:`fastpack.ops.experts.gate`. Rows of no expert have undefined inputs. Results are zero in
those of one tile, see :func:`fastpack.ops.kernels.routing.rows_to_write`.

Shape suffixes: T tokens, K choices of a token, R rows, I width of the gate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.autograd import clamp_passes_its_limits
from fastpack.ops.expert_operands import Gate, Routing
from fastpack.ops.kernels.glu import activate_and_slope
from fastpack.ops.kernels.launch import early, on_device, processors, wait_for_inputs
from fastpack.ops.kernels.routing import TILE_ROWS, rows_to_write

BLOCK = 1024
"""The most elements that a program computes at once."""
RESIDENT = 16
"""The programs of a multiprocessor that run at once, at most."""
EACH = 8
"""The most rows of a program. Where other ranks have most of the experts, most programs have no row to compute."""


@triton.jit
def _load(inner, start, at, mask, filled, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Load gate and up of a row that begins at ``inner``; both are the same if columns are plain."""
    if COLUMNS == "interleaved":
        pairs = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(inner + pairs, mask=pairs < 2 * filled, other=0.0)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        gate = tl.load(inner + at, mask=mask, other=0.0)
        up = gate
        if COLUMNS == "halves":
            up = tl.load(inner + WIDTH + at, mask=mask, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _passes(x, limit, EDGES: tl.constexpr):
    """Return the slope of a clamp: 1 below the limit and, with EDGES, at the limit."""
    inside = x <= limit if EDGES else x < limit
    return tl.where(inside, 1.0, 0.0)


@triton.jit
def _factors(gate, up, alpha, limit, offset, KIND: tl.constexpr, COLUMNS: tl.constexpr, LIMITED: tl.constexpr,
             AFTER: tl.constexpr, EDGES: tl.constexpr):  # fmt: skip
    """Return both factors of a gated unit, and their slopes."""
    slope_of_up = tl.full(up.shape, 1.0, tl.float32)
    passes = tl.full(gate.shape, 1.0, tl.float32)
    if LIMITED:
        slope_of_up = _passes(tl.abs(up), limit, EDGES)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))  # NaN stays, as with torch's clamp
        if not AFTER:
            passes = _passes(gate, limit, EDGES)
            gate = tl.where(gate > limit, limit, gate)
    if KIND == "relu2":
        positive = tl.where(gate < 0.0, 0.0, gate)
        value, slope = positive * positive, 2.0 * positive
    elif KIND == "silu":
        value, slope = activate_and_slope(gate * alpha, KIND)
        value = value / alpha
    else:
        value, slope = activate_and_slope(gate, KIND)
    slope *= passes
    if LIMITED and AFTER:
        slope *= _passes(value, limit, EDGES)
        value = tl.where(value > limit, limit, value)
    if COLUMNS == "plain":
        return value, slope, tl.full(gate.shape, 1.0, tl.float32), slope_of_up
    return value, slope, up + offset, slope_of_up


@triton.jit(do_not_specialize=["rows", "each"])
def _forward_kernel(
    inner, out, offsets, experts, rows, each, alpha, limit, offset, KIND: tl.constexpr, COLUMNS: tl.constexpr,
    LIMITED: tl.constexpr, AFTER: tl.constexpr, EDGES: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    real, last = tl.load(offsets + experts - 1), rows_to_write(offsets, experts, rows, ROWS)
    first = tl.program_id(0).to(tl.int64) * each
    for row in range(first, tl.minimum(first + each, last)):
        filled = tl.where(row < real, WIDTH, 0)
        for start in range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = at < filled
            gate, up = _load(inner + row * INNER, start, at, mask, filled, WIDTH, BLOCK, COLUMNS)
            value, _, factor, _ = _factors(gate, up, alpha, limit, offset, KIND, COLUMNS, LIMITED, AFTER, EDGES)
            product = tl.where(mask, value * factor, 0.0)
            tl.store(out + row * WIDTH + at, product.to(out.dtype.element_ty), mask=at < WIDTH)


@triton.jit(do_not_specialize=["rows", "each"])
def _backward_kernel(
    grad, inner, of_inner, weights, of_weights, order, offsets, experts, rows, each, alpha, limit, offset,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, LIMITED: tl.constexpr, AFTER: tl.constexpr, EDGES: tl.constexpr,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    real, last = tl.load(offsets + experts - 1), rows_to_write(offsets, experts, rows, ROWS)
    first = tl.program_id(0).to(tl.int64) * each
    for row in range(first, tl.minimum(first + each, last)):
        filled = tl.where(row < real, WIDTH, 0)
        slot = tl.load(order + row)
        weight = tl.load(weights + slot).to(tl.float32)
        product = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            exists = at < WIDTH
            mask = at < filled
            gate, up = _load(inner + row * INNER, start, at, mask, filled, WIDTH, BLOCK, COLUMNS)
            value, slope, factor, slope_of_up = _factors(
                gate, up, alpha, limit, offset, KIND, COLUMNS, LIMITED, AFTER, EDGES
            )
            g = tl.load(grad + row * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
            product += g * value * factor
            g *= weight
            of_gate, of_up = g * factor * slope, g * value * slope_of_up
            target = of_inner + row * INNER
            element = of_inner.dtype.element_ty
            if COLUMNS == "interleaved":
                both = tl.reshape(tl.join(of_gate, of_up), (2 * BLOCK,))
                pairs = 2 * start + tl.arange(0, 2 * BLOCK)
                tl.store(target + pairs, tl.where(pairs < 2 * filled, both, 0.0).to(element), mask=pairs < 2 * WIDTH)
            else:
                tl.store(target + at, tl.where(mask, of_gate, 0.0).to(element), mask=exists)
                if COLUMNS == "halves":
                    tl.store(target + WIDTH + at, tl.where(mask, of_up, 0.0).to(element), mask=exists)
            if KEEP:
                weighted = tl.where(mask, weight * value * factor, 0.0)
                tl.store(grad + row * WIDTH + at, weighted.to(grad.dtype.element_ty), mask=exists)
        tl.store(of_weights + slot, tl.sum(product, 0))


def _settings(gate: Gate, inner: int) -> dict[str, Any]:
    width = gate.width(inner)
    return {
        "KIND": gate.kind,
        "COLUMNS": gate.columns,
        "LIMITED": math.isfinite(gate.limit),
        "AFTER": gate.clamps_after,
        "EDGES": clamp_passes_its_limits(),
        "WIDTH": width,
        "INNER": inner,
        "BLOCK": min(BLOCK, triton.next_power_of_2(width)),
        "ROWS": TILE_ROWS,
        "num_warps": 4,
    }


def _rows_of_a_program(x: Tensor) -> int:
    """Return how many rows a program computes: more than one only where there are enough to fill the device."""
    return max(1, min(EACH, len(x) // (processors(x.device) * RESIDENT)))


def forward(inner: Tensor, gate: Gate, routing: Routing) -> Tensor:
    """Return a ``[R, I]``."""
    rows, columns = inner.shape
    out = inner.new_empty(rows, gate.width(columns))
    if rows:
        with on_device(inner):
            each = _rows_of_a_program(inner)
            _forward_kernel[(triton.cdiv(rows, each),)](
                *(inner, out, routing.offsets, routing.experts, rows, each, gate.alpha, gate.limit, gate.offset),
                **_settings(gate, columns),
                **early(inner),
            )
    return out


def backward(
    grad: Tensor, inner: Tensor, weights: Tensor, gate: Gate, routing: Routing, of_inner: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return both gradients as :func:`fastpack.ops.experts.gate.gate_backward` does, the first in ``of_inner``."""
    rows, columns = inner.shape
    weights = weights.contiguous()
    of_weights = torch.zeros(weights.shape, dtype=torch.float32, device=weights.device)
    if rows:
        with on_device(inner):
            each = _rows_of_a_program(inner)
            _backward_kernel[(triton.cdiv(rows, each),)](
                *(grad, inner, of_inner, weights, of_weights, routing.order, routing.offsets, routing.experts),
                *(rows, each, gate.alpha, gate.limit, gate.offset),
                **_settings(gate, columns),
                KEEP=keep,
                **early(inner),
            )
    return of_inner, of_weights
