"""Gated linear units: ``activation(gate) * up`` (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202).

The kernels support these activations, each computed in float32 and rounded once (Hendrycks & Gimpel, "Gaussian Error
Linear Units", arXiv:1606.08415, eq. 1 and section 2):

    silu(x)      = x sigmoid(x)
    gelu(x)      = x Phi(x) = x (1 + erf(x / sqrt 2)) / 2
    gelu_tanh(x) = x (1 + tanh u) / 2 = x sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)

Gradients, with g the gradient of the result: ``dgate = g up activation'(gate)``, ``dup = g activation(gate)``.

Shape suffixes: T tokens, I width of gate and of up.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, kernel_serves, use_triton
from fastpack.ops.kinds import Activation, ActivationKind
from fastpack.utils.hooks import carries_hooks

# transformers has several classes for one function
UPSTREAM: dict[str, ActivationKind] = {
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
}


def gated(gate: Tensor, up: Tensor, activation: Activation, implementation: Implementation = "auto") -> Tensor:
    """Compute ``activation(gate) * up`` elementwise (SwiGLU with SiLU, GEGLU with GELU).

    Args:
        gate: ``[..., I]``.
        up: ``[..., I]``; gate and up may be the halves of one tensor, which are not copied.
        activation: a module or a function.
        implementation: ``auto`` runs the kernel if :func:`use_triton` allows it and the kernel supports the inputs.

    Returns:
        ``[..., I]``.

    Raises:
        ValueError: ``implementation="triton"``, and the kernel doesn't support this activation, dtype or shape.

    Example:
        >>> gate, up = torch.randn(5, 16).chunk(2, -1)
        >>> gated(gate, up, torch.nn.SiLU()).shape
        torch.Size([5, 8])
    """
    if use_triton(implementation, gate):
        kind = activation_kind(activation)
        if _kernel_serves(implementation, gate, up, kind, activation):
            return _Gated.apply(gate, up, kind)
    return activation(gate) * up


def activation_kind(activation: Activation) -> ActivationKind | None:
    """Return the kernels' name for this activation, or None if only a call computes it.

    It must be called if no kernel computes it, or if it is a module with hooks or with a forward set on the instance.
    """
    if isinstance(activation, nn.Module):
        if carries_hooks(activation):
            return None
        cls = type(activation)
        if cls is nn.SiLU:
            return "silu"
        if cls is nn.GELU:
            return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
        return UPSTREAM.get(cls.__name__) if cls.__module__ == "transformers.activations" else None
    if activation is F.silu:
        return "silu"
    if activation is F.gelu:
        return "gelu"
    if isinstance(activation, functools.partial) and activation.func is F.gelu and not activation.args:
        by_keywords: dict[Any, ActivationKind] = {(): "gelu", (("approximate", "tanh"),): "gelu_tanh"}
        return by_keywords.get(tuple(activation.keywords.items()))
    return None


def gated_forward(gate: Tensor, up: Tensor, kind: ActivationKind, *, implementation: Implementation = "auto") -> Tensor:
    """Compute :func:`gated` without a graph, for use in another autograd Function; the result is contiguous."""
    if use_triton(implementation, gate) and _kernel_serves(implementation, gate, up, kind):
        from fastpack.ops.kernels import glu as kernels

        return kernels.forward(gate, up, kind)
    return activate(gate, kind) * up


def gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    kind: ActivationKind,
    *,
    out: tuple[Tensor, Tensor],
    recompute: bool = False,
    implementation: Implementation = "auto",
) -> None:
    """Write the gradients of gate and up into ``out``.

    Args:
        grad: ``[..., I]``, the gradient of the result.
        gate: ``[..., I]``.
        up: ``[..., I]``.
        kind: the activation.
        out: the memory for the two gradients, ``[..., I]`` each. They may be the halves of one tensor, or gate and up
            themselves if the caller no longer needs those.
        recompute: overwrite ``grad`` with the result of :func:`gated_forward`.
        implementation: as for :func:`gated`.
    """
    if use_triton(implementation, gate) and _kernel_serves(implementation, gate, up, kind):
        from fastpack.ops.kernels import glu as kernels

        kernels.backward(grad, gate, up, kind, out, recompute)
        return
    dtype = torch.promote_types(torch.promote_types(gate.dtype, up.dtype), torch.float32)
    wide, g = gate.to(dtype), grad.to(dtype)
    if kind == "silu":
        dgate = torch.ops.aten.silu_backward(g * up, wide)
    else:
        dgate = torch.ops.aten.gelu_backward(g * up, wide, approximate="tanh" if kind == "gelu_tanh" else "none")
    dup = g * activate(wide, kind)
    if recompute:
        grad.copy_(activate(gate, kind) * up)
    out[0].copy_(dgate)
    out[1].copy_(dup)


class _Gated(torch.autograd.Function):
    """The autograd Function of :func:`gated`. It saves only gate and up; the backward recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: ActivationKind) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return gated_forward(gate, up, kind, implementation="triton")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
        gated_backward(grad, gate, up, ctx.kind, out=(dgate, dup), implementation="triton")
        return dgate if ctx.needs_input_grad[0] else None, dup if ctx.needs_input_grad[1] else None, None


def activate(x: Tensor, kind: ActivationKind) -> Tensor:
    """Compute an activation elementwise, ``[...]`` in x's dtype."""
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _kernel_serves(
    implementation: Implementation,
    gate: Tensor,
    up: Tensor,
    kind: ActivationKind | None,
    activation: Activation | None = None,
) -> bool:
    """Return whether the kernel supports these inputs.

    Raises:
        ValueError: it doesn't, and ``implementation="triton"``.
    """
    reason = None
    if kind is None:
        reason = f"the activation {activation}, but supports SiLU and GELU (without hooks)"
    elif gate.dtype not in KERNEL_DTYPES or up.dtype not in KERNEL_DTYPES:
        reason = f"{gate.dtype} and {up.dtype}, but supports float32, bfloat16 and float16"
    elif gate.shape != up.shape:
        reason = f"gate of shape {tuple(gate.shape)} and up of {tuple(up.shape)}, but needs one shape"
    return kernel_serves(implementation, "gated units", reason)
