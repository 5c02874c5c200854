"""Softmax cross-entropy over rows of logits, whose gradient overwrites the logits.

Definition, with s the logit scale, c the softcap and f the factor on the gradient:

    y       = c tanh(s logits / c)
    losses  = F.cross_entropy(y.float(), labels, reduction="none")
    logits <- f s (softmax(y) - onehot(labels)) (1 - (y / c)^2), zero for ignored labels

For statistics, with the row's distribution p = softmax(y): its entropy ``h = -sum(p log p)`` in nats, and whether the
label is the likeliest token, ``argmax(p) == label`` (the first one of equal tokens); then ``log(sum(p^2))`` and the
mean of y. If the entropy has a gradient g, too, ``-g s p (log p + h) (1 - (y / c)^2)`` is added to that of the logits.

Shape suffixes: C rows (tokens in a chunk), V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class EntropyGradient(NamedTuple):
    """The entropies of rows, and the gradients with respect to them: float32 ``[C]`` each, contiguous."""

    entropies: Tensor
    gradients: Tensor

    def rows(self, start: int, stop: int) -> EntropyGradient:
        """Return those of some rows."""
        return EntropyGradient(self.entropies[start:stop], self.gradients[start:stop])


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
    entropy_gradient: EntropyGradient | None = None,
) -> None:
    """Write each row's loss into ``losses`` and, if ``gradient``, the gradient of the logits over ``logits``.

    Args:
        logits: ``[C, V]``, with any stride between rows; it may be overwritten even without ``gradient``.
        labels: integers ``[C]``, contiguous.
        losses: ``[C]``, contiguous, in float32 or wider. Ignored labels get 0.
        scale: the factor f, in the dtype of the losses: 0-d, ``[C]``, or None for 1.
        ignore_index: the label of rows that are left out.
        logit_scale: the factor on the logits, before the softcap.
        softcap: the bound on the logits' absolute value, or None for no bound.
        gradient: whether to write the gradient.
        triton: True to run the kernel, False to compute the definition step by step.
        statistics: ``[C, 2]``, contiguous, in the dtype of the losses, or None. Each row gets its entropy, and 1 if the
            label is the likeliest token, else 0. With ``[C, 4]`` it also gets ``log(sum(p^2))`` and the mean of y.
            Ignored labels get zeros.
        entropy_gradient: the entropies, and the gradients to add, or None. It needs ``gradient``.

    Raises:
        RuntimeError: a label is outside the vocabulary. The kernel doesn't raise; it makes that row's loss and gradient
            NaN.
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
            entropy_gradient=entropy_gradient,
        )
        return
    # every step is in place: a chunk of float32 logits is as large as all other tensors together
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
    if statistics is not None and statistics.shape[1] > 2:
        statistics[:, 3] = x.mean(1)
    x.sub_(x.amax(1, keepdim=True))
    label_logit = x.gather(1, label)
    if statistics is not None:
        statistics[:, 1] = x.argmax(1) == label[:, 0]
    x.exp_()
    sums = x.sum(1, keepdim=True)
    losses.copy_((sums.log() - label_logit)[:, 0].masked_fill(ignored, 0))
    if not gradient and statistics is None:
        return
    x.div_(sums)
    if statistics is not None:
        statistics[:, 0] = torch.special.entr(x).sum(1)
        if statistics.shape[1] > 2:
            statistics[:, 2] = (x * x).sum(1).log()
        statistics.masked_fill_(ignored[:, None], 0)
        if not gradient:
            return
    further: Tensor | None = None
    if entropy_gradient is not None:  # entr(p) - h p = -p (log p + h), without the product of 0 and infinity
        entropies, gradients = entropy_gradient
        further = torch.special.entr(x).addcmul_(x, entropies[:, None], value=-1).mul_(gradients[:, None])
    x.scatter_add_(1, label, torch.full_like(sums, -1))
    if scale is not None:
        x.mul_(scale if scale.ndim == 0 else scale[:, None])
    if further is not None:
        x.add_(further)
    if slope is not None:
        x.mul_(slope)
    if logit_scale != 1.0:
        x.mul_(logit_scale)
    x.masked_fill_(ignored[:, None], 0)
    if x is not logits:
        logits.copy_(x)
