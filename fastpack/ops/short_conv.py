"""A short causal convolution of each channel, inside each packed sequence (Mamba's, LFM2's, the gated delta rule's).

Definition (Gu & Dao, "Mamba", arXiv:2312.00752, section 3.4: a depthwise causal convolution before the scan), for each
token t at position p of its own sequence:

    z[t] = bias + sum over j from 0 to min(p, W - 1) of weight[:, W - 1 - j] x[t - j],  y[t] = activation(z[t])

Taps that reach before the sequence are left out. Everything is computed in float32 at least, and rounded once.

Gradients, with g the gradient of y and s = g activation'(z): ``dx[t] = sum_j weight[:, W - 1 - j] s[t + j]`` over the
tokens of t's own sequence, ``dweight[:, W - 1 - j] = sum_t s[t] x[t - j]``, ``dbias = sum_t s[t]``.

Shape suffixes: T tokens, C channels, W taps, N sequences.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, kernel_serves, use_triton

ConvActivation = Literal["silu"]


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    activation: ConvActivation | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Convolve each channel of each sequence by itself, causally.

    Args:
        x: ``[T, C]``.
        weight: ``[C, W]``; its last column is each token's own tap.
        bias: ``[C]``, or None.
        cu_seqlens: int32 ``[N + 1]``, the sequences' offsets, from 0 to T.
        activation: what follows the convolution, or None.
        implementation: ``auto`` runs the kernel if :func:`use_triton` allows it and the kernel supports the inputs.

    Returns:
        ``[T, C]`` in x's dtype.

    Raises:
        ValueError: ``implementation="triton"``, and the kernel doesn't support a dtype or so many taps.

    Example:
        >>> short_conv(torch.ones(5, 1), torch.ones(1, 4), None, torch.tensor([0, 3, 5], dtype=torch.int32))[:, 0]
        tensor([1., 2., 3., 1., 2.])
    """
    if use_triton(implementation, x) and _kernel_serves(implementation, x, weight, bias):
        return _ShortConv.apply(x, weight, bias, cu_seqlens, activation)
    return _define(x, weight, bias, cu_seqlens, activation)


class _ShortConv(torch.autograd.Function):
    """The autograd Function of :func:`short_conv`. It saves only its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cu_seqlens: Tensor,
        activation: ConvActivation | None,
    ) -> Tensor:
        from fastpack.ops.kernels import short_conv as kernels

        ctx.save_for_backward(x, weight, bias, cu_seqlens)
        ctx.activation = activation
        return kernels.forward(x, weight, bias, cu_seqlens, activation == "silu")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from fastpack.ops.kernels import short_conv as kernels

        of_x, *of_weight = ctx.needs_input_grad[:3]
        x, weight, bias, cu_seqlens = ctx.saved_tensors
        dx, dweight, dbias = kernels.backward(
            grad, x, weight, bias, cu_seqlens, ctx.activation == "silu", of_x=of_x, of_weight=any(of_weight)
        )
        return dx, dweight, dbias, None, None


def _define(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: ConvActivation | None
) -> Tensor:
    """Compute :func:`short_conv` by the formula above."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    position_T1 = _positions(cu_seqlens, len(x))[:, None]
    wide, taps = x.to(dtype), weight.to(dtype)
    out = wide * taps[:, -1]
    for back in range(1, min(weight.shape[1], len(x))):
        earlier = F.pad(wide[:-back], (0, 0, back, 0))
        out = out + torch.where(position_T1 >= back, earlier, 0) * taps[:, -1 - back]
    if bias is not None:
        out = out + bias.to(dtype)
    return (out if activation is None else F.silu(out)).to(x.dtype)


def _positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return each token's position in its sequence, int32 ``[T]``; a model's ``position_ids`` may skip."""
    token = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    return token - cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1]


def _kernel_serves(implementation: Implementation, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernel supports these inputs.

    Raises:
        ValueError: it doesn't, and ``implementation="triton"``.
    """
    from fastpack.ops.kernels.short_conv import MAX_TAPS

    dtypes, taps = [y.dtype for y in (x, weight, bias) if y is not None], weight.shape[1]
    reason = None
    if any(dtype not in KERNEL_DTYPES for dtype in dtypes):
        reason = f"{dtypes}, but supports float32, bfloat16 and float16"
    elif taps > MAX_TAPS:
        reason = f"{taps} taps, but supports up to {MAX_TAPS}"
    return kernel_serves(implementation, "short convolutions", reason)
