"""Preference losses on packed pairs, for your own training loops.

::

    batch = PackedPreferenceCollator()(examples)
    labels = batch.pop("labels")
    hidden = model.base_model(**batch).last_hidden_state  # of a patched model
    policy = pair_log_probs(hidden, model.lm_head.weight, labels, batch["packed_seq_lens"])
    ...  # the same under torch.no_grad() with the reference model
    result = preference_loss(policy.chosen, policy.rejected, reference.chosen, reference.rejected, beta=0.1)
    result.loss.backward()

Definitions, for a prompt with the completions w (chosen) and l (rejected), where log p is a sum over a completion's
tokens:

    h = (log p(w) - log p_ref(w)) - (log p(l) - log p_ref(l))

- ``sigmoid``: -log sigmoid(beta h). Rafailov et al., "Direct Preference Optimization", arXiv:2305.18290, eq. 7.
- ``hinge``: max(0, 1 - beta h). Liu et al., "Statistical Rejection Sampling", arXiv:2309.06657, their hinge-norm.
- ``ipo``: (h' - 1 / (2 beta))^2, where h' has each log-ratio divided by its completion's tokens. Azar et al., "A
  General Theoretical Paradigm", arXiv:2310.12036, eq. 17, which has sums; TRL and this module take averages.
- ``robust``: ((1 - e) sigmoid loss of h - e sigmoid loss of -h) / (1 - 2 e). e is ``label_smoothing``, the share of
  pairs whose labels are swapped. Chowdhury et al., "Provably Robust DPO", arXiv:2403.00409, their rDPO.
- length-desensitised (``ld_alpha``): in log p of the longer completion, the tokens beyond the shorter one's length are
  multiplied by alpha. Liu et al., "Length Desensitization in DPO", arXiv:2409.06411.
- weighted (``wpo``): each pair's loss is multiplied by v(w) v(l), without gradient. v is the exponential of the mean,
  over a completion's tokens, of log p(token) - log sum over the vocabulary of p^2. Zhou et al., "WPO",
  arXiv:2406.11827, eq. 2.

Nothing here waits for the device. Sums over segments are computed, stored and subtracted in float64: log p of a text of
600 tokens is near -6,000, where float32 has steps of 5e-4, and a loss depends on small differences between two of these
numbers. (On MPS, which has no float64, they are float32.)

Shape suffixes: T tokens, H hidden, V vocabulary, R rank of LoRA, N sequences, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.errors import PackingError
from fastpack.ops.implementation import Implementation
from fastpack.ops.loss import IGNORE_INDEX
from fastpack.ops.loss.linear_cross_entropy import CHUNK, Weight, linear_cross_entropy
from fastpack.ops.loss.segment_sums import segment_sums
from fastpack.packing.seqlens import PackedSeqLens

__all__ = ["PairLogProbs", "PreferenceLoss", "pair_log_probs", "pair_log_probs_of_logits", "preference_loss"]

LossType = Literal["sigmoid", "hinge", "ipo", "robust"]


@dataclass(frozen=True, eq=False)
class PairLogProbs:
    """Log-probabilities of the completions of P pairs.

    Attributes:
        chosen: float64 ``[P]``, the sum over the completion's tokens.
        rejected: the same.
        chosen_tokens: int64 ``[P]``, the number of predicted tokens, over which each sum goes.
        rejected_tokens: the same.
        weights: float64 ``[P]``, WPO's weights, without gradient; None without ``wpo=True``.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PreferenceLoss:
    """The result of :func:`preference_loss`.

    Attributes:
        loss: 0-d: the mean over pairs. All attributes have the dtype of the log-probabilities.
        losses: ``[P]``, the loss of each pair.
        chosen_rewards: ``[P]``, beta times the log-ratio of policy and reference, without gradient.
        rejected_rewards: ``[P]``, the same for the rejected completions.
    """

    loss: Tensor
    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def margins(self) -> Tensor:
        """Chosen minus rejected rewards, ``[P]``."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> Tensor:
        """1 where the chosen reward is larger, else 0; float32 ``[P]``."""
        return (self.chosen_rewards > self.rejected_rewards).float()


def preference_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    loss_type: LossType = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
    weights: Tensor | None = None,
) -> PreferenceLoss:
    """Return the loss of each pair and their mean, by the definitions of this module.

    Args:
        policy_chosen: ``[P]``, log-probabilities of the chosen completions under the trained model.
        policy_rejected: ``[P]``, the same for the rejected completions.
        reference_chosen: ``[P]``, log-probabilities of the chosen completions under the reference model, with the same
            ``ld_alpha``.
        reference_rejected: ``[P]``, the same for the rejected completions.
        beta: the factor on log-ratios; for ``ipo`` the paper's tau.
        loss_type: one of the losses above. WPO and LD-DPO work with each of them: pass ``weights``, or
            log-probabilities computed with ``ld_alpha``.
        label_smoothing: the share of swapped labels for ``robust``, at least 0 and below 0.5; 0 for the other losses.
        chosen_tokens: ``[P]``, the number of tokens in each chosen completion, by which ``ipo`` divides.
        rejected_tokens: ``[P]``, the same for the rejected completions.
        weights: ``[P]``, factors on the losses.

    Raises:
        ValueError: shapes differ, or an argument is missing or has a value that is not allowed.

    Example:
        >>> policy = fastpack.pair_log_probs(hidden, head.weight, batch["labels"], batch["packed_seq_lens"])
        >>> reference = batch["ref_chosen_logps"], batch["ref_rejected_logps"]
        >>> fastpack.preference_loss(policy.chosen, policy.rejected, *reference, beta=0.1).loss.backward()
    """
    shapes = [tuple(x.shape) for x in (policy_chosen, policy_rejected, reference_chosen, reference_rejected)]
    if len(set(shapes)) > 1 or policy_chosen.ndim != 1:
        raise ValueError(f"log-probabilities have shapes {', '.join(map(str, shapes))}; pass [P] each.")
    if beta <= 0:
        raise ValueError(f"beta={beta}; pass a factor above 0.")
    if loss_type not in get_args(LossType):
        raise ValueError(
            f"loss_type={loss_type!r}; choose one of {', '.join(map(repr, get_args(LossType)))}. WPO and LD-DPO "
            "work with each of them: pass weights= from pair_log_probs(wpo=True), or log-probabilities from "
            "pair_log_probs(ld_alpha=...)."
        )
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and loss_type != "robust"):
        raise ValueError(
            f"label_smoothing={label_smoothing} with loss_type={loss_type!r}; pass 0, or with 'robust' the share of "
            "swapped labels, below 0.5."
        )
    chosen, rejected = policy_chosen - reference_chosen, policy_rejected - reference_rejected
    scaled = beta * (chosen - rejected)
    if loss_type == "sigmoid":
        losses = -F.logsigmoid(scaled)
    elif loss_type == "hinge":
        losses = torch.relu(1 - scaled)
    elif loss_type == "robust":
        right, swapped = -F.logsigmoid(scaled), -F.logsigmoid(-scaled)
        losses = ((1 - label_smoothing) * right - label_smoothing * swapped) / (1 - 2 * label_smoothing)
    else:
        if chosen_tokens is None or rejected_tokens is None:
            raise ValueError("loss_type='ipo' divides by the lengths of completions: pass both numbers of tokens.")
        _check_per_pair(policy_chosen, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)
        averages = chosen / chosen_tokens - rejected / rejected_tokens
        losses = (averages - 1 / (2 * beta)).square()
    if weights is not None:
        _check_per_pair(policy_chosen, weights=weights)
        losses = losses * weights
    return PreferenceLoss(losses.mean(), losses, beta * chosen.detach(), beta * rejected.detach())


def _check_per_pair(policy: Tensor, **tensors: Tensor) -> None:
    """Raise unless each tensor has one value for each pair; broadcasting would mix pairs."""
    for name, value in tensors.items():
        if value.shape != policy.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)} for {len(policy)} pairs; pass [P].")


def pair_log_probs(
    hidden: Tensor,
    weight: Weight,
    labels: Tensor,
    packed_seq_lens: PackedSeqLens,
    *,
    ld_alpha: float | None = None,
    wpo: bool = False,
    bias: Tensor | None = None,
    lora: tuple[Tensor, Tensor, float] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    num_kept: int | None = None,
    chunk: int | None = None,
    implementation: Implementation = "auto",
) -> PairLogProbs:
    """Return the log-probabilities of packed pairs from hidden states, without ``[T, V]`` logits.

    Args:
        hidden: ``[1, T, H]``, the backbone's last hidden state for a batch of
            :class:`fastpack.data.packed_collators.PackedPreferenceCollator`.
        weight: the head's weight ``[V, H]``, or a function that returns it.
        labels: the batch's labels, ``[1, T]``.
        packed_seq_lens: the batch's packing: P chosen sequences, P rejected sequences and possibly bucket padding.
        ld_alpha: LD-DPO's factor, from 0 to 1, on tokens beyond the shorter completion's length; None for plain sums.
        wpo: whether to compute WPO's weights too, which takes a second matmul with the head, without gradient.
        bias: the head's bias ``[V]``, or None. This and the following parameters are those of
            :func:`fastpack.ops.loss.linear_cross_entropy.linear_cross_entropy`.
        lora: the head's LoRA: A ``[R, H]``, B ``[V, R]`` and the scale.
        softcap: the softcap on logits, or None.
        logit_scale: the factor on logits.
        num_kept: an upper bound on the number of labels that are not ignored.
        chunk: the number of rows that are computed at a time.
        implementation: ``auto``, ``triton`` or ``torch``.

    Raises:
        PackingError: hidden states or labels don't belong to this batch.
        ValueError: ``ld_alpha`` is not from 0 to 1.

    Example:
        >>> labels, packed = batch.pop("labels"), batch["packed_seq_lens"]
        >>> hidden = model.base_model(**batch).last_hidden_state
        >>> policy = fastpack.pair_log_probs(hidden, model.lm_head.weight, labels, packed)
        >>> policy.chosen.shape  # [P]
    """
    pairs = _read_pairs(hidden, labels, packed_seq_lens, ld_alpha)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    losses = linear_cross_entropy(
        hidden,
        weight,
        pairs.targets,
        bias=bias,
        lora=lora,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction="none",
        num_kept=num_kept,
        chunk=chunk,
        implementation=implementation,
    )
    squares: Tensor | None = None
    if wpo:
        squares = _log_sum_squares(
            hidden, weight, pairs.targets, bias, lora, softcap, logit_scale, num_kept, chunk or CHUNK
        )
    return _sum_pairs(pairs, losses, squares)


def pair_log_probs_of_logits(
    logits: Tensor,
    labels: Tensor,
    packed_seq_lens: PackedSeqLens,
    *,
    ld_alpha: float | None = None,
    wpo: bool = False,
) -> PairLogProbs:
    """Return the log-probabilities of packed pairs from logits, for heads whose weight can't be read.

    This makes a float32 copy of the logits and of their gradient.

    Args:
        logits: ``[1, T, V]``.
        labels: see :func:`pair_log_probs`.
        packed_seq_lens: see there.
        ld_alpha: see there.
        wpo: see there.

    Raises:
        PackingError: logits or labels don't belong to this batch.
        ValueError: ``ld_alpha`` is not from 0 to 1.

    Example:
        >>> policy = pair_log_probs_of_logits(model(**batch).logits, labels, batch["packed_seq_lens"])
    """
    pairs = _read_pairs(logits, labels, packed_seq_lens, ld_alpha)
    logits = logits.reshape(-1, logits.shape[-1]).float()
    losses = F.cross_entropy(logits, pairs.targets, ignore_index=IGNORE_INDEX, reduction="none")
    squares: Tensor | None = None
    if wpo:
        with torch.no_grad():
            squares = _squares(logits).masked_fill(pairs.targets == IGNORE_INDEX, 0)
    return _sum_pairs(pairs, losses, squares)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """The targets of a batch's completions, and the segments over which they are summed.

    Attributes:
        targets: int64 ``[T]``, the id that each token predicts in its own sequence.
        offsets: int64, the start of each segment and the end of the last: ``[2 P + 1]``, or ``[4 P + 1]`` if each
            sequence is cut after the tokens that count fully.
        tokens: int64 ``[2 P]``, the number of targets of each sequence.
        ld_alpha: the factor on every second segment; None if each sequence is one segment.
    """

    targets: Tensor
    offsets: Tensor
    tokens: Tensor
    ld_alpha: float | None


def _read_pairs(x: Tensor, labels: Tensor, packed: PackedSeqLens, ld_alpha: float | None) -> _Pairs:
    if ld_alpha is not None and not 0 <= ld_alpha <= 1:
        raise ValueError(f"ld_alpha={ld_alpha}; pass a factor from 0 to 1, or None.")
    if packed.padding.indices is not None or x.shape[:-1].numel() != packed.total_tokens:
        raise PackingError(
            f"hidden states or logits of shape {tuple(x.shape)} are not those of a packed batch [1, T] with "
            f"{packed.total_tokens} tokens. Pass a model's output for a batch of PackedPreferenceCollator, with that "
            "batch's packed_seq_lens."
        )
    # the last token of a sequence would predict the next sequence's first label, which is ignored
    targets = packed.mask_first_labels(labels).to(x.device).reshape(-1).roll(-1)
    count = (packed.num_sequences - len(packed.bucket_padding)) // 2
    offsets = packed.cu_seqlens[: 2 * count + 1].to(x.device, torch.int64)
    target_counts = F.pad((targets != IGNORE_INDEX).cumsum(0), (1, 0))
    before = target_counts[offsets]
    tokens = before.diff()
    if ld_alpha is not None:
        shared = torch.minimum(tokens[:count], tokens[count:]).repeat(2)
        # cut before the first target beyond the shared number, or at the sequence's end
        cuts = torch.searchsorted(target_counts[1:], before[:-1] + shared, right=True)
        cuts = torch.minimum(cuts, offsets[1:])
        offsets = torch.cat([torch.stack([offsets[:-1], cuts], 1).flatten(), offsets[-1:]])
    return _Pairs(targets, offsets, tokens, ld_alpha)


def _sum_pairs(pairs: _Pairs, losses: Tensor, squares: Tensor | None) -> PairLogProbs:
    """Return the pairs' log-probabilities from each token's cross-entropy ``[T]`` and, for WPO, log sum p^2 ``[T]``."""
    sums = -segment_sums(losses, pairs.offsets)
    weights: Tensor | None = None
    if squares is not None:
        with torch.no_grad():
            aligned = sums.detach() - segment_sums(squares, pairs.offsets)
            if pairs.ld_alpha is not None:
                aligned = aligned.view(-1, 2).sum(1)
            weights = (aligned / pairs.tokens.clamp(min=1)).exp().view(2, -1).prod(0)
    if pairs.ld_alpha is not None:
        shared, rest = sums.view(-1, 2).unbind(1)
        sums = shared + pairs.ld_alpha * rest
    chosen, rejected = sums.chunk(2)
    chosen_tokens, rejected_tokens = pairs.tokens.chunk(2)
    return PairLogProbs(chosen, rejected, chosen_tokens, rejected_tokens, weights)


def _squares(logits: Tensor) -> Tensor:
    """Return log sum p^2 over the vocabulary, of float32 logits ``[T, V]``."""
    return torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1)


@torch.no_grad()
def _log_sum_squares(
    hidden: Tensor,
    weight: Weight,
    targets: Tensor,
    bias: Tensor | None,
    lora: tuple[Tensor, Tensor, float] | None,
    softcap: float | None,
    logit_scale: float,
    num_kept: int | None,
    chunk: int,
) -> Tensor:
    """Return log sum p^2 over the vocabulary, float32 ``[T]``, 0 for ignored targets; ``chunk`` rows at a time."""
    device = hidden.device.type
    dense = weight if isinstance(weight, Tensor) else weight()
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dense.dtype
    ignored = targets == IGNORE_INDEX
    if num_kept is None and device == "cpu" and not torch.compiler.is_compiling():
        num_kept = int((~ignored).sum())
    rows = torch.argsort(ignored.to(torch.uint8), stable=True)[:num_kept]
    squares = torch.zeros(len(targets), dtype=torch.float32, device=hidden.device)
    with torch.autocast(device, enabled=False):
        for indices in rows.split(chunk):
            h = hidden.index_select(0, indices).to(dtype)
            logits = F.linear(h, dense.to(dtype), None if bias is None else bias.to(dtype))
            if lora is not None:
                a, b, scale = lora
                logits = logits + F.linear(F.linear(h, (a * scale).to(dtype)), b.to(dtype))
            logits = logits.float() * logit_scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            squares.index_copy_(0, indices, _squares(logits))
    return squares.masked_fill(ignored, 0)
