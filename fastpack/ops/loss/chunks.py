"""The chunk loop of a linear head's losses: logits, losses and gradients of a chunk of tokens at a time.

:mod:`fastpack.ops.loss.linear_cross_entropy` and :mod:`fastpack.ops.loss.linear_log_probs` define what is computed.

Shape suffixes: T tokens, K tokens whose rows are computed, C tokens in a chunk, H hidden size, V vocabulary, R rank of
LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastpack.ops.loss.cross_entropy import EntropyGradient, cross_entropy_


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """Return the dtype of matmuls under autocast, or None if it is off."""
    device = hidden.device.type
    casts = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else None


def chunk_rows(tokens: int, most: int) -> int:
    """Return the number of rows in a chunk, for chunks of about the same size in whole tiles of a matmul."""
    if tokens <= most:
        return max(tokens, 1)
    count = -(-tokens // most)
    even = -(-tokens // count)
    return min(most, -(-even // 128) * 128)


@dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of a Function that are not tensors, and ``statistics``, which needs no gradient."""

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


def by_chunks(
    settings: Settings,
    autocast: torch.dtype | None,
    inputs: Sequence[Tensor | None],
    labels: Tensor,
    order: Tensor | None,
    scale: Tensor | None,
    needs: Sequence[bool],
    *,
    row_statistics: Tensor | None = None,
    entropy_gradient: EntropyGradient | None = None,
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
        row_statistics: ``[K, 2]`` or ``[K, 4]``, written, or None; as in :func:`cross_entropy_`.
        entropy_gradient: ``[K]`` each, or None; as in :func:`cross_entropy_`.

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
        if settings.statistics is not None:
            row_statistics = losses.new_empty(total, 2)
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
                entropy_gradient=None if entropy_gradient is None else entropy_gradient.rows(start, stop),
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
