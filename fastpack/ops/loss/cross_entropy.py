"""Softmax cross-entropy over rows of logits, and its gradient written over them.

Definition, with s the logit scale, c the softcap and f the factor on the gradient:

    y       = c tanh(s logits / c)
    losses  = F.cross_entropy(y.float(), labels, reduction="none")
    logits <- f s (softmax(y) - onehot(labels)) (1 - (y / c)^2), zero where the label is ignored

and of each row's distribution p = softmax(y) the entropy, ``-sum(p log p)`` in nats, and whether the label is the
likeliest token, ``argmax(p) == label`` (the first of several).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    triton: bool,
    statistics: Tensor | None = None,
) -> None:
    """Losses of rows of logits, written; where ``gradient``, that of the products over ``logits``, in place.

    Args:
        logits: ``[C, V]`` of rows that lie evenly; may be overwritten also where no gradient is asked for.
        labels: integers ``[C]``, contiguous.
        losses: ``[C]``, contiguous, in float32 or wider; 0 where the label is ignored.
        scale: the factor f, in the dtype of the losses: 0-d, ``[C]``, or None for 1.
        ignore_index: a label that is left out.
        logit_scale: factor on the logits, before the softcap.
        softcap: logits are kept between plus and minus this; None for no cap.
        gradient: whether to write it.
        triton: the kernel, or else the definition step by step.
        statistics: ``[C, 2]``, contiguous, in the dtype of the losses; each row's entropy, and 1 where the label is the
            likeliest token, are written; 0 where the label is ignored. None for none.

    Raises:
        RuntimeError: a label lies outside the vocabulary; the kernel's loss and gradient are NaN there.
    """
    if triton:
        from fastpack.ops.kernels import cross_entropy as kernels

        kernels.cross_entropy_(
            logits,
            labels,
            losses,
            scale,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
            softcap=softcap,
            gradient=gradient,
            statistics=statistics,
        )
        return
    # every step in place: a chunk of float32 logits is as large as all else together
    ignored = labels == ignore_index
    label = labels.masked_fill(ignored, 0).long()[:, None]
    x = logits if logits.dtype == losses.dtype else logits.to(losses.dtype)
    if logit_scale != 1.0:
        x.mul_(logit_scale)
    slope: Tensor | None = None
    if softcap is not None:
        x.div_(softcap).tanh_()
        if gradient:
            slope = 1 - x * x
        x.mul_(softcap)
    x.sub_(x.amax(1, keepdim=True))
    wanted = x.gather(1, label)
    if statistics is not None:
        statistics[:, 1] = x.argmax(1) == label[:, 0]
    x.exp_()
    sums = x.sum(1, keepdim=True)
    losses.copy_((sums.log() - wanted)[:, 0].masked_fill(ignored, 0))
    if not gradient and statistics is None:
        return
    x.div_(sums)
    if statistics is not None:
        statistics[:, 0] = torch.special.entr(x).sum(1)
        statistics.masked_fill_(ignored[:, None], 0)
        if not gradient:
            return
    x.scatter_add_(1, label, torch.full_like(sums, -1))
    if slope is not None:
        x.mul_(slope)
    if logit_scale != 1.0:
        x.mul_(logit_scale)
    if scale is not None:
        x.mul_(scale if scale.ndim == 0 else scale[:, None])
    x.masked_fill_(ignored[:, None], 0)
    if x is not logits:
        logits.copy_(x)
