"""The gated units of experts: from the results of the first matmul to the input of the second.

Definition, with an activation act, a limit L on both factors, and an offset o, computed in float32 and rounded once:

    a = act(min(g, L)) (clamp(u, -L, L) + o)           or min(act(g), L) (clamp(u, -L, L) + o)   if ``clamps_after``
    a = act(g)                                         without a gate ("plain" columns)

At exactly a limit, the gradient is that of torch's clamp: 1 up to torch 2.13, 0 in 2.14.1.

SiLU may have a steeper slope: ``act(x) = x sigmoid(alpha x)`` (gpt-oss has alpha 1.702, L 7 and o 1).

Shape suffixes: R rows, I width of the gate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fastpack.ops.expert_operands import Gate, Routing
from fastpack.ops.experts.routing import row_weights
from fastpack.ops.glu import activate


def gate_forward(inner: Tensor, gate: Gate, routing: Routing) -> Tensor:
    """Return a ``[R, I]`` for the first matmul's result ``[R, 2 I]``, or ``[R, I]`` if columns are plain.

    In rows of no expert it is finite; kernels define those of one tile.
    """
    if routing.for_kernels:
        from fastpack.ops.kernels import expert_gate as kernels

        return kernels.forward(inner, gate, routing)
    return _define(inner.to(torch.promote_types(inner.dtype, torch.float32)), gate).to(inner.dtype)


def gate_backward(
    grad: Tensor, inner: Tensor, weights: Tensor, gate: Gate, routing: Routing, *, keep: bool, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``inner`` and of the slots' weights.

    Args:
        grad: ``[R, I]``, the gradient of a for a weight of 1.
        inner: as for :func:`gate_forward`.
        weights: ``[T, K]``, the weights of the slots.
        gate: the gated unit.
        routing: the rows.
        keep: whether to write each row's ``weight * a`` over ``grad``.
        overwrite: whether the gradient may be written over ``inner``.

    Returns:
        The gradient of ``inner``, and that of the weights, ``[T, K]`` in float32 or wider: ``<grad, a>``. The first and
        what is kept are zero in rows of no expert; kernels define those of one tile.
    """
    if routing.for_kernels:
        from fastpack.ops.kernels import expert_gate as kernels

        out = inner if overwrite else torch.empty_like(inner)
        return kernels.backward(grad, inner, weights, gate, routing, out, keep)
    wide = torch.promote_types(inner.dtype, torch.float32)
    here = routing.real_rows()[:, None]
    g = grad.to(wide).where(here, 0)
    by_row = row_weights(weights, routing).to(wide)
    with torch.enable_grad():
        leaf = inner.detach().to(wide).where(here, 0).requires_grad_()
        a = _define(leaf, gate)
        (of_inner,) = torch.autograd.grad(a, leaf, g * by_row)
    of_weights = torch.zeros(weights.shape, dtype=wide, device=grad.device)
    of_weights.view(-1)[routing.order] = (g * a.detach()).sum(1)
    if keep:
        grad.copy_(a.detach() * by_row)
    return of_inner.to(inner.dtype), of_weights


def _define(inner: Tensor, gate: Gate) -> Tensor:
    if gate.columns == "plain":
        return _activate(inner, gate)
    g, u = inner.chunk(2, -1) if gate.columns == "halves" else (inner[..., ::2], inner[..., 1::2])
    if math.isfinite(gate.limit):
        u = u.clamp(-gate.limit, gate.limit)
        g = g if gate.clamps_after else g.clamp(max=gate.limit)
    activated = _activate(g, gate)
    if gate.clamps_after and math.isfinite(gate.limit):
        activated = activated.clamp(max=gate.limit)
    return activated * (u + gate.offset)


def _activate(x: Tensor, gate: Gate) -> Tensor:
    if gate.kind == "silu" and gate.alpha != 1:
        return x * torch.sigmoid(gate.alpha * x)
    if gate.kind == "relu2":
        return F.relu(x).square()
    return activate(x, gate.kind)
