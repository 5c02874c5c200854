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
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once, is_last_pass
from fastpack.ops.implementation import Implementation, use_triton
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.ops.loss.cross_entropy import cross_entropy_

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
    settings = _Settings(
        make_weight=None if isinstance(weight, Tensor) else weight,
        lora_scale=1.0 if lora is None else lora[2],
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        per_token=reduction == "none",
        rows=_chunk_rows(kept_rows, chunk or (CHUNK_TRAINED if trained else CHUNK)),
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


def _chunk_rows(tokens: int, most: int) -> int:
    """Return the number of rows in a chunk, for chunks of about the same size in whole tiles of a matmul."""
    if tokens <= most:
        return max(tokens, 1)
    count = -(-tokens // most)
    even = -(-tokens // count)
    return min(most, -(-even // 128) * 128)


@dataclass(frozen=True, eq=False)
class _Settings:
    """The arguments of the Function that are not tensors, and ``statistics``, which needs no gradient."""

    make_weight: Callable[[], Tensor] | None
    lora_scale: float
    softcap: float | None
    logit_scale: float
    ignore_index: int
    per_token: bool
    rows: int
    triton: bool
    differentiate: bool
    statistics: Tensor | None = None


class _LinearCrossEntropy(torch.autograd.Function):
    """The autograd Function of :func:`linear_cross_entropy`. Inputs 1 to 5 are hidden, weight, bias, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: _Settings,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        labels: Tensor,
        order: Tensor | None,
        factor: Tensor | None,
    ) -> Tensor:
        device = hidden.device.type
        casts = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        autocast = torch.get_autocast_dtype(device) if casts else None
        inputs = (hidden, weight, bias, a, b)
        needs = tuple(needed and settings.differentiate for needed in ctx.needs_input_grad[1:6])
        ctx.settings, ctx.autocast, ctx.dtypes = settings, autocast, [x if x is None else x.dtype for x in inputs]
        if settings.per_token:
            losses, *_ = _by_chunks(settings, autocast, inputs, labels, order, None, (False,) * 5)
            ctx.save_for_backward(*inputs, labels, order)
            if order is None:
                return losses
            return losses.new_zeros(len(labels)).index_copy_(0, order, losses)
        # without labels the divisor is 0: the gradient must be zero and the loss NaN, as in the definition
        scale = factor.masked_fill(factor.isinf(), 1.0) if factor is not None and any(needs) else None
        losses, grads, power = _by_chunks(settings, autocast, inputs, labels, order, scale, needs)
        ctx.save_for_backward(*grads, power)
        total = losses.sum()
        return total if factor is None else total * factor

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        grads: Sequence[Tensor | None]
        if settings.per_token:
            *inputs, labels, order = ctx.saved_tensors
            scale = grad if order is None else grad.index_select(0, order)
            needs = ctx.needs_input_grad[1:6]
            settings = replace(settings, statistics=None)  # the forward has added them already
            _, grads, _ = _by_chunks(settings, ctx.autocast, inputs, labels, order, scale.contiguous(), needs)
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


def _by_chunks(
    settings: _Settings,
    autocast: torch.dtype | None,
    inputs: Sequence[Tensor | None],
    labels: Tensor,
    order: Tensor | None,
    scale: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
    """Compute the losses, and the gradients of the inputs that need one, chunk by chunk.

    Args:
        settings: the arguments that are not tensors.
        autocast: the dtype of the matmuls, or None for the weight's.
        inputs: hidden, weight, bias, A and B.
        labels: ``[T]``.
        order: the indices ``[K]`` of the rows to compute, or None for all.
        scale: the factor on the gradients, 0-d or ``[K]``, or None for 1.
        needs: for each input, whether it needs a gradient.

    Returns:
        The losses ``[K]``; the gradients; and None or a 0-d factor by which the gradients still have to be multiplied.
        The gradient of hidden is in hidden's dtype. The gradient of a weight is in the matmuls' dtype if there is one
        chunk, else in float32. All others are in float32.
    """
    hidden, weight, bias, a, b = inputs
    assert hidden is not None
    with torch.autocast(hidden.device.type, enabled=False):
        dense = settings.make_weight() if settings.make_weight is not None else weight
        assert dense is not None
        dtype = autocast or dense.dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)
        dense = dense.to(dtype)
        power: Tensor | None = None
        if scale is not None and scale.ndim == 0 and torch.float16 in (dtype, hidden.dtype):
            mantissa = torch.frexp(scale).mantissa
            scale, power = mantissa, scale / mantissa
        if bias is not None:
            bias = bias.to(dtype)
        if a is not None and b is not None:
            a, b = (a * settings.lora_scale).to(dtype), b.to(dtype)
        if order is not None:
            labels = labels.index_select(0, order)
        total, vocab = len(labels), len(dense)
        losses = torch.empty(total, dtype=sum_dtype, device=hidden.device)
        row_statistics = None if settings.statistics is None else losses.new_empty(total, 2)
        dhidden, dweight, dbias, da, db = (None,) * 5
        if needs[0]:
            make = torch.empty_like if order is None else torch.zeros_like
            dhidden = make(hidden, memory_format=torch.contiguous_format)
        # rows are padded to whole vectors, for any size of the vocabulary
        buffer = torch.empty(min(settings.rows, total), -(-vocab // 64) * 64, dtype=dtype, device=hidden.device)
        gradient = any(needs)
        for start in range(0, total, settings.rows):
            stop = min(start + settings.rows, total)
            here = None if order is None else order[start:stop]
            h = (hidden[start:stop] if here is None else hidden.index_select(0, here)).to(dtype)
            logits = buffer[: stop - start, :vocab]
            _mm_into(logits, h, dense.t(), bias)
            if a is not None and b is not None:
                low = torch.mm(h, a.t())
                logits.addmm_(low, b.t())
            factor = scale if scale is None or scale.ndim == 0 else scale[start:stop]
            cross_entropy_(
                logits,
                labels[start:stop],
                losses[start:stop],
                factor,
                ignore_index=settings.ignore_index,
                logit_scale=settings.logit_scale,
                softcap=settings.softcap,
                gradient=gradient,
                triton=settings.triton,
                statistics=None if row_statistics is None else row_statistics[start:stop],
            )
            if not gradient:
                continue
            # from here on, logits holds its own gradient
            dlow = torch.mm(logits, b) if b is not None and (needs[0] or needs[3]) else None
            if dhidden is not None:
                _write_input(dhidden, here, start, stop, logits, dense, dlow, a)
            if needs[1]:
                single = total <= settings.rows and weight is not None and weight.dtype == dtype
                dweight = torch.mm(logits.t(), h) if single else _add_mm(dweight, logits.t(), h, sum_dtype)
            if needs[2]:
                share = logits.sum(0, dtype=sum_dtype)
                dbias = share if dbias is None else dbias.add_(share)
            if needs[3]:
                assert dlow is not None
                da = _add_mm(da, dlow.t(), h, sum_dtype)
            if needs[4]:
                db = _add_mm(db, logits.t(), low, sum_dtype)
        if settings.statistics is not None and row_statistics is not None:
            settings.statistics.add_(row_statistics.sum(0))
        if da is not None:
            da.mul_(settings.lora_scale)
        grads = [dhidden, dweight, dbias, da, db]
        if total == 0:
            grads = [
                torch.zeros_like(x) if needed and x is not None else None
                for x, needed in zip(inputs, needs, strict=True)
            ]
    return losses, grads, power


def _write_input(
    dhidden: Tensor,
    here: Tensor | None,
    start: int,
    stop: int,
    dlogits: Tensor,
    weight: Tensor,
    dlow: Tensor | None,
    a: Tensor | None,
) -> None:
    """Write the gradient of a chunk's rows of hidden into its place in ``dhidden``."""
    direct = here is None and dhidden.dtype == dlogits.dtype
    rows = dhidden[start:stop]
    if direct:
        _mm_into(rows, dlogits, weight)
    else:
        rows = torch.mm(dlogits, weight)
    if dlow is not None and a is not None:
        rows.addmm_(dlow, a)
    if here is not None:
        dhidden.index_copy_(0, here, rows.to(dhidden.dtype))
    elif not direct:
        dhidden[start:stop] = rows


def _mm_into(out: Tensor, x: Tensor, y: Tensor, bias: Tensor | None = None) -> None:
    """Write ``x @ y + bias`` into ``out``, which may be a view."""
    if torch.compiler.is_compiling():  # the compiler can't trace a matmul into a view
        out.copy_(torch.mm(x, y) if bias is None else torch.addmm(bias, x, y))
    elif bias is None:
        torch.mm(x, y, out=out)
    else:
        torch.addmm(bias, x, y, out=out)


def _add_mm(total: Tensor | None, x: Tensor, y: Tensor, sum_dtype: torch.dtype) -> Tensor:
    """Add ``x @ y``, a sum over tokens, to ``total`` in place and in the dtype ``sum_dtype``."""
    if x.dtype == sum_dtype:
        return torch.mm(x, y) if total is None else total.addmm_(x, y)
    if not x.is_cuda:
        return _add_mm(total, x.to(sum_dtype), y.to(sum_dtype), sum_dtype)
    if torch.compiler.is_compiling():  # the compiler doesn't support out_dtype with addmm
        share = torch.mm(x, y, out_dtype=sum_dtype)
        return share if total is None else total.add_(share)
    if total is None:
        return torch.mm(x, y, out_dtype=sum_dtype)
    return torch.addmm(total, x, y, out_dtype=sum_dtype, out=total)
