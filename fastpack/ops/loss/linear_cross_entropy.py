"""Cross-entropy of a linear head, computed chunk by chunk: only one chunk's logits exist at a time.

Definition, with W the weight, s the logit scale, c the softcap (Gemma Team, "Gemma 2", arXiv:2408.00118, section 2)
and, for a LoRA head (Hu et al., arXiv:2106.09685, eq. 3), B A its low-rank update:

    logits = c tanh(s (hidden (W + scale B A)^T + bias) / c)
    loss   = F.cross_entropy(logits.float(), labels)

The forward can compute the gradient of a chunk's logits as soon as it has the logits. It writes the gradient over them
and multiplies it into the gradients of the head's inputs; the backward only scales those (an idea of Hsu et al., "Liger
Kernel", arXiv:2410.10989). With ``reduction="none"`` every token's loss has its own factor in the backward, which
therefore computes the logits again.

The gradients are rounded once, as in the definition: the factor ``1 / count`` of a mean is part of the gradient of the
logits. In float16 this factor would be too small, so it is split into m 2^e: m goes into the gradient of the logits,
and 2^e, which causes no rounding, into the backward's factor.

Shape suffixes: T tokens, K tokens whose label is not ignored, C tokens in a chunk, H hidden size, V vocabulary, R rank
of LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once, is_last_pass
from fastpack.ops.implementation import Implementation, use_triton
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.ops.loss.chunks import Settings, autocast_dtype, by_chunks, chunk_rows

Reduction = Literal["sum", "mean", "none"]
Weight = Tensor | Callable[[], Tensor]

CHUNK = 768
"""Rows in a chunk: less than a twentieth of 16,384 rows, but enough for the matmuls to be bound by arithmetic."""
CHUNK_TRAINED = 1024
"""Rows in a chunk if the weight is trained: more, since each chunk is another pass over the weight's gradient."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Weight,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    lora: tuple[Tensor, Tensor, float] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "sum",
    num_items: int | Tensor | None = None,
    num_kept: int | None = None,
    statistics: Tensor | None = None,
    chunk: int | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Compute the cross-entropy of ``labels`` under a linear head on ``hidden``, without ``[T, V]`` logits.

    The matmuls are computed in autocast's dtype if it is on, else in the weight's; softmax and loss in float32. If the
    host knows how many labels are not ignored (on a CPU they are counted), the rows of ignored labels are left out.
    Otherwise their matmuls are computed, and their losses and gradients are zeros.

    A trained weight in less than float32 needs ``4 V H`` bytes for a float32 sum if there are several chunks. Adding
    up 16 chunks in bfloat16 would triple the error of its gradient.

    Args:
        hidden: ``[T, H]``.
        weight: ``[V, H]``, or a function that returns it (dequantised). The function is called once in the forward, and
            once in the backward if that computes the logits again; such a weight gets no gradient.
        labels: integers ``[T]``.
        bias: ``[V]``, or None.
        lora: A ``[R, H]``, B ``[V, R]`` and the scale of the low-rank update, or None.
        softcap: the bound on the logits' absolute value, or None for no bound.
        logit_scale: the factor on the logits, before the softcap.
        ignore_index: the label of tokens that are left out.
        reduction: ``sum`` of all losses, ``mean``, or ``none`` for each loss ``[T]``, 0 for ignored labels.
        num_items: the divisor of the mean; by default the number of labels that are not ignored.
        num_kept: the number of labels that are not ignored, or an upper bound, if the host knows it.
        statistics: ``[2]`` on the device of hidden, or None. The forward adds the sum of the entropies of all
            predictions whose label is not ignored, in nats, and the number of those labels that are the likeliest
            token.
        chunk: the number of rows of logits in a chunk; by default :data:`CHUNK`, or :data:`CHUNK_TRAINED` for a trained
            weight.
        implementation: ``auto`` runs the kernel of softmax and loss if :func:`use_triton` allows it; in float64 the
            definition is computed.

    Returns:
        The loss in float32 (float64 for float64 inputs): 0-d, or ``[T]`` with ``reduction="none"``.

    Raises:
        ValueError: the shapes don't fit each other, or an argument has a value that is not allowed.

    Example:
        >>> hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(32, 8)
        >>> labels = torch.tensor([3, 1, IGNORE_INDEX, 0, 31, 7])
        >>> loss = linear_cross_entropy(hidden, weight, labels, reduction="mean")
        >>> torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, labels))
    """
    _check(hidden, labels, reduction, num_items, chunk)
    labels = labels.to(hidden.device).contiguous()
    tracing = torch.compiler.is_compiling()
    if num_kept is None and hidden.device.type == "cpu" and not tracing:
        num_kept = int((labels != ignore_index).sum())
    order: Tensor | None = None
    if num_kept is not None and num_kept < len(labels):
        order = torch.argsort((labels == ignore_index).to(torch.uint8), stable=True)[:num_kept]
    factor: Tensor | None = None
    if reduction == "mean":
        factor = _reciprocal(labels, ignore_index, num_items, torch.promote_types(hidden.dtype, torch.float32))
    dense = weight if isinstance(weight, Tensor) else None
    trained = dense is not None and dense.requires_grad and torch.is_grad_enabled()
    kept_rows = len(labels) if order is None else len(order)
    settings = Settings(
        make_weight=None if isinstance(weight, Tensor) else weight,
        lora_scale=1.0 if lora is None else lora[2],
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        per_token=reduction == "none",
        rows=chunk_rows(kept_rows, chunk or (CHUNK_TRAINED if trained else CHUNK)),
        triton=use_triton(implementation, hidden) and hidden.dtype != torch.float64,
        differentiate=torch.is_grad_enabled(),
        statistics=statistics,
    )
    a, b = (None, None) if lora is None else lora[:2]
    return _LinearCrossEntropy.apply(settings, hidden, dense, bias, a, b, labels, order, factor)


def _check(hidden: Tensor, labels: Tensor, reduction: str, num_items: int | Tensor | None, chunk: int | None) -> None:
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and labels {tuple(labels.shape)}; pass hidden [T, H] and labels "
            "[T], flattened."
        )
    if labels.is_floating_point():
        raise ValueError(f"labels are {labels.dtype}; pass integers.")
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction={reduction!r}; choose one of {', '.join(map(repr, get_args(Reduction)))}.")
    if num_items is not None and reduction != "mean":
        raise ValueError(
            f"num_items is the divisor of a mean, but reduction={reduction!r}; leave it out, or pass reduction='mean'."
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}; pass the number of rows of logits in a chunk, 1 or more.")


def _reciprocal(labels: Tensor, ignore_index: int, num_items: int | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the reciprocal of a mean's divisor, 0-d."""
    if num_items is None:
        num_items = (labels != ignore_index).sum()
    if isinstance(num_items, Tensor):
        return num_items.to(labels.device, dtype).reshape(()).reciprocal()
    return torch.full((), num_items, dtype=dtype, device=labels.device).reciprocal()


