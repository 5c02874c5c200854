"""Gated linear units: ``activation(gate) * up`` (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202).

Activations that kernels serve, each in float32 with one rounding of the result (Hendrycks & Gimpel, "Gaussian Error
Linear Units", arXiv:1606.08415, eq. 1 and section 2):

    silu(x)      = x sigmoid(x)
    gelu(x)      = x Phi(x) = x (1 + erf(x / sqrt 2)) / 2
    gelu_tanh(x) = x (1 + tanh u) / 2 = x sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)

Gradients, with g that of the result: ``dgate = g up activation'(gate)``, ``dup = g activation(gate)``.

Suffixes: T tokens, I width of gate and of up.
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

# transformers' classes, which write these functions in several ways
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
    """``activation(gate) * up``, elementwise on ``[..., I]`` (SwiGLU for SiLU, GEGLU for GELU).

    Args:
        gate, up: of one shape; halves of one tensor are taken as they are.
        activation: a module or a function.
        implementation: ``auto`` takes the kernel where :func:`use_triton` says so, for what it serves.

    Raises:
        ValueError: ``implementation="triton"``, and no kernel serves this activation or dtype.
    """
    if use_triton(implementation, gate):
        kind = activation_kind(activation)
        if _kernel_serves(implementation, gate, up, kind, activation):
            return _Gated.apply(gate, up, kind)
    return activation(gate) * up


def activation_kind(activation: Activation) -> ActivationKind | None:
    """Which kernels serve this activation, or None: the module must be called.

    That is so for other functions, and for a module that carries hooks or a forward of its own instance.
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
    """:func:`gated` without a graph, for use inside another autograd Function; contiguous."""
    if use_triton(implementation, gate) and _kernel_serves(implementation, gate, up, kind):
        from fastpack.ops.kernels import glu as kernels

        return kernels.forward(gate, up, kind)
    return _activate(gate, kind) * up


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
    """Write the gradients of gate and up, and with ``recompute`` the result of :func:`gated_forward` once more.

    Args:
        grad: ``[..., I]``, of the result; with ``recompute`` that is written over it.
        gate, up: ``[..., I]``.
        out: where the two gradients go, as the halves of one ``[..., 2 I]`` tensor for a projection to both; gate and
            up themselves, where the caller gives those up.
    """
    if use_triton(implementation, gate) and _kernel_serves(implementation, gate, up, kind):
        from fastpack.ops.kernels import glu as kernels

        kernels.backward(grad, gate, up, kind, out, recompute)
        return
    dtype = torch.promote_types(torch.promote_types(gate.dtype, up.dtype), torch.float32)
    wide, g = gate.to(dtype), grad.to(dtype)
    if kind == "silu":
        slope = torch.ops.aten.silu_backward(g * up, wide)
    else:
        slope = torch.ops.aten.gelu_backward(g * up, wide, approximate="tanh" if kind == "gelu_tanh" else "none")
    of_up = g * _activate(wide, kind)
    if recompute:
        grad.copy_(_activate(gate, kind) * up)
    out[0].copy_(slope)
    out[1].copy_(of_up)


class _Gated(torch.autograd.Function):
    """Saves gate and up alone: what else the backward needs is computed there."""

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


def _activate(x: Tensor, kind: ActivationKind) -> Tensor:
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
    """True where the kernel is to run, which was asked for or is allowed.

    Raises:
        ValueError: it was asked for by name and can't.
    """
    reason = None
    if kind is None:
        reason = f"the activation {activation}, and serves SiLU and GELU (neither with hooks)"
    elif gate.dtype not in KERNEL_DTYPES or up.dtype not in KERNEL_DTYPES:
        reason = f"{gate.dtype} and {up.dtype}, and serves float32, bfloat16 and float16"
    elif gate.shape != up.shape:
        reason = f"gate of {tuple(gate.shape)} and up of {tuple(up.shape)}"
    return kernel_serves(implementation, "gated units", reason)
