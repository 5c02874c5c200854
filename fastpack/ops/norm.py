"""Root-mean-square and layer normalisation over the last dimension.

Definitions (Zhang & Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4; Ba et al., "Layer
Normalization", arXiv:1607.06450, eq. 4), in float32, with w = weight or 1 + weight:

    rms_norm(x)   = x / sqrt(mean(x^2) + eps) * w
    layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * w

Families differ in where they round to x's dtype, which is kept, so that results match theirs to the bit in most
places: ``before`` the weight is applied (Llama) or ``after`` (Gemma, OLMo-2, Cohere).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Rounding = Literal["before", "after"]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, rounding: Rounding = "before", unit_offset: bool = False
) -> Tensor:
    """Root-mean-square normalisation of ``[..., H]``.

    Args:
        x: any float dtype; normalised in float32.
        weight: ``[H]``.
        eps: added to the mean square.
        rounding: round to ``x.dtype`` before or after the weight is applied.
        unit_offset: multiply by ``1 + weight`` (Gemma).
    """
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
        out: Tensor = _RmsNorm.apply(x, 1.0 + weight if unit_offset else weight, eps)
        return out
    if rounding == "before":
        # the kernel reduces in float32 and rounds once, as the stock module does before its weight
        return weight * F.rms_norm(x, (x.shape[-1],), None, eps).to(x.dtype)
    scale = 1.0 + weight.float() if unit_offset else weight.float()
    return F.rms_norm(x.float(), (x.shape[-1],), scale, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Layer normalisation of the last dimension without a bias, in float32 (Cohere).

    ``weight`` may have leading dimensions of its own (``[heads, D]``).
    """
    normalised = F.layer_norm(x.float(), (x.shape[-1],), None, None, eps)
    return (weight.to(torch.float32) * normalised).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """Float32 on a CPU, where torch has no fused kernel: results of the plain formula to the bit, with a third of
    the passes over memory in the backward.

        dx = rstd * (g w) - x * rstd^3 * mean(g w x),  dw = sum over tokens of g x rstd
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        weighted = grad * weight
        product = weighted * x
        slope = product.mean(-1, keepdim=True) * rstd.pow(3)
        dweight = None
        if ctx.needs_input_grad[1]:
            torch.mul(grad, x, out=product)
            # [1, T] @ [T, H]: a matrix product instead of one more pass
            dweight = (rstd.reshape(1, -1) @ product.reshape(-1, x.shape[-1])).reshape(weight.shape)
        return weighted.mul_(rstd).addcmul_(x, slope, value=-1), dweight, None
