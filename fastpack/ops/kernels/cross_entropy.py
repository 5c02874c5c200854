"""Softmax cross-entropy over rows of logits, and its gradient written over them.

A program owns a row and walks over it twice. The first walk computes the maximum and the sum of exponentials; each lane
of the block has its own maximum and sum until the end of the row. The second walk writes the gradient and computes the
row's statistics; much of the row is still in the cache then.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.launch import early, on_device, wait_for_inputs

BLOCK = 4096
WARPS = 16
"""Measured on an H200: 768 rows of 128,256 logits take 178 us with 8 warps, 168 with 16."""


@triton.jit
def _tanh(x):
    """Return tanh(x), exact to 3 units in the last place.

    Near zero the formula with the exponential would cancel, so a polynomial in x^2 is used. It interpolates
    (tanh(x) / x - 1) / x^2 at Chebyshev's points up to x = 0.625.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    square = x * x
    near = (((-0.00615433 * square + 0.02104494) * square - 0.0538637) * square + 0.13332888) * square - 0.33333331
    far = 1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, x + x * square * near, tl.where(x < 0.0, -far, far))


@triton.jit
def _logits(AT, column, width, vocab, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """Return a block of a row, scaled and capped, in float32, and its ratio to the cap; minus infinity past the end."""
    x = tl.load(AT + column, mask=column < width, other=0.0).to(tl.float32) * logit_scale
    capped = x
    if SOFTCAP:
        capped = _tanh(x / softcap)
        x = softcap * capped
    return tl.where(column < vocab, x, float("-inf")), capped


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_kernel(
    LOGITS,
    LABELS,
    SCALE,
    LOSSES,
    STATISTICS,
    ENTROPIES,
    ENTROPY_GRADIENTS,
    stride,
    vocab,
    ignore_index,
    logit_scale,
    softcap,
    SOFTCAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    SCALE_PER_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    AT = LOGITS + row.to(tl.int64) * stride
    label = tl.load(LABELS + row)
    column = tl.arange(0, BLOCK)
    # A row is read up to its stride, so that masks don't split vector loads if the vocabulary's size is odd.
    if label == ignore_index:
        tl.store(LOSSES + row, 0.0)
        if STATISTICS is not None:
            for i in tl.static_range(WIDTH):
                tl.store(STATISTICS + WIDTH * row + i, 0.0)
        if GRADIENT:
            for start in range(0, stride, BLOCK):
                at = start + column
                tl.store(AT + at, tl.zeros((BLOCK,), LOGITS.dtype.element_ty), mask=at < stride)
    else:
        # a label outside the vocabulary makes the loss and the gradient NaN: torch's own check would stop the device
        valid = (label >= 0) & (label < vocab)
        target = tl.load(AT + label, mask=valid, other=float("nan")).to(tl.float32) * logit_scale
        if SOFTCAP:
            target = softcap * _tanh(target / softcap)
        highest = tl.full((BLOCK,), -3.0e38, tl.float32)  # finite: a difference of infinities would be NaN
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, stride, BLOCK):
            x, _ = _logits(AT, start + column, stride, vocab, logit_scale, softcap, SOFTCAP)
            higher = tl.maximum(highest, x)
            total = total * tl.exp2((highest - higher) * LOG2E) + tl.exp2((x - higher) * LOG2E)
            highest = higher
        top = tl.max(highest, 0)
        log_total = tl.log(tl.sum(total * tl.exp2((highest - top) * LOG2E), 0))
        tl.store(LOSSES + row, log_total + (top - target))
        if GRADIENT or STATISTICS is not None:
            factor = logit_scale
            if SCALE is not None:
                factor *= tl.load(SCALE + (row if SCALE_PER_ROW else 0)).to(tl.float32)
            factor = tl.where(valid, factor, float("nan"))
            if ENTROPIES is not None:
                of_row = tl.load(ENTROPIES + row)
                entropy_factor = tl.load(ENTROPY_GRADIENTS + row) * logit_scale
            entropy = tl.zeros((BLOCK,), tl.float32)
            squares = tl.zeros((BLOCK,), tl.float32)
            logit_sum = tl.zeros((BLOCK,), tl.float32)
            is_likeliest = valid & (target >= top)
            as_likely = tl.zeros((BLOCK,), tl.int32)  # tokens before the label
            tl.debug_barrier()  # every lane has read the label's logit before any writes over it
            for start in range(0, stride, BLOCK):
                at = start + column
                x, capped = _logits(AT, at, stride, vocab, logit_scale, softcap, SOFTCAP)
                log_share = (x - top) - log_total
                share = tl.exp2(log_share * LOG2E)
                if STATISTICS is not None:
                    entropy -= share * tl.maximum(log_share, -1.0e30)  # no product of 0 and infinity past the end
                    if WIDTH > 2:
                        squares += share * share
                        logit_sum += tl.where(at < vocab, x, 0.0)
                    if is_likeliest:
                        as_likely += ((x == target) & (at < label)).to(tl.int32)
                if GRADIENT:
                    slope = (share - tl.where(at == label, 1.0, 0.0)) * factor
                    if ENTROPIES is not None:
                        slope -= share * (tl.maximum(log_share, -1.0e30) + of_row) * entropy_factor
                    if SOFTCAP:
                        slope *= 1.0 - capped * capped
                    slope = tl.where(at < vocab, slope, 0.0)
                    tl.store(AT + at, slope.to(LOGITS.dtype.element_ty), mask=at < stride)
            if STATISTICS is not None:
                tl.store(STATISTICS + WIDTH * row, tl.sum(entropy, 0))
                is_likeliest &= tl.sum(as_likely, 0) == 0
                tl.store(STATISTICS + WIDTH * row + 1, is_likeliest.to(tl.float32))
                if WIDTH > 2:
                    tl.store(STATISTICS + WIDTH * row + 2, tl.log(tl.sum(squares, 0)))
                    tl.store(STATISTICS + WIDTH * row + 3, tl.sum(logit_sum, 0) / vocab)


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    scale: Tensor | None,
    *,
    ignore_index: int,
    logit_scale: float,
    softcap: float | None,
    gradient: bool,
    statistics: Tensor | None = None,
    entropy_gradient: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Compute the losses of rows of logits, and write the gradient over the logits.

    Args:
        logits: ``[C, V]``, evenly spaced rows; memory between two rows is overwritten, too.
        labels: ``[C]``, contiguous.
        losses: float32 ``[C]``, contiguous; written.
        scale: float32, the factor on the gradient: one for all rows, or ``[C]``, or None for 1.
        ignore_index: the label of rows without a loss.
        logit_scale: multiplies the logits, before the cap.
        softcap: c in ``c * tanh(logit / c)``, or None.
        gradient: whether to write the gradient.
        statistics: float32 ``[C, 2]`` or ``[C, 4]``, contiguous; written, as
            :func:`fastpack.ops.loss.cross_entropy.cross_entropy_` says.
        entropy_gradient: float32 ``[C]`` each, contiguous: the rows' entropies, and the gradients with respect to them.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return
    per_row = scale is not None and scale.ndim == 1
    width = 2 if statistics is None else statistics.shape[1]
    entropies, gradients = (None, None) if entropy_gradient is None else entropy_gradient
    block = min(BLOCK, triton.next_power_of_2(logits.stride(0)))
    # a warp without elements would read another warp's elements, which that warp may have overwritten already
    warps = max(1, min(WARPS, block // 32))
    with on_device(logits):
        _cross_entropy_kernel[(rows,)](
            logits, labels, scale, losses, statistics, entropies, gradients, logits.stride(0), vocab, ignore_index,
            logit_scale, softcap or 1.0, softcap is not None, gradient, per_row, width, block, num_warps=warps,
            **early(logits),
        )  # fmt: skip
