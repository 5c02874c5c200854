"""Rotary position embedding (RoPE) of packed queries and keys, alone or after a norm of each head.

Definition (Su et al., "RoFormer", arXiv:2104.09864, eq. 34), for each token and head: the first R of D elements form
pairs, which are rotated by the token's angles; the other D - R elements stay unchanged. The layout ``half`` pairs
element i with i + R/2, ``interleaved`` pairs 2i with 2i + 1.

    rope(x) = x * cos + rotate(x) * sin,  rotate((first, second)) = (-second, first)
    norm_rope(x) = rope(rms_norm(x, weight))

The transpose of ``rope`` is ``rope`` with ``-sin``, so its backward saves only the tables. The backward of
``norm_rope`` computes 1 / rms(x) again, from the x that it reads anyway. With y = rms_norm(x), n = x / rms(x), g the
gradient of the result and w the weight or 1 + weight (Zhang & Sennrich, arXiv:1910.07467, eq. 4, differentiated):

    dy = rope^T(g),  dx = (dy w - n mean(dy w n)) / rms(x),  dw = sum over tokens and heads of dy n

Shape suffixes: T tokens, H query heads, K key heads, D head size, R rotated elements of a head, P rows of a table.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.implementation import Implementation, kernel_serves, use_triton
from fastpack.ops.kinds import Rounding
from fastpack.ops.norm import rms_norm

Layout = Literal["half", "interleaved"]

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def apply_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: Layout = "half",
    compute_in_float32: bool = False,
    positions: Tensor | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their tokens' angles; twice differentiable in both.

    Args:
        q: ``[T, H, D]``, with any strides.
        k: ``[T, K, D]``, with any strides; K may be 0.
        cos: ``[T, R]`` with R at most D, as transformers' rotary modules return it: both elements of a pair hold the
            same value, and **only the first is read**. With ``positions``, a table ``[P, R]``.
        sin: of the same shape as ``cos``. Float32 cos and sin (OLMo-2, autocast) are not cast.
        layout: how elements are paired.
        compute_in_float32: rotate in float32 (Cohere), else in the promoted dtype of heads and tables. The kernel
            always rotates in float32 and rounds once.
        positions: int64 or int32 ``[T]``, each token's row of the tables. On a GPU nothing checks that the positions
            lie within the tables.
        implementation: ``auto`` runs the kernel if :func:`use_triton` allows it and the kernel supports the inputs:
            heads and tables whose last dimension has stride 1.

    Returns:
        q and k rotated, with unchanged shapes and dtypes.

    Raises:
        ValueError: the shapes don't fit each other, or ``implementation="triton"`` and the kernel doesn't support the
            inputs.

    Example:
        >>> q, k = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
        >>> angles = torch.arange(5)[:, None] * 10000 ** (-torch.arange(4) / 4)
        >>> cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        >>> q, k = apply_rope(q, k, cos, sin)
    """
    _check_shapes(q, k, cos, sin, positions)
    if _kernel_serves(implementation, (q, k, cos, sin), positions):
        return _Rope.apply(q, k, cos, sin, positions, layout == "interleaved", False)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    if compute_in_float32:
        cos, sin = cos.float(), sin.float()
    cos, sin = cos[:, None], sin[:, None]
    with torch.autocast(q.device.type, enabled=False):  # autocast would change the dtype of parts that are concatenated
        return _rotated(q, cos, sin, layout), _rotated(k, cos, sin, layout)


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: Layout = "half",
    rounding: Rounding = "before",
    unit_offset: bool = False,
    compute_in_float32: bool = False,
    positions: Tensor | None = None,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm to each head, then rotate (Qwen 3, Gemma 3).

    The backward needs q and k: the results are rounded and multiplied by a weight that may be 0, so the inputs can't be
    recovered from them.

    Args:
        q: ``[T, H, D]``, with any strides.
        k: ``[T, K, D]``, with any strides; K may be 0.
        q_weight: ``[D]``. If each head has its own weight (``[H, D]``) or one norm covers all heads (``[H * D]``), call
            the norm and :func:`apply_rope` separately.
        k_weight: ``[D]``.
        eps: as for :func:`fastpack.ops.norm.rms_norm`.
        cos: as for :func:`apply_rope`.
        sin: as for :func:`apply_rope`.
        layout: as for :func:`apply_rope`.
        rounding: as for :func:`fastpack.ops.norm.rms_norm`; the kernel rounds once, at the end.
        unit_offset: as for :func:`fastpack.ops.norm.rms_norm`.
        compute_in_float32: as for :func:`apply_rope`.
        positions: as for :func:`apply_rope`.
        implementation: as for :func:`apply_rope`. If ``auto`` doesn't run the fused kernel, the norm and the rotation
            each choose their own implementation.

    Returns:
        q and k, ``[T, H, D]`` and ``[T, K, D]``, in the dtypes that ``rms_norm`` returns.

    Raises:
        ValueError: the shapes don't fit each other, or ``implementation="triton"`` and the kernel doesn't support the
            inputs.
    """
    _check_shapes(q, k, cos, sin, positions)
    if not q_weight.shape == k_weight.shape == q.shape[-1:]:
        raise ValueError(
            f"norm_rope takes one weight of [{q.shape[-1]}] for all heads of q and one for those of k; got "
            f"{[*q_weight.shape]} and {[*k_weight.shape]}. For other weights, call rms_norm, then apply_rope."
        )
    if _kernel_serves(implementation, (q, k, cos, sin, q_weight, k_weight), positions):
        return _NormRope.apply(
            q, k, q_weight, k_weight, cos, sin, positions, eps, layout, rounding == "before", unit_offset
        )
    q, k = (
        rms_norm(x, weight, eps, rounding=rounding, unit_offset=unit_offset, implementation=implementation)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return apply_rope(
        q,
        k,
        cos,
        sin,
        layout=layout,
        compute_in_float32=compute_in_float32,
        positions=positions,
        implementation=implementation,
    )


class _Rope(torch.autograd.Function):
    """The autograd Function of :func:`apply_rope`: one launch for q ``[T, H, D]``, k ``[T, K, D]`` or both."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor | None,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        interleaved: bool,
        inverse: bool,
    ) -> tuple[Tensor | None, ...]:
        from fastpack.ops.kernels import rope as kernels

        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved, ctx.inverse = interleaved, inverse
        outs = tuple(None if x is None else x.new_empty(x.shape) for x in (q, k))
        pairs = [(x, out) for x, out in zip((q, k), outs, strict=True) if x is not None and out is not None]
        kernels.rotate(pairs, cos, sin, positions, interleaved=interleaved, inverse=inverse)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k = (_unit(grad) if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))
        return *_Rope.apply(q, k, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse), *(None,) * 5


