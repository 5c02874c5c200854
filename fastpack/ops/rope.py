"""Rotary position embedding of packed queries and keys, alone or behind a normalisation of each head.

Definition (Su et al., "RoFormer", arXiv:2104.09864, eq. 34), for each token and head: pairs of elements of the first
R of D are rotated by the token's angles; the other D - R pass unchanged. ``half`` pairs element i with i + R/2,
``interleaved`` pairs 2i with 2i + 1.

    rope(x) = x * cos + rotate(x) * sin,  rotate((first, second)) = (-second, first)
    norm_rope(x) = rope(rms_norm(x, weight))

The transpose of ``rope`` is ``rope`` with ``-sin``, so its backward keeps nothing but the tables. That of
``norm_rope`` computes 1 / rms(x) again, from the x that it reads anyway; with y = rms_norm(x), n = x / rms(x) and w
the weight or 1 + weight (Zhang & Sennrich, arXiv:1910.07467, eq. 4, differentiated):

    dy = rope^T(g),  dx = (dy w - n mean(dy w n)) / rms(x),  dw = sum over tokens and heads of dy n

Suffixes: T tokens, H query heads, K key heads, D head size, R rotated elements of a head, P positions of a table.
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
    """Rotate queries and keys. Differentiable in both, twice.

    Args:
        q: ``[T, H, D]``; k: ``[T, K, D]``, where K may be 0; any strides.
        cos, sin: ``[T, R]`` with R at most D, as transformers' rotary modules return them: both elements of a pair
            hold the same value, and **only the first is read**. Or, with ``positions``, tables ``[P, R]``.
        layout: how elements are paired.
        compute_in_float32: rotate in float32 (Cohere), else in the promoted dtype of heads and tables. The kernel
            always does, and rounds once.
        positions: int64 or int32 ``[T]``, the row of the tables that each token takes. On a GPU nothing checks that
            they lie within the tables.
        implementation: ``auto`` takes the kernel where :func:`use_triton` says so, for what it serves: heads and
            tables whose last dimension has stride 1.

    Returns:
        q and k rotated, of the same shapes and dtypes. Float32 tables (OLMo-2, autocast) are used as they are.

    Raises:
        ValueError: shapes do not fit each other; ``implementation="triton"`` for what the kernel does not serve.
    """
    _check_shapes(q, k, cos, sin, positions)
    if _kernel_serves(implementation, (q, k, cos, sin), positions):
        return _Rope.apply(q, k, cos, sin, positions, layout == "interleaved", False)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    if compute_in_float32:
        cos, sin = cos.float(), sin.float()
    cos, sin = cos[:, None], sin[:, None]
    with torch.autocast(q.device.type, enabled=False):  # which would have parts of other dtypes joined in its own
        return _turned(q, cos, sin, layout), _turned(k, cos, sin, layout)


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
    """Root-mean-square normalisation of each head, then rotation (Qwen 3, Gemma 3).

    Args:
        q: ``[T, H, D]``; k: ``[T, K, D]``, where K may be 0; any strides. Both are kept for the backward: from the
            results, rounded and multiplied by a weight that may be 0, they can't be had again.
        q_weight, k_weight: ``[D]``. Weights of each head (``[H, D]``) or of all heads at once (``[H * D]``) are for
            the separate ops.
        eps, rounding, unit_offset: as of :func:`fastpack.ops.norm.rms_norm`; the kernel rounds once, at the end.
        cos, sin, layout, compute_in_float32, positions, implementation: as of :func:`apply_rope`. Where ``auto``
            does not take the fused kernel, each of the two ops chooses for itself.

    Returns:
        ``[T, H, D]`` and ``[T, K, D]``, of the dtypes that ``rms_norm`` returns.

    Raises:
        ValueError: shapes do not fit each other; ``implementation="triton"`` for what the kernel does not serve.
    """
    _check_shapes(q, k, cos, sin, positions)
    if not q_weight.shape == k_weight.shape == q.shape[-1:]:
        raise ValueError(
            f"norm_rope takes one weight of [{q.shape[-1]}] for all heads of q and one for those of k; got "
            f"{[*q_weight.shape]} and {[*k_weight.shape]}. Other norms: normalise, then apply_rope."
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
    """The kernel of :func:`apply_rope`, one launch for q ``[T, H, D]`` and k ``[T, K, D]``; one may be None."""

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
    """The kernel of :func:`norm_rope`."""

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
        ctx.settings = kernels.Norm(eps, unit_offset, layout == "interleaved")
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
        of_weights = kernels.norm_rotate_backward(
            q, k, grad_q, grad_k, dq, dk, q_weight, k_weight, cos, sin, positions, ctx.settings, needs[2] or needs[3]
        )
        dq_weight, dk_weight = (g if needed else None for g, needed in zip(of_weights, needs[2:4], strict=True))
        return dq, dk, dq_weight, dk_weight, *(None,) * 7


def _unit(grad: Tensor) -> Tensor:
    """With a last dimension of stride 1, as the kernels take it; that of a sum is expanded."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """The definition, for tables ``[T, 1, R]``."""
    rotary = cos.shape[-1]
    first, second = _pairs(x[..., :rotary], layout)
    (cos, _), (sin, _) = _pairs(cos, layout), _pairs(sin, layout)
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.cat(parts, -1) if layout == "half" else torch.stack(parts, -1).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., rotary:]), -1)


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
        got = ", ".join(f"{name} {[*x.shape]}" for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)))
        raise ValueError(
            "RoPE takes q [T, H, D], k [T, K, D], cos and sin [T, R] with R even and at most D, or tables [P, R] with "
            f"positions [T]; got {got}{'' if positions is None else f', positions {[*positions.shape]}'}."
        )


def _kernel_serves(implementation: Implementation, tensors: tuple[Tensor, ...], positions: Tensor | None) -> bool:
    """Whether the kernel runs; raises where it was asked for by name and can't."""
    if not use_triton(implementation, tensors[0]):
        return False
    reason = None
    if any(x.stride(-1) != 1 or x.dtype not in KERNEL_DTYPES for x in tensors):
        given = [(x.dtype, x.stride()) for x in tensors]
        reason = f"{given}, and serves float dtypes of 16 to 64 bits, with a last dimension of stride 1"
    elif positions is not None and (positions.stride(0) != 1 or positions.dtype not in (torch.int64, torch.int32)):
        reason = f"positions of {positions.dtype} and stride {positions.stride(0)}, and serves integers of stride 1"
    return kernel_serves(implementation, "RoPE", reason)


def _pairs(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Views of the two elements of each pair."""
    if layout == "half":
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    return x[..., ::2], x[..., 1::2]
