"""The oracle: what a model gives for each sequence alone, and how far a batch is from it.

The kinds of input are those of :mod:`fastpack.exactness.inputs`, the measure is that of :mod:`fastpack.exactness.rule`. In
float32 an error is at most :data:`FLOAT32_BOUND`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.exactness.rule import FULL_BOUND, Error, Result, compare, relative
from fastpack.exactness.inputs import INPUT_KINDS, flat, packed_rows, padded, positions, trl_keywords

__all__ = [
    "FLOAT32_BOUND",
    "GPU_FLOAT32_BOUND",
    "INPUT_KINDS",
    "LENGTHS",
    "Error",
    "Result",
    "check_put_back",
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
"""On a GPU the memory-efficient kernel splits float32 products into TF32 ones: 1.7e-5 at most in our cases."""
LENGTHS = (7, 1, 19, 19, 33)
"""Odd, one token, two equal neighbours, and longer than every window of the tiny configs."""


def make_sequences(vocab: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    """Random token ids; 0, 1 and 2 are left out (padding and the like)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator) for n in lengths]


def trained_tokens(sequences: Sequence[Tensor]) -> int:
    """How many next tokens are predicted when each sequence stands alone."""
    return sum(len(s) - 1 for s in sequences)


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def run_alone(model: nn.Module, sequences: Sequence[Tensor], **kwargs: Any) -> Result:
    """The stock model on each sequence alone; one backward pass over the summed loss."""
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    count = trained_tokens(sequences)
    logits: list[Tensor] = []
    total = torch.zeros((), device=device)
    for sequence in sequences:
        ids = sequence[None].to(device)
        out = model(input_ids=ids, use_cache=False, **kwargs)
        logits.append(out.logits[0])
        shifted = out.logits[0, :-1].float()
        total = total + nn.functional.cross_entropy(shifted, ids[0, 1:], reduction="sum") / count
    total.backward()
    return Result([x.detach() for x in logits], total.detach(), _grads(model))


def run_batch(
    model: nn.Module, sequences: Sequence[Tensor], kind: str, *, num_items: int | None = None, **kwargs: Any
) -> Result:
    """A model on all sequences at once, fed as ``kind`` says; its own loss over ``labels``."""
    batch = to_device(INPUT_KINDS[kind](sequences), next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    count = trained_tokens(sequences) if num_items is None else num_items
    out = model(**batch, num_items_in_batch=count, **kwargs)
    out.loss.backward()
    return Result(split_logits(out.logits.detach(), batch, sequences), out.loss.detach(), _grads(model))


def split_logits(logits: Tensor, batch: dict[str, Any], sequences: Sequence[Tensor]) -> list[Tensor]:
    """The logits of each sequence, from wherever it stood in the batch."""
    mask = batch.get("attention_mask")
    flat_logits = logits.reshape(-1, logits.shape[-1])
    real = flat_logits if mask is None else flat_logits[mask.reshape(-1) != 0]
    return list(real.split([len(s) for s in sequences]))


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.detach().clone().float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def check_put_back(ours: Any, stock: Any, real: Tensor) -> None:
    """Hidden states and router logits are the stock ones where ``real`` is true, and hidden states 0 elsewhere."""
    for a, b in zip(ours.hidden_states, stock.hidden_states, strict=True):
        assert a.shape == b.shape
        assert relative(a[real], b[real]) <= FLOAT32_BOUND
        assert not a[~real].any()
    for a, b in zip(ours.router_logits, stock.router_logits, strict=True):
        assert a.shape == b.shape
        assert relative(a[real.flatten()], b[real.flatten()]) <= FLOAT32_BOUND
