"""Rotary position embedding of packed queries and keys.

Definition (Su et al., "RoFormer", arXiv:2104.09864, eq. 34), for each token and head: pairs of elements of the first
R of D are rotated by the token's angles; the other D - R pass unchanged. ``half`` pairs element i with i + R/2,
``interleaved`` pairs 2i with 2i + 1.

    out = x * cos + rotate(x) * sin,  rotate((first, second)) = (-second, first)

Its backward is the same with ``sin`` turned around, so nothing but the tables is kept for it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Layout = Literal["half", "interleaved"]


def apply_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: Layout = "half",
    compute_in_float32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys.

    Args:
        q: ``[T, H, D]``; k: ``[T, K, D]``.
        cos, sin: ``[T, R]`` with R at most D, both halves written out, as transformers' rotary modules return them.
        layout: how elements are paired.
        compute_in_float32: rotate in float32 (Cohere), else in the promoted dtype of heads and tables.

    Returns:
        q and k rotated, of the same shapes and dtypes. Float32 tables (OLMo-2, autocast) are used as they are.
    """
    if compute_in_float32:
        cos, sin = cos.float(), sin.float()
    cos, sin = cos[:, None], sin[:, None]
    return _Rotate.apply(q, cos, sin, layout, False), _Rotate.apply(k, cos, sin, layout, False)


class _Rotate(torch.autograd.Function):
    """``x * cos + rotate(x) * sin``, or with ``backwards`` the transpose of that map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, backwards: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout, ctx.backwards = layout, backwards
        rotary = cos.shape[-1]
        wide = x.to(torch.promote_types(x.dtype, cos.dtype))
        out = torch.empty_like(wide)
        out[..., rotary:] = wide[..., rotary:]
        first, second = _pairs(wide[..., :rotary], layout)
        out_first, out_second = _pairs(out[..., :rotary], layout)
        (cos_first, cos_second), (sin_first, sin_second) = _pairs(cos, layout), _pairs(sin, layout)
        if backwards:
            sin_first, sin_second = sin_second, sin_first
        sign = 1 if backwards else -1
        torch.mul(first, cos_first, out=out_first).addcmul_(second, sin_first, value=sign)
        torch.mul(second, cos_second, out=out_second).addcmul_(first, sin_second, value=-sign)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grad, cos, sin, ctx.layout, not ctx.backwards), None, None, None, None


def _pairs(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Views of the two elements of each pair."""
    if layout == "half":
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    return x[..., ::2], x[..., 1::2]
