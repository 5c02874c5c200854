"""Root-mean-square normalisation with a gate, as recurrences have it before their output projection.

Definition, in float32, with a the activation of the gate z, SiLU or the sigmoid, and means over groups of G
neighbouring elements of a row (Dao & Gu, "Mamba-2", arXiv:2405.21060, section 7; Yang et al., "Gated Delta Networks",
arXiv:2412.06464, section 3.4). The gate comes first or last:

    n = x a(z) / sqrt(mean((x a(z))^2) + eps),   out = n w
    n = x / sqrt(mean(x^2) + eps),               out = n w a(z)

Families round to x's dtype ``before`` the weight is applied, or only ``after`` everything.

Gradients, with g the gradient of the result, s the gradient of n, and d the gradient of what is normalised:

    d = rstd (s - n mean(s n)),  dw = sum over tokens of g n (first) or of g n a(z) (last)
    first:  s = g w,       dx = d a(z),  dz = d x a'(z)
    last:   s = g w a(z),  dx = d,       dz = g n w a'(z)

Shape suffixes: T tokens, H width of the last dimension, G width of a group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, kernel_serves, use_triton
from fastpack.ops.kinds import GatedNormKind
from fastpack.ops.norm import MAX_WIDTH


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    kind: GatedNormKind,
    *,
    group: int | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Normalise the last dimension of ``x``, and multiply by the weight and by the activation of a gate.

    Args:
        x: ``[..., H]`` of any float dtype; normalised in float32.
        gate: ``[..., H]``.
        weight: ``[H]``.
        eps: added to the mean square.
        kind: where the gate comes, its activation, and where x is rounded.
        group: G, which divides H; None for H.
        implementation: ``auto`` runs the kernel if :func:`use_triton` allows it and the kernel supports the inputs.

    Returns:
        ``[..., H]`` in x's dtype; if the gate comes first and x is rounded before, in the promoted dtype of x and the
        weight.

    Raises:
        ValueError: G doesn't divide H; or ``implementation="triton"``, and the kernel doesn't support a dtype or G.

    Example:
        >>> kind = GatedNormKind(gate_first=False, activation="sigmoid", round_before=False)
        >>> gated_norm(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), torch.ones(2), 0.0, kind)
        tensor([[0.4243, 0.5657]])
    """
    group = x.shape[-1] if group is None else group
    if x.shape[-1] % group:
        raise ValueError(f"rows of {x.shape[-1]} elements, but groups of {group}: the second must divide the first.")
    if use_triton(implementation, x):
        reason = _kernel_rejects(x, gate, weight, group)
        if kernel_serves(implementation, "gated normalisation", reason):
            out: Tensor = _GatedNorm.apply(x, gate, weight, eps, kind, group)
            return out
    return _define(x, gate, weight, eps, kind, group)


class _GatedNorm(torch.autograd.Function):
    """The autograd Function of :func:`gated_norm`. It saves its inputs and one value for each group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: GatedNormKind, group: int
    ) -> Tensor:
        from fastpack.ops.kernels import gated_norm as kernels

        out, rstd = kernels.forward(x, gate, weight, eps, kind, group)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.kind, ctx.group = kind, group
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from fastpack.ops.kernels import gated_norm as kernels

        x, gate, weight, rstd = ctx.saved_tensors
        need_weight = ctx.needs_input_grad[2]
        grads = kernels.backward(grad, x, gate, weight, rstd, ctx.kind, ctx.group, need_weight=need_weight)
        return *grads, None, None, None


def _define(x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: GatedNormKind, group: int) -> Tensor:
    """Compute :func:`gated_norm` by its formula, in transformers' order of operations."""
    wide = torch.promote_types(x.dtype, torch.float32)
    active = (F.silu if kind.activation == "silu" else torch.sigmoid)(gate.to(wide))
    y = (x.to(wide) * active if kind.gate_first else x.to(wide)).unflatten(-1, (-1, group))
    n = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    n = weight * n.to(x.dtype) if kind.round_before else weight.to(wide) * n
    if not kind.gate_first:
        n = n * active
    return n if kind.gate_first and kind.round_before else n.to(x.dtype)


def _kernel_rejects(x: Tensor, gate: Tensor, weight: Tensor, group: int) -> str | None:
    """Return the input that the kernel doesn't support, and what it supports instead, or None."""
    if any(each.dtype not in KERNEL_DTYPES for each in (x, gate, weight)):
        return f"{x.dtype}, {gate.dtype} and {weight.dtype}, but supports float32, bfloat16 and float16"
    if group > MAX_WIDTH:
        return f"groups of {group} elements, but holds at most {MAX_WIDTH}"
    if gate.shape != x.shape or weight.shape != x.shape[-1:]:
        return f"a gate of shape {tuple(gate.shape)} and a weight of {tuple(weight.shape)} for x of {tuple(x.shape)}"
    return None
