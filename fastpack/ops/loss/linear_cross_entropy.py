"""Cross-entropy of a linear head over chunks of tokens: the logits of one chunk exist at a time.

Definition, with W the weight, s the logit scale, c the softcap (Gemma Team, "Gemma 2", arXiv:2408.00118, section 2)
and, for a LoRA head (Hu et al., arXiv:2106.09685, eq. 3), B A its low-rank update:

    logits = c tanh(s (hidden (W + scale B A)^T + bias) / c)
    loss   = F.cross_entropy(logits.float(), labels)

The gradient of a chunk's logits is known as soon as they are, so it is written over them and multiplied on into the
gradients of the head's inputs, in the forward; the backward scales those (the idea is that of Hsu et al., "Liger
Kernel", arXiv:2410.10989). Where each token's loss is returned, each has a factor of its own, and the backward computes
the logits anew.

The gradients are rounded once, as the definition's are: ``1 / count`` of a mean goes into the gradient of the logits.
In float16 it would be too small there: it is m 2^e, of which m goes there, and 2^e, which rounds nothing, into the
backward's factor.

Shape suffixes: T tokens, K tokens whose label is not ignored, C tokens in a chunk, H hidden, V vocabulary, R rank of
LoRA.
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
"""Rows of logits at a time: below a twentieth of 16,384 rows, enough for the products to be bound by arithmetic."""
CHUNK_TRAINED = 1024
"""The same where the weight is trained, since each chunk is another pass over its gradient."""


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
    """Cross-entropy of ``labels`` under a linear head on ``hidden``, without ``[T, V]`` logits.

    Products are computed in autocast's dtype where it is on, else in the weight's; softmax and loss in float32.
    Ignored labels cost nothing where the number of the others is known on the host (on a CPU it is counted): their
    rows are left out. Elsewhere they cost their products, and give zeros.

    A trained weight below float32 that takes several chunks costs ``4 V H`` bytes for a float32 sum; adding 16 chunks
    up in bfloat16 would triple the error of its gradient.

    Args:
        hidden: ``[T, H]``.
        weight: ``[V, H]``, or what returns it (dequantised), called once each way and not trained.
        labels: integers ``[T]``.
        bias: ``[V]``.
        lora: A ``[R, H]``, B ``[V, R]`` and the factor on their product.
        softcap: logits are kept between plus and minus this.
        logit_scale: factor on the logits, before the softcap.
        ignore_index: a label that is left out.
        reduction: the float32 result is the sum of all losses, their mean, or each loss ``[T]``, 0 where ignored.
        num_items: what the mean divides by; by default the number of labels that are not ignored.
        num_kept: that number, or any that is not below it, where the host knows it.
        statistics: ``[2]`` on the device of hidden, to which is added, in the forward, the sum of the entropies of the
            predictions whose label is kept, in nats, and how many of those labels are the likeliest token.
        chunk: rows of logits at a time.

    Raises:
        ValueError: shapes don't fit, or an argument has a value that it doesn't take.
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
        factor = _one_over(labels, ignore_index, num_items, torch.promote_types(hidden.dtype, torch.float32))
    dense = weight if isinstance(weight, Tensor) else None
    trained = dense is not None and dense.requires_grad and torch.is_grad_enabled()
    kept = len(labels) if order is None else len(order)
    settings = _Settings(
        make_weight=None if isinstance(weight, Tensor) else weight,
        lora_scale=1.0 if lora is None else lora[2],
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        each=reduction == "none",
        rows=_chunk_rows(kept, chunk or (CHUNK_TRAINED if trained else CHUNK)),
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
        raise ValueError(f"num_items is what a mean divides by, but reduction={reduction!r}.")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}; pass the number of rows of logits to hold at a time, 1 or more.")


def _one_over(labels: Tensor, ignore_index: int, num_items: int | Tensor | None, dtype: torch.dtype) -> Tensor:
    """0-d: one over what a mean divides by."""
    if num_items is None:
        num_items = (labels != ignore_index).sum()
    if isinstance(num_items, Tensor):
        return num_items.to(labels.device, dtype).reshape(()).reciprocal()
    return torch.full((), num_items, dtype=dtype, device=labels.device).reciprocal()


