"""The oracle of :mod:`fastpack.exactness.oracle` for most tests, with the loss that a model trains on.

In float32 an error is at most :data:`FLOAT32_BOUND`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.exactness import oracle, rule
from fastpack.exactness.inputs import INPUT_KINDS, flat, packed_rows, padded, positions, trl_keywords, unpadded
from fastpack.exactness.rule import FULL_BOUND, Error, Result, relative

__all__ = [
    "FLOAT32_BOUND",
    "GPU_FLOAT32_BOUND",
    "INPUT_KINDS",
    "LENGTHS",
    "Error",
    "Result",
    "check_repadded",
    "compare",
    "flat",
    "make_sequences",
    "packed_rows",
    "padded",
    "positions",
    "relative",
    "run_alone",
    "run_batch",
    "split_logits",
    "to_device",
    "trained_tokens",
    "trl_keywords",
]

FLOAT32_BOUND = FULL_BOUND
GPU_FLOAT32_BOUND = 3e-5
"""On a GPU the memory-efficient kernel splits float32 matmuls into TF32 ones: 1.7e-5 at most in our cases."""
LENGTHS = (7, 1, 19, 19, 33)
"""An odd length, one token, two equal neighbours, and a length beyond every window of the tiny configs."""


def make_sequences(vocab: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    """Return random token ids of the whole vocabulary, without 0, 1 and 2 (padding and the like)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator) for n in lengths]


def trained_tokens(sequences: Sequence[Tensor]) -> int:
    """Return the number of next tokens that are predicted when each sequence stands alone."""
    return sum(len(s) - 1 for s in sequences)


def compare(result: Result, reference: Result, *, half: bool = False) -> Error:
    """Compare by the rule, and raise unless both have gradients of the same parameters.

    An optimiser steps with zeros, but not with None.
    """
    if result.grads.keys() != reference.grads.keys():
        raise ValueError(f"only one has gradients of {sorted(result.grads.keys() ^ reference.grads.keys())}")
    return rule.compare(result, reference, half=half)


def split_logits(logits: Tensor, batch: dict[str, Any], sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits of each sequence, ``[L, V]``, wherever the sequence stood in the batch."""
    return list(unpadded(logits.flatten(0, -2), batch).split([len(s) for s in sequences]))


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def run_alone(model: nn.Module, sequences: Sequence[Tensor], **kwargs: Any) -> Result:
    """Run the stock model on each sequence alone, with the mean cross-entropy of all next tokens.

    Some models have no loss of their own.
    """
    ids = torch.cat(list(sequences)).to(next(model.parameters()).device)

    def loss_of(_: Any, logits: Tensor, start: int, __: int) -> Tensor:
        labels = ids[start + 1 : start + len(logits)]
        return nn.functional.cross_entropy(logits[:-1].float(), labels, reduction="sum") / trained_tokens(sequences)

    return oracle.run_alone(model, sequences, loss_of, **kwargs)


def run_batch(
    model: nn.Module, sequences: Sequence[Tensor], kind: str, *, num_items: int | None = None, **kwargs: Any
) -> Result:
    """Run a model on all sequences at once, as a batch of this kind, with its own loss of ``labels``."""
    batch = INPUT_KINDS[kind](sequences)
    labels = batch["labels"].to(next(model.parameters()).device)
    arguments = {"labels": labels, "num_items_in_batch": num_items or trained_tokens(sequences), **kwargs}
    return oracle.run_batch(model, batch, sequences, lambda outputs, *_: outputs.loss, **arguments)


def check_repadded(ours: Any, stock: Any, real: Tensor) -> None:
    """Check hidden states and router logits against the stock ones at ``real`` tokens; other hidden states are 0."""
    for a, b in zip(ours.hidden_states, stock.hidden_states, strict=True):
        assert a.shape == b.shape
        assert relative(a[real], b[real]) <= FLOAT32_BOUND
        assert not a[~real].any()
    for a, b in zip(ours.router_logits, stock.router_logits, strict=True):
        assert a.shape == b.shape
        assert relative(a[real.flatten()], b[real.flatten()]) <= FLOAT32_BOUND
