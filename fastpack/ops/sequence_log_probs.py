"""The log-probability of each packed sequence, as preference losses want it, without ``[T, V]`` logits.

Definition, for the tokens t of sequence n and logits as in :mod:`fastpack.ops.linear_cross_entropy`:

    log p_n = sum over t of log_softmax(logits_t)[label_t]

The losses of the tokens come from that op, which computes the logits of one chunk at a time; the tokens' sequences are
looked up in the offsets, and summed, on the device. Sums are made in float64, so that the order in which a GPU adds
does not show (on MPS, which has no float64, in float32).

Shape suffixes: T tokens, H hidden, V vocabulary, R rank of LoRA, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack.ops.implementation import Implementation
from fastpack.ops.linear_cross_entropy import Weight, linear_cross_entropy
from fastpack.packing.seqlens import IGNORE_INDEX, PackedSeqLens


def sequence_log_probs(
    hidden: Tensor,
    weight: Weight,
    labels: Tensor,
    sequences: PackedSeqLens | Tensor,
    *,
    bias: Tensor | None = None,
    lora: tuple[Tensor, Tensor, float] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    num_kept: int | None = None,
    shift: bool = False,
    chunk: int | None = None,
    dtype: torch.dtype | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """The log-probability of each packed sequence, the sum over its labels that are not ignored: float32 ``[N]``.

    Args:
        sequences: the sequences of ``hidden``, or their int offsets ``[N + 1]`` (``cu_seqlens``); tokens past the
            last offset belong to none.
        shift: token t predicts label t + 1 of its own sequence; else labels are aligned with the tokens already.
        dtype: of the result, by default that of the losses; float64 gives the sums as they were made.

    For the others see :func:`linear_cross_entropy`. Nothing here waits for the device.
    """
    offsets = sequences.cu_seqlens if isinstance(sequences, PackedSeqLens) else sequences
    offsets = offsets.to(hidden.device, torch.int64)
    tokens = torch.arange(len(hidden), device=hidden.device)
    owner = torch.bucketize(tokens, offsets[1:].contiguous(), right=True)
    count = len(offsets) - 1
    outside = owner == count
    if shift:
        # the next token begins another sequence, so this one predicts nothing
        last = torch.cat([owner[1:] != owner[:-1], outside.new_ones(min(1, len(hidden)))])
        labels = torch.cat([labels[1:], labels[:1]]).to(hidden.device)
        labels = labels.masked_fill(last | outside, ignore_index)
    else:
        labels = labels.to(hidden.device).masked_fill(outside, ignore_index)
    losses = linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        lora=lora,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        reduction="none",
        num_kept=num_kept,
        chunk=chunk,
        implementation=implementation,
    )
    sums = -segment_sums(losses, offsets)
    return sums.to(losses.dtype if dtype is None else dtype)


def segment_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """The sum of ``[T]`` values between each two of int64 offsets ``[N + 1]``, float64 ``[N]`` (float32 on MPS).

    Values past the last offset belong to none.
    """
    owner = torch.bucketize(torch.arange(len(values), device=values.device), offsets[1:].contiguous(), right=True)
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    sums = torch.zeros(len(offsets), dtype=wide, device=values.device).index_add(0, owner, values.to(wide))
    return sums[:-1]
