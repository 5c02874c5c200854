"""Rotary position embedding of packed queries and keys.

Definition (Su et al., "RoFormer", arXiv:2104.09864, eq. 34), for each token and head: pairs of elements of the first
R of D are rotated by the token's angles; the other D - R pass unchanged. ``half`` pairs element i with i + R/2,
``interleaved`` pairs 2i with 2i + 1.

    out = x * cos + rotate(x) * sin
"""

from __future__ import annotations

from typing import Literal

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
    cos, sin = cos[:, None], sin[:, None]
    return (
        _rotate(q, cos, sin, layout, compute_in_float32),
        _rotate(k, cos, sin, layout, compute_in_float32),
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, compute_in_float32: bool) -> Tensor:
    rotary = cos.shape[-1]
    turned = x if rotary == x.shape[-1] else x[..., :rotary]
    if compute_in_float32:
        turned = turned.float()
    if layout == "half":
        first, second = turned.chunk(2, -1)
        crossed = torch.cat((-second, first), -1)
    else:
        crossed = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    out = (turned * cos + crossed * sin).to(x.dtype)
    return out if rotary == x.shape[-1] else torch.cat((out, x[..., rotary:]), -1)
