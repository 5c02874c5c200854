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

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.ops.implementation import Implementation

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
        implementation: see :data:`fastpack.ops.implementation.Implementation`.

    Returns:
        ``[T, C]`` in x's dtype.

    Example:
        >>> short_conv(torch.ones(5, 1), torch.ones(1, 4), None, torch.tensor([0, 3, 5], dtype=torch.int32))[:, 0]
        tensor([1., 2., 3., 1., 2.])
    """
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