def _chunk_rows(tokens: int, most: int) -> int:
    """Chunks of about the same size, in whole tiles of a matrix product."""
    if tokens <= most:
        return max(tokens, 1)
    count = -(-tokens // most)
    even = -(-tokens // count)
    return min(most, -(-even // 128) * 128)


@dataclass(frozen=True, eq=False)
class _Settings:
    """What the Function needs beside tensors."""

    make_weight: Callable[[], Tensor] | None
    lora_scale: float
    softcap: float | None
    logit_scale: float
    ignore_index: int
    each: bool
    rows: int
    triton: bool
    differentiate: bool
    statistics: Tensor | None = None


class _LinearCrossEntropy(torch.autograd.Function):
    """Inputs 1 to 5 are hidden, weight, bias, A and B."""

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
        if settings.each:
            losses, *_ = _by_chunks(settings, autocast, inputs, labels, order, None, (False,) * 5)
            ctx.save_for_backward(*inputs, labels, order)
            if order is None:
                return losses
            return losses.new_zeros(len(labels)).index_copy_(0, order, losses)
        # without a label there is nothing to divide: the gradient is zero, the loss NaN, as the definition's are
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
        if settings.each:
            *inputs, labels, order = ctx.saved_tensors
            scale = grad if order is None else grad.index_select(0, order)
            needs = ctx.needs_input_grad[1:6]
            settings = replace(settings, statistics=None)  # which the forward has seen to
            _, grads, _ = _by_chunks(settings, ctx.autocast, inputs, labels, order, scale.contiguous(), needs)
            made = [x if x is None else x.to(dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True)]
        else:
            *grads, power = ctx.saved_tensors
            scale = grad if power is None else grad * power
            made = [x if x is None else _times(x, scale, dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True)]
        return None, *made, None, None, None


def _times(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in float32, rounded once, in place of x where nobody can read it again."""
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
    """The loss of each row ``[K]``, and the gradients of the inputs that need one, times ``scale`` (0-d or ``[K]``) but
    for the third result, a factor that is left for later.

    The gradients of hidden and of a weight that takes one chunk are in the dtype of the products, the others in
    float32.
    """
    hidden, weight, bias, a, b = inputs
    assert hidden is not None
    with torch.autocast(hidden.device.type, enabled=False):
        dense = settings.make_weight() if settings.make_weight is not None else weight
        assert dense is not None
        dtype = autocast or dense.dtype
        wide = torch.promote_types(dtype, torch.float32)
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
        losses = torch.empty(total, dtype=wide, device=hidden.device)
        of_rows = None if settings.statistics is None else losses.new_empty(total, 2)
        dhidden, dweight, dbias, da, db = (None,) * 5
        if needs[0]:
            make = torch.empty_like if order is None else torch.zeros_like
            dhidden = make(hidden, memory_format=torch.contiguous_format)
        # rows of whole vectors, whatever the size of the vocabulary
        buffer = torch.empty(min(settings.rows, total), -(-vocab // 64) * 64, dtype=dtype, device=hidden.device)
        gradient = any(needs)
        for start in range(0, total, settings.rows):
            stop = min(start + settings.rows, total)
            here = None if order is None else order[start:stop]
            h = (hidden[start:stop] if here is None else hidden.index_select(0, here)).to(dtype)
            logits = buffer[: stop - start, :vocab]
            _product(h, dense.t(), logits, bias)
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
                statistics=None if of_rows is None else of_rows[start:stop],
            )
            if not gradient:
                continue
            # from here on, logits holds its own gradient
            dlow = torch.mm(logits, b) if b is not None and (needs[0] or needs[3]) else None
            if dhidden is not None:
                _write_input(dhidden, here, start, stop, logits, dense, dlow, a)
            if needs[1]:
                single = total <= settings.rows and weight is not None and weight.dtype == dtype
                dweight = torch.mm(logits.t(), h) if single else _add_product(dweight, logits.t(), h, wide)
            if needs[2]:
                share = logits.sum(0, dtype=wide)
                dbias = share if dbias is None else dbias.add_(share)
            if needs[3]:
                assert dlow is not None
                da = _add_product(da, dlow.t(), h, wide)
            if needs[4]:
                db = _add_product(db, logits.t(), low, wide)
        if settings.statistics is not None and of_rows is not None:
            settings.statistics.add_(of_rows.sum(0))
        if da is not None:
            da.mul_(settings.lora_scale)
        found = [dhidden, dweight, dbias, da, db]
        if total == 0:
            found = [
                torch.zeros_like(x) if needed and x is not None else None
                for x, needed in zip(inputs, needs, strict=True)
            ]
    return losses, found, power


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
    """The gradient of a chunk of hidden rows, into its place."""
    direct = here is None and dhidden.dtype == dlogits.dtype
    rows = dhidden[start:stop]
    if direct:
        _product(dlogits, weight, rows)
    else:
        rows = torch.mm(dlogits, weight)
    if dlow is not None and a is not None:
        rows.addmm_(dlow, a)
    if here is not None:
        dhidden.index_copy_(0, here, rows.to(dhidden.dtype))
    elif not direct:
        dhidden[start:stop] = rows


def _product(x: Tensor, y: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """``x @ y + bias`` into ``out``, which may be a view."""
    if torch.compiler.is_compiling():  # which traces no product into a view
        out.copy_(torch.mm(x, y) if bias is None else torch.addmm(bias, x, y))
    elif bias is None:
        torch.mm(x, y, out=out)
    else:
        torch.addmm(bias, x, y, out=out)


def _add_product(total: Tensor | None, x: Tensor, y: Tensor, wide: torch.dtype) -> Tensor:
    """``total + x @ y``, in place, in ``wide``: a sum over all tokens."""
    if x.dtype == wide:
        return torch.mm(x, y) if total is None else total.addmm_(x, y)
    if not x.is_cuda:
        return _add_product(total, x.to(wide), y.to(wide), wide)
    if torch.compiler.is_compiling():  # which does not know the product that adds to its result
        share = torch.mm(x, y, out_dtype=wide)
        return share if total is None else total.add_(share)
    if total is None:
        return torch.mm(x, y, out_dtype=wide)
    return torch.addmm(total, x, y, out_dtype=wide, out=total)