class _NormRope(torch.autograd.Function):
    """The autograd Function of :func:`norm_rope`, which calls its kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        eps: float,
        layout: Layout,
        round_before: bool,
        unit_offset: bool,
    ) -> tuple[Tensor, Tensor]:
        from fastpack.ops.kernels import norm_rope as kernels

        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin, positions)
        ctx.settings = kernels.NormConstants(eps, unit_offset, layout == "interleaved")
        q_out, k_out = (
            x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype) if round_before else x.dtype)
            for x, weight in ((q, q_weight), (k, k_weight))
        )
        kernels.norm_rotate(q, k, q_out, k_out, q_weight, k_weight, cos, sin, positions, ctx.settings)
        return q_out, k_out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        from fastpack.ops.kernels import norm_rope as kernels

        q, k, q_weight, k_weight, cos, sin, positions = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_q, grad_k = _unit(grad_q), _unit(grad_k)
        dq, dk = (x.new_empty(x.shape) if needed else None for x, needed in zip((q, k), needs, strict=False))
        weight_grads = kernels.norm_rotate_backward(
            q, k, grad_q, grad_k, dq, dk, q_weight, k_weight, cos, sin, positions, ctx.settings, needs[2] or needs[3]
        )
        dq_weight, dk_weight = (g if needed else None for g, needed in zip(weight_grads, needs[2:4], strict=True))
        return dq, dk, dq_weight, dk_weight, *(None,) * 7


def _unit(grad: Tensor) -> Tensor:
    """Return ``grad`` with stride 1 in the last dimension, as the kernels need; the gradient of a sum has stride 0."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate ``x`` as defined, by tables ``[T, 1, R]``."""
    rotary = cos.shape[-1]
    first, second = _pairs(x[..., :rotary], layout)
    (cos, _), (sin, _) = _pairs(cos, layout), _pairs(sin, layout)
    parts = first * cos - second * sin, second * cos + first * sin
    rotated = torch.cat(parts, -1) if layout == "half" else torch.stack(parts, -1).flatten(-2)
    return torch.cat((rotated.to(x.dtype), x[..., rotary:]), -1)


def _check_shapes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    tokens = q.shape[0]
    rotary = cos.shape[-1]
    if (
        not q.ndim == k.ndim == cos.ndim + 1 == 3
        or k.shape[0] != tokens
        or k.shape[2] != q.shape[2]
        or cos.shape != sin.shape
        or rotary % 2
        or rotary > q.shape[2]
        or (cos.shape[0] if positions is None else positions.numel()) != tokens
        or (positions is not None and positions.ndim != 1)
    ):
        shapes = ", ".join(f"{name} {[*x.shape]}" for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)))
        raise ValueError(
            "RoPE takes q [T, H, D], k [T, K, D], cos and sin [T, R] with R even and at most D, or tables [P, R] with "
            f"positions [T]; got {shapes}{'' if positions is None else f', positions {[*positions.shape]}'}."
        )


def _kernel_serves(implementation: Implementation, tensors: tuple[Tensor, ...], positions: Tensor | None) -> bool:
    """Return whether the kernel should run.

    Raises:
        ValueError: ``implementation="triton"``, and the kernel doesn't support the inputs.
    """
    if not use_triton(implementation, tensors[0]):
        return False
    reason = None
    if any(x.stride(-1) != 1 or x.dtype not in KERNEL_DTYPES for x in tensors):
        layouts = [(x.dtype, x.stride()) for x in tensors]
        reason = f"{layouts}, but supports float dtypes of 16 to 64 bits with stride 1 in the last dimension"
    elif positions is not None and (positions.stride(0) != 1 or positions.dtype not in (torch.int64, torch.int32)):
        reason = f"positions of {positions.dtype} and stride {positions.stride(0)}, but supports integers of stride 1"
    return kernel_serves(implementation, "RoPE", reason)


def _pairs(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second elements of all pairs."""
    if layout == "half":
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    return x[..., ::2], x[..., 1::2]
