"""The oracle: what a model gives for each sequence alone, and how far a batch is from it.

Error is max|difference| / max|reference| of each tensor; gradients with a floor of 1e-3 of the largest gradient in
the model. In float32 at most :data:`FLOAT32_BOUND`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

FLOAT32_BOUND = 1e-5
GPU_FLOAT32_BOUND = 3e-5
"""On a GPU the memory-efficient kernel splits float32 products into TF32 ones: 1.7e-5 at most in our cases."""
LENGTHS = (7, 1, 19, 19, 33)
"""Odd, one token, two equal neighbours, and longer than every window of the tiny configs."""


@dataclass
class Result:
    """One pass over some sequences: logits of each ``[L, V]``, the loss, and every gradient."""

    logits: list[Tensor]
    loss: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Error:
    """Relative errors against the oracle."""

    logits: float
    loss: float
    grads: float
    worst_grad: str = ""

    @property
    def worst(self) -> float:
        return max(self.logits, self.loss, self.grads)


def make_sequences(vocab: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    """Random token ids; 0, 1 and 2 are left out (padding and the like)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator) for n in lengths]


def padded(sequences: Sequence[Tensor], side: str) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels``, padded ``right``, ``left`` or on ``both`` sides; one row
    holds padding only."""
    width = max(map(len, sequences)) + 2
    ids = torch.zeros(len(sequences) + 1, width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        free = width - len(sequence)
        start = {"right": 0, "left": free, "both": free // 2}[side]
        ids[row, start : start + len(sequence)] = sequence
        mask[row, start : start + len(sequence)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def flat(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """``input_ids`` ``[1, T]`` and labels equal to them: what a user's own loop would pass."""
    ids = torch.cat(list(sequences))[None]
    return {"input_ids": ids, "labels": ids.clone()}


def positions(sequences: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.arange(len(s)) for s in sequences])[None]


def trl_keywords(sequences: Sequence[Tensor]) -> dict[str, Any]:
    """What TRL's padding-free collator sends."""
    lengths = torch.tensor([len(s) for s in sequences])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32)
    return {
        "position_ids": positions(sequences),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
        "seq_idx": torch.arange(len(sequences), dtype=torch.int32).repeat_interleave(lengths)[None],
    }


def packed_rows(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """Several packed rows ``[2, S]``: the first sequences and the rest, the shorter row padded."""
    middle = len(sequences) // 2 + 1
    rows = [sequences[:middle], sequences[middle:]]
    width = max(sum(map(len, row)) for row in rows)
    ids = torch.zeros(2, width, dtype=torch.long)
    mask, where = torch.zeros_like(ids), torch.zeros_like(ids)
    for index, row in enumerate(rows):
        total = sum(map(len, row))
        ids[index, :total] = torch.cat(list(row))
        mask[index, :total] = 1
        where[index, :total] = positions(row)[0]
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": where, "labels": labels}


INPUT_KINDS: dict[str, Callable[[Sequence[Tensor]], dict[str, Any]]] = {
    "padded right": lambda s: padded(s, "right"),
    "padded left": lambda s: padded(s, "left"),
    "padded both sides": lambda s: padded(s, "both"),
    "restarting positions": lambda s: {**flat(s), "position_ids": positions(s)},
    "TRL's keywords": lambda s: {**flat(s), **trl_keywords(s)},
    "packed_seq_lens": lambda s: {**flat(s), "packed_seq_lens": [len(x) for x in s]},
    "several packed rows": packed_rows,
}


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


def compare(result: Result, reference: Result) -> Error:
    """How far ``result`` is from ``reference``."""
    assert len(result.logits) == len(reference.logits)
    logits = max(relative(a, b) for a, b in zip(result.logits, reference.logits, strict=True))
    loss = relative(result.loss, reference.loss)
    assert result.grads.keys() == reference.grads.keys()
    floor = 1e-3 * max(float(g.abs().max()) for g in reference.grads.values())
    errors = {
        name: _not_nan(float((result.grads[name] - g).abs().max()) / max(float(g.abs().max()), floor))
        for name, g in reference.grads.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return Error(logits, loss, errors[worst], worst)


def relative(value: Tensor, reference: Tensor) -> float:
    value, reference = value.detach().float(), reference.detach().float()
    return _not_nan(float((value - reference).abs().max() / reference.abs().max()))


def _not_nan(error: float) -> float:
    """NaN compares as neither larger nor smaller, and would pass."""
    return float("inf") if error != error else error


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.detach().clone().float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
