"""RMSNorm and LayerNorm over the last dimension.

Definitions (Zhang & Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4; Ba et al., "Layer
Normalization", arXiv:1607.06450, eq. 4), in float32, with w = weight or 1 + weight:

    rms_norm(x)   = x / sqrt(mean(x^2) + eps) * w
    layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * w

Families round to x's dtype at different points: ``before`` the weight is applied (Llama), or ``after`` (Gemma, OLMo-2,
Cohere). The ops round at the same point, so that results match the stock modules' bit for bit in most places.

Gradients, with n the normalised x before the weight and g the gradient of the result (only layer_norm has the term
``mean(g w)``):

    dx = rstd * (g w - n mean(g w n) - mean(g w)),  dw = sum over tokens of g n

Shape suffixes: T tokens, H width of the last dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.implementation import KERNEL_DTYPES, Implementation, kernel_serves, use_triton
from fastpack.ops.kinds import NormKind, Rounding
from fastpack.ops.row_count import RowCount, rows_of

MAX_WIDTH = 32768  # the kernels hold a row in the registers of one program


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    rounding: Rounding = "before",
    unit_offset: bool = False,
    implementation: Implementation = "auto",
) -> Tensor:
    """Apply RMSNorm to the last dimension of ``x``.

    Args:
        x: ``[..., H]`` of any float dtype; normalised in float32.
        weight: ``[H]``.
        eps: added to the mean square.
        rounding: round to ``x.dtype`` before or after the weight is applied.
        unit_offset: multiply by ``1 + weight`` (Gemma).
        implementation: ``auto`` runs the kernel if :func:`use_triton` allows it and the kernel supports the inputs.

    Returns:
        ``[..., H]``. Its dtype is ``x.dtype`` or, with rounding ``before``, the promoted dtype of x and the weight.

    Raises:
        ValueError: ``implementation="triton"``, and the kernel doesn't support this dtype or width.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    kind = NormKind(False, rounding == "before", unit_offset)
    out: Tensor
    if _kernel_serves(implementation, x, weight):
        out = _Norm.apply(x, weight, eps, kind, True)
        return out
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    if plain and not torch.compiler.is_compiling():
        # torch has no fused kernel here; this equals the plain formula bit for bit, with a third of its backward's
        # passes
        out = _Norm.apply(x, weight, eps, kind, False)
        return out
    scale = _scale(weight, kind)
    if rounding == "before":
        # the kernel reduces in float32 and rounds once, as the stock module does before its weight
        return scale * F.rms_norm(x, (x.shape[-1],), None, eps).to(x.dtype)
    return F.rms_norm(_wide(x), (x.shape[-1],), scale, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, eps: float, *, implementation: Implementation = "auto") -> Tensor:
    """Apply LayerNorm without bias to the last dimension, in float32, rounded once to ``x.dtype`` (Cohere).

    The weight's shape must equal the last dimensions of x: ``[H]``, or ``[heads, D]`` for one weight for each head.

    Raises:
        ValueError: ``implementation="triton"``, and the kernel doesn't support this dtype or width.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), eps=0.0)
        tensor([[-1.,  1.]])
    """
    if _kernel_serves(implementation, x, weight):
        return _Norm.apply(x, weight, eps, LAYER, True)
    return (weight.to(torch.float32) * F.layer_norm(x.float(), (x.shape[-1],), None, None, eps)).to(x.dtype)


def rms_norm_forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    rounding: Rounding = "before",
    unit_offset: bool = False,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute :func:`rms_norm` without a graph, for use in another autograd Function.

    Args:
        x: ``[..., H]``.
        weight: ``[H]``.
        eps: as for :func:`rms_norm`.
        rounding: as for :func:`rms_norm`.
        unit_offset: as for :func:`rms_norm`.
        row_count: how many of the first tokens are real. The kernel may skip the others; their results are then zeros.
        implementation: as for :func:`rms_norm`.

    Returns:
        The normalised tensor, and ``rstd``: float32 ``[T]``, the reciprocal of each row's root mean square, with the
        leading dimensions flattened.
    """
    kind = NormKind(False, rounding == "before", unit_offset)
    normed, _, rstd = _forward(x, weight, eps, kind, _kernel_serves(implementation, x, weight), row_count)
    return normed, rstd


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    rounding: Rounding = "before",
    unit_offset: bool = False,
    grad_summed: Tensor | None = None,
    need_weight: bool = True,
    normed: Tensor | None = None,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of :func:`rms_norm_forward` for x and the weight.

    Args:
        grad: ``[..., H]``, the gradient of the normalised tensor.
        x: ``[..., H]``, the input of the forward.
        weight: ``[H]``.
        rstd: ``[T]``, as the forward returned it.
        rounding: as in the forward.
        unit_offset: as in the forward.
        grad_summed: the gradient that reaches x on paths around the norm; it is added to the gradient of x.
        need_weight: False for a frozen weight, which saves work.
        normed: contiguous memory in the dtype of the forward's result. That result is written there again, as
            :func:`rms_norm_apply` computes it. The memory may be ``grad`` itself.
        row_count: as in the forward.
        implementation: as in the forward.

    Returns:
        The gradient of x, in x's dtype, and the gradient of the weight or None.
    """
    kind = NormKind(False, rounding == "before", unit_offset)
    kernel = _kernel_serves(implementation, x, weight)
    needed = (True, need_weight)
    dx, dweight = _backward(grad, x, weight, None, rstd, grad_summed, kind, needed, kernel, row_count, normed)
    assert dx is not None
    return dx, dweight


