"""Log-probabilities of labels under a linear head, token by token, computed chunk by chunk without ``[T, V]`` logits.

Definition, with W the weight, s the logit scale, c the softcap and t the temperature:

    logits           = c tanh(s (hidden W^T + bias) / c) / t
    p                = softmax(logits.float())
    log_probs        = log p[labels]
    entropy          = -sum(p log p)
    log_sum_sq_probs = log(sum(p^2))
    mean_logits      = mean(logits)
    is_top1          = argmax(p) == labels

A token's log-probability depends on its own row of hidden alone, with the gradient ``s/t (W[label] - sum_v p_v W_v)``
(without a softcap). If nothing of the head is trained, the forward keeps this vector, ``[T, H]``, and the backward
scales its rows: no logit is computed again. If the weight or the bias is trained, or if the entropy has a gradient
too, the backward computes the logits again.

Shape suffixes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack.ops.autograd import differentiable_once
from fastpack.ops.implementation import Implementation, use_triton
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.ops.loss.chunks import Settings, autocast_dtype, by_chunks, chunk_rows
from fastpack.ops.loss.cross_entropy import EntropyGradient
from fastpack.ops.loss.linear_cross_entropy import CHUNK, CHUNK_TRAINED


class TokenScores(NamedTuple):
    """The results for each token, ``[T]``, in float32 (float64 for float64 inputs); None if not asked for.

    Attributes:
        log_probs: the label's log-probability.
        entropy: the entropy of the distribution, in nats.
        log_sum_sq_probs: the logarithm of the sum of squared probabilities, without a gradient.
        mean_logits: the mean of the logits over the vocabulary, without a gradient.
        is_top1: bool: whether the label is the likeliest token (the first one of equal tokens).
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None


_COLUMNS = {"entropy": 0, "is_top1": 1, "log_sum_sq_probs": 2, "mean_logits": 3}
"""The column of each result in the statistics of :func:`fastpack.ops.loss.cross_entropy.cross_entropy_`."""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Collection[str] = ("log_probs",),
    chunk: int | None = None,
    implementation: Implementation = "auto",
) -> TokenScores:
    """Compute the log-probabilities of ``labels`` under a linear head on ``hidden``, without ``[T, V]`` logits.

    The matmuls are computed in autocast's dtype if it is on, else in that of hidden; the rest in float32.

    Args:
        hidden: ``[T, H]``.
        weight: ``[V, H]``.
        labels: integers ``[T]`` in the vocabulary. Leave out the rows of ignored labels.
        bias: ``[V]``, or None.
        softcap: the bound on the logits' absolute value before the temperature, or None for no bound.
        logit_scale: the factor on the logits, before the softcap.
        temperature: the divisor of the logits, after the softcap.
        outputs: the fields of :class:`TokenScores` to compute; the log-probabilities always are.
        chunk: the number of rows of logits in a chunk; by default that of
            :func:`fastpack.ops.loss.linear_cross_entropy.linear_cross_entropy`.
        implementation: ``auto`` runs the kernel if :func:`use_triton` allows it; in float64 the definition is computed.

    Returns:
        The results of each token.

    Raises:
        ValueError: the shapes don't fit each other, or ``outputs`` names an unknown field.

    Example:
        >>> hidden, weight, labels = torch.randn(6, 8), torch.randn(32, 8), torch.arange(6)
        >>> scores = linear_log_probs(hidden, weight, labels, temperature=0.7)
        >>> expected = (hidden @ weight.T / 0.7).log_softmax(-1).gather(1, labels[:, None])[:, 0]
        >>> torch.testing.assert_close(scores.log_probs, expected)
    """
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and labels {tuple(labels.shape)}; pass hidden [T, H] and labels "
            "[T], flattened."
        )
    unknown = set(outputs) - set(TokenScores._fields)
    if unknown:
        raise ValueError(f"outputs names {sorted(unknown)}; choose from {', '.join(TokenScores._fields)}.")
    differentiate = torch.is_grad_enabled()
    trained = differentiate and (weight.requires_grad or (bias is not None and bias.requires_grad))
    settings = Settings(
        make_weight=None,
        lora_scale=1.0,
        # c tanh(s x / c) / t = (c / t) tanh((s / t) x / (c / t))
        softcap=None if softcap is None else softcap / temperature,
        logit_scale=logit_scale / temperature,
        ignore_index=IGNORE_INDEX,
        per_token=True,
        rows=chunk_rows(len(labels), chunk or (CHUNK_TRAINED if trained else CHUNK)),
        triton=use_triton(implementation, hidden) and hidden.dtype != torch.float64,
        differentiate=differentiate,
    )
    names = tuple(name for name in TokenScores._fields if name in outputs and name != "log_probs")
    log_probs, *others = _LinearLogProbs.apply(settings, names, hidden, weight, bias, labels.contiguous())
    return TokenScores(log_probs, **dict(zip(names, others, strict=True)))


class _LinearLogProbs(torch.autograd.Function):
    """The autograd Function of :func:`linear_log_probs`. Inputs 2 to 4 are hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        names: tuple[str, ...],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an entropy that is only logged gets no gradient
        dtype = autocast_dtype(hidden) or hidden.dtype
        needs = [needed and settings.differentiate for needed in ctx.needs_input_grad[2:5]]
        keeps = needs[0] and not any(needs[1:])
        statistics: Tensor | None = None
        if names:
            width = 4 if any(_COLUMNS[name] > 1 for name in names) else 2
            sum_dtype = torch.promote_types(dtype, torch.float32)
            statistics = torch.empty(len(labels), width, dtype=sum_dtype, device=hidden.device)
        losses, (direction, *_), _ = by_chunks(
            settings,
            dtype,
            (hidden, weight, bias, None, None),
            labels,
            None,
            None,
            (keeps, False, False, False, False),
            row_statistics=statistics,
        )
        others: list[Tensor] = []
        for name in names:
            assert statistics is not None
            column = statistics[:, _COLUMNS[name]]
            others.append(column.bool() if name == "is_top1" else column.clone())
        entropy = others[names.index("entropy")] if "entropy" in names else None
        ctx.mark_non_differentiable(*(x for name, x in zip(names, others, strict=True) if name != "entropy"))
        ctx.settings, ctx.dtype, ctx.has_entropy = settings, dtype, entropy is not None
        ctx.save_for_backward(hidden, weight, bias, labels, entropy, direction)
        return losses.neg_(), *others

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, direction = ctx.saved_tensors
        of_entropy = grads[0] if ctx.has_entropy else None  # the first field of TokenScores after log_probs
        if grad is None and of_entropy is None:
            return (None,) * 6
        if grad is None:
            assert of_entropy is not None
            grad = torch.zeros_like(of_entropy)
        if direction is not None and of_entropy is None:
            # torch computes a product with mixed dtypes in float32, and rounds it once
            return None, None, (direction * grad[:, None].neg()).to(hidden.dtype), None, None, None
        needs = (*ctx.needs_input_grad[2:5], False, False)
        _, results, _ = by_chunks(
            ctx.settings,
            ctx.dtype,
            (hidden, weight, bias, None, None),
            labels,
            None,
            grad.neg(),
            needs,
            entropy_gradient=None if of_entropy is None else EntropyGradient(entropy, of_entropy.contiguous()),
        )
        dhidden, dweight, dbias = (
            None if x is None else x.to(of.dtype) for x, of in zip(results[:3], (hidden, weight, bias), strict=True)
        )
        return None, None, dhidden, dweight, dbias, None