class _LinearCrossEntropy(torch.autograd.Function):
    """The autograd Function of :func:`linear_cross_entropy`. Inputs 1 to 5 are hidden, weight, bias, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        labels: Tensor,
        order: Tensor | None,
        factor: Tensor | None,
    ) -> Tensor:
        autocast = autocast_dtype(hidden)
        inputs = (hidden, weight, bias, a, b)
        needs = tuple(needed and settings.differentiate for needed in ctx.needs_input_grad[1:6])
        ctx.settings, ctx.autocast, ctx.dtypes = settings, autocast, [x if x is None else x.dtype for x in inputs]
        if settings.per_token:
            losses, *_ = by_chunks(settings, autocast, inputs, labels, order, None, (False,) * 5)
            ctx.save_for_backward(*inputs, labels, order)
            if order is None:
                return losses
            return losses.new_zeros(len(labels)).index_copy_(0, order, losses)
        # without labels the divisor is 0: the gradient must be zero and the loss NaN, as in the definition
        scale = factor.masked_fill(factor.isinf(), 1.0) if factor is not None and any(needs) else None
        losses, grads, power = by_chunks(settings, autocast, inputs, labels, order, scale, needs)
        ctx.save_for_backward(*grads, power)
        total = losses.sum()
        return total if factor is None else total * factor

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        settings: Settings = ctx.settings
        grads: Sequence[Tensor | None]
        if settings.per_token:
            *inputs, labels, order = ctx.saved_tensors
            scale = grad if order is None else grad.index_select(0, order)
            needs = ctx.needs_input_grad[1:6]
            settings = replace(settings, statistics=None)  # the forward has added them already
            _, grads, _ = by_chunks(settings, ctx.autocast, inputs, labels, order, scale.contiguous(), needs)
            results = [x if x is None else x.to(dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True)]
        else:
            *grads, power = ctx.saved_tensors
            scale = grad if power is None else grad * power
            results = [x if x is None else _scale(x, scale, dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True)]
        return None, *results, None, None, None


def _scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * scale``, computed in float32 and rounded once, in x's memory if nothing reads x again."""
    factor = scale.reshape((1,) * x.ndim)  # a 0-d factor would be rounded to x's dtype first
    if torch.compiler.is_compiling():
        return (x * factor).to(dtype)
    return torch.mul(x, factor, out=x if x.dtype == dtype and is_last_pass() else torch.empty_like(x, dtype=dtype))