def rms_norm_apply(
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    rounding: Rounding = "before",
    unit_offset: bool = False,
    row_count: RowCount | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Compute the result of :func:`rms_norm_forward` again, from x and the ``rstd`` that it returned.

    This takes one pass, without a graph; the result is equal bit for bit.
    """
    kind = NormKind(False, rounding == "before", unit_offset)
    if _kernel_serves(implementation, x, weight):
        from fastpack.ops.kernels import norm as kernels

        return kernels.forward(x, weight, 0.0, kind, rstd, rows_of(row_count))[0]
    return _weighted(_wide(x), rstd.reshape(*x.shape[:-1], 1), weight, x.dtype, kind)


class _Norm(torch.autograd.Function):
    """The autograd Function of both norms. It saves x, the weight and one or two values for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: NormKind, kernel: bool) -> Tensor:
        normed, mean, rstd = _forward(x, weight, eps, kind, kernel)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.kind, ctx.kernel = kind, kernel
        return normed

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        dx, dweight = _backward(grad, x, weight, mean, rstd, None, ctx.kind, needed, ctx.kernel)
        return dx, dweight, None, None, None


LAYER = NormKind(centred=True, round_before=False, unit_offset=False)


def _forward(
    x: Tensor, weight: Tensor, eps: float, kind: NormKind, kernel: bool, row_count: RowCount | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the normalised tensor, the mean ``[T]`` (None unless centred) and rstd ``[T]``.

    LayerNorm is computed by the kernel only.
    """
    if kernel:
        from fastpack.ops.kernels import norm as kernels

        return kernels.forward(x, weight, eps, kind, count=rows_of(row_count))
    wide = _wide(x)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return _weighted(wide, rstd, weight, x.dtype, kind), None, rstd.reshape(-1)


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    grad_summed: Tensor | None,
    kind: NormKind,
    needed: tuple[bool, bool],
    kernel: bool,
    row_count: RowCount | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the ``needed`` gradients of x and weight; LayerNorm's are computed by the kernel only.

    The normalised tensor is written into ``normed``, if there is one, after everything else was read.
    """
    if kernel:
        from fastpack.ops.kernels import norm as kernels

        return kernels.backward(grad, x, weight, mean, rstd, grad_summed, kind, needed, rows_of(row_count), normed)
    wide, g, width = _wide(x), grad.to(rstd.dtype), x.shape[-1]
    dx = dweight = None
    if needed[0]:
        row_rstd = rstd.reshape(*x.shape[:-1], 1)
        weighted = g * _scale(weight, kind)
        slope = (weighted * wide).mean(-1, keepdim=True) * row_rstd.pow(3)
        dx = weighted.mul_(row_rstd).addcmul_(wide, slope, value=-1)
        if grad_summed is not None:
            dx += grad_summed
        dx = dx.to(x.dtype)
    if needed[1]:
        # [1, T] @ [T, H]: a matmul instead of one more pass; autocast is off, since it would change the dtype
        with torch.autocast(x.device.type, enabled=False):
            dweight = rstd.reshape(1, -1) @ (g * wide).reshape(-1, width)
        dweight = dweight.reshape(weight.shape).to(weight.dtype)
    if normed is not None:
        normed.copy_(_weighted(wide, rstd.reshape(*x.shape[:-1], 1), weight, x.dtype, kind))
    return dx, dweight


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scale(weight: Tensor, kind: NormKind) -> Tensor:
    """Return the factor w of the definitions, in the dtype of its multiplication with x."""
    if not kind.round_before:
        weight = _wide(weight)
    return 1.0 + weight if kind.unit_offset else weight


def _weighted(wide: Tensor, rstd: Tensor, weight: Tensor, dtype: torch.dtype, kind: NormKind) -> Tensor:
    """Return ``wide * rstd * w``, rounded to ``dtype`` at the point where this kind rounds."""
    normed, scale = wide * rstd, _scale(weight, kind)
    if not kind.round_before:
        return normed.mul_(scale).to(dtype)
    normed = normed.to(dtype)
    return normed.mul_(scale) if torch.promote_types(dtype, scale.dtype) == dtype else normed * scale


def _kernel_serves(implementation: Implementation, x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel should run.

    Raises:
        ValueError: ``implementation="triton"``, and the kernel doesn't support the inputs.
    """
    if not use_triton(implementation, x):
        return False
    reason = None
    if x.shape[-1] > MAX_WIDTH:
        reason = f"rows of {x.shape[-1]} elements, but holds at most {MAX_WIDTH}"
    elif weight.shape != x.shape[x.ndim - weight.ndim :]:
        reason = f"a weight of shape {tuple(weight.shape)} for x of {tuple(x.shape)}"
    elif x.dtype not in KERNEL_DTYPES or weight.dtype not in KERNEL_DTYPES:
        reason = f"{x.dtype} and {weight.dtype}, but supports float32, bfloat16 and float16"
    return kernel_serves(implementation, "normalisation", reason)
