"""Root-mean-square and layer normalisation over the last dimension.

Definitions (Zhang & Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4; Ba et al., "Layer
Normalization", arXiv:1607.06450, eq. 4), in float32, with w = weight or 1 + weight:

    rms_norm(x)   = x / sqrt(mean(x^2) + eps) * w
    layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * w

Families differ in where they round to x's dtype, which is kept, so that results match theirs to the bit in most
places: ``before`` the weight is applied (Llama) or ``after`` (Gemma, OLMo-2, Cohere).

Gradients, with n the normalised x before its weight and g the gradient of the result (the terms in mean(x) belong to
layer normalisation alone):

    dx = rstd * (g w - n mean(g w n) - mean(g w)),  dw = sum over tokens of g n

Suffixes: T tokens, H width of the last dimension.
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

MAX_WIDTH = 32768  # of the kernels: a row is held in the registers of one program


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    rounding: Rounding = "before",
    unit_offset: bool = False,
    implementation: Implementation = "auto",
) -> Tensor:
    """Root-mean-square normalisation of ``[..., H]``.

    Args:
        x: any float dtype; normalised in float32.
        weight: ``[H]``.
        eps: added to the mean square.
        rounding: round to ``x.dtype`` before or after the weight is applied.
        unit_offset: multiply by ``1 + weight`` (Gemma).
        implementation: ``auto`` takes the kernel where :func:`use_triton` says so, for what it serves.

    Returns:
        ``[..., H]``, of ``x.dtype``, or with rounding ``before`` of the dtype that it promotes to with the weight's.

    Raises:
        ValueError: ``implementation="triton"``, and the kernel does not serve this dtype or width.
    """
    kind = NormKind(False, rounding == "before", unit_offset)
    out: Tensor
    if _kernel_serves(implementation, x, weight):
        out = _Norm.apply(x, weight, eps, kind, True)
        return out
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    if plain and not torch.compiler.is_compiling():
        # torch has no fused kernel here: results of the plain formula to the bit, with a third of the backward's passes
        out = _Norm.apply(x, weight, eps, kind, False)
        return out
    scale = _scale(weight, kind)
    if rounding == "before":
        # the kernel reduces in float32 and rounds once, as the stock module does before its weight
        return scale * F.rms_norm(x, (x.shape[-1],), None, eps).to(x.dtype)
    return F.rms_norm(_wide(x), (x.shape[-1],), scale, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, eps: float, *, implementation: Implementation = "auto") -> Tensor:
    """Layer normalisation of the last dimension, in float32, rounded once, to ``x.dtype`` (Cohere).

    ``weight`` may have leading dimensions of its own, the last ones of x (``[heads, D]``).

    Raises:
        ValueError: ``implementation="triton"``, and the kernel does not serve this dtype or width.
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
    """:func:`rms_norm` without a graph, for use inside another autograd Function.

    Args:
        row_count: how many of the first tokens count: the others may be left out, and are zeros then. Here and below.

    Returns:
        The normalised tensor, and ``rstd``: float32 ``[T]``, one over the root mean square of each row, leading
        dimensions flattened.
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
    """Gradients of :func:`rms_norm_forward` for x and weight.

    Args:
        grad: ``[..., H]``, of the normalised tensor.
        x: ``[..., H]``, what was normalised; rstd: ``[T]``, as the forward returned it.
        grad_summed: the gradient that reaches x past the norm, added to the first result.
        need_weight: False where the weight is frozen, which is less work.
        normed: contiguous, of the dtype that the forward's result has: where that result goes once more, as
            :func:`rms_norm_apply` gives it, on the way. It may be ``grad`` itself.

    Returns:
        The gradient of x, of its dtype, and that of the weight or None.
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
    """The normalised tensor once more, from x and the ``rstd`` that :func:`rms_norm_forward` returned: one pass, equal
    to the first to the bit. No graph."""
    kind = NormKind(False, rounding == "before", unit_offset)
    if _kernel_serves(implementation, x, weight):
        from fastpack.ops.kernels import norm as kernels

        return kernels.forward(x, weight, 0.0, kind, rstd, rows_of(row_count))[0]
    return _weighted(_wide(x), rstd.reshape(*x.shape[:-1], 1), weight, x.dtype, kind)


class _Norm(torch.autograd.Function):
    """Both normalisations: saves what was normalised, the weight and one or two figures a row."""

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
    """Normalised, mean ``[T]`` (None unless centred), rstd ``[T]``; of a layer norm by the kernel alone."""
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
    """Gradients of x and weight, those that are ``needed``; of a layer norm by the kernel alone. The normalised tensor
    goes into ``normed``, last of all, where there is one."""
    if kernel:
        from fastpack.ops.kernels import norm as kernels

        return kernels.backward(grad, x, weight, mean, rstd, grad_summed, kind, needed, rows_of(row_count), normed)
    wide, g, width = _wide(x), grad.to(rstd.dtype), x.shape[-1]
    dx = dweight = None
    if needed[0]:
        of_row = rstd.reshape(*x.shape[:-1], 1)
        weighted = g * _scale(weight, kind)
        slope = (weighted * wide).mean(-1, keepdim=True) * of_row.pow(3)
        dx = weighted.mul_(of_row).addcmul_(wide, slope, value=-1)
        if grad_summed is not None:
            dx += grad_summed
        dx = dx.to(x.dtype)
    if needed[1]:
        # [1, T] @ [T, H]: a matrix product instead of one more pass, in this dtype also where autocast has another
        with torch.autocast(x.device.type, enabled=False):
            dweight = rstd.reshape(1, -1) @ (g * wide).reshape(-1, width)
        dweight = dweight.reshape(weight.shape).to(weight.dtype)
    if normed is not None:
        normed.copy_(_weighted(wide, rstd.reshape(*x.shape[:-1], 1), weight, x.dtype, kind))
    return dx, dweight


def _wide(x: Tensor) -> Tensor:
    """In float32, or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scale(weight: Tensor, kind: NormKind) -> Tensor:
    """The w of the definitions, in the dtype that it is multiplied in."""
    if not kind.round_before:
        weight = _wide(weight)
    return 1.0 + weight if kind.unit_offset else weight


def _weighted(wide: Tensor, rstd: Tensor, weight: Tensor, dtype: torch.dtype, kind: NormKind) -> Tensor:
    """``wide * rstd * w``, rounded to ``dtype`` where this kind rounds."""
    normed, scale = wide * rstd, _scale(weight, kind)
    if not kind.round_before:
        return normed.mul_(scale).to(dtype)
    normed = normed.to(dtype)
    return normed.mul_(scale) if torch.promote_types(dtype, scale.dtype) == dtype else normed * scale


def _kernel_serves(implementation: Implementation, x: Tensor, weight: Tensor) -> bool:
    """True where the kernel is to run.

    Raises:
        ValueError: it was asked for by name and can't.
    """
    if not use_triton(implementation, x):
        return False
    reason = None
    if x.shape[-1] > MAX_WIDTH:
        reason = f"rows of {x.shape[-1]} elements, and holds at most {MAX_WIDTH}"
    elif weight.shape != x.shape[x.ndim - weight.ndim :]:
        reason = f"a weight of shape {tuple(weight.shape)} for x of {tuple(x.shape)}"
    elif x.dtype not in KERNEL_DTYPES or weight.dtype not in KERNEL_DTYPES:
        reason = f"{x.dtype} and {weight.dtype}, and serves float32, bfloat16 and float16"
    return kernel_serves(implementation, "normalisation", reason)
