"""Counting what a model is given, on the device that it is on: nothing here waits for it.

Shape suffixes: B rows, S columns of a batch; a *slot* is an entry of ``input_ids`` as the collator made them; it holds
a real token or padding.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from fastpack.flops import Span
from fastpack.model.labels import targets_of
from fastpack.packing.block_masks import may_be_blocks, read_blocks
from fastpack.packing.seqlens import IGNORE_INDEX, PackedSeqLens, sent

Count = Tensor | int
"""A whole number: a 0-dimensional int64 tensor on the batch's device, or one that the host knows."""


@dataclass(frozen=True)
class BatchCounts:
    """What one batch holds.

    Attributes:
        real: real tokens.
        slots: those and padding.
        padded_slots: what the same sequences would take if each had a row of its own, all as long as the longest.
        trained: labels whose prediction the loss takes, one behind each text too where padding has some; None where
            the batch has no label for each token.
        pairs: of each span, pairs of a token and one that it sees.
        marked: whether a mask or ``packed_seq_lens`` says which slots are padding; a patched model then drops them,
            but for filler.
        filler: slots of padding at the end of a packed row, which every model works on.
    """

    real: Count
    slots: int
    padded_slots: Count
    trained: Count | None
    pairs: tuple[Count, ...]
    marked: bool = True
    filler: int = 0


def count_slots(batch: Mapping[str, Any]) -> tuple[Count, int]:
    """How many real tokens and how many slots a batch has."""
    rows, columns = batch_shape(batch)
    packed = batch.get("packed_seq_lens")
    if isinstance(packed, PackedSeqLens):
        return sum(_real_lengths(packed, batch)), rows * columns
    real_BS = _real(_with_numbers(batch))
    return rows * columns if real_BS is None else real_BS.sum(), rows * columns


@torch.no_grad()
def count_batch(batch: Mapping[str, Any], spans: Sequence[Span] = ()) -> BatchCounts:
    """Count a batch as it comes to the model.

    Where sequences begin is read from ``packed_seq_lens``, from where ``position_ids``, ``seq_idx`` or
    ``cu_seq_lens_q`` start anew, or from the (segment) mask; else each row is one. Whether all these agree is not
    asked: a patched model does that.

    Args:
        batch: the model's keywords; ``input_ids`` ``[B, S]`` or ``inputs_embeds`` ``[B, S, H]`` among them.
        spans: what tokens see.
    """
    rows, columns = batch_shape(batch)
    packed = batch.get("packed_seq_lens")
    if isinstance(packed, PackedSeqLens):
        return _of_packed(packed, batch, spans)
    batch = _with_numbers(batch)
    real_BS, starts_BS = _real(batch), _starts(batch)
    # of each real token, how many there are of its sequence up to it; of padding 0
    at_S = torch.arange(columns, device=starts_BS.device)
    first_BS = torch.where(starts_BS, at_S, 0).cummax(-1).values
    seen_BS = at_S + 1 - first_BS
    sequences = starts_BS if real_BS is None else starts_BS & real_BS
    if real_BS is not None:
        seen_BS = seen_BS * real_BS
    real = rows * columns if real_BS is None else real_BS.sum()
    return BatchCounts(
        real=real,
        slots=rows * columns,
        padded_slots=sequences.sum() * seen_BS.max(),
        trained=_trained(batch, starts_BS),
        pairs=tuple(_pairs(seen_BS, span) for span in spans),
        marked=_mask(batch) is not None,
    )


def batch_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """B and S."""
    ids = batch.get("input_ids")
    shape = batch["inputs_embeds"].shape[:2] if ids is None else ids.shape
    return (int(shape[0]), int(shape[1])) if len(shape) == 2 else (1, int(shape[0]))


def predicted_positions(batch: Mapping[str, Any]) -> Count | None:
    """On how many positions a loss without logits needs the head: those whose next token's label is not ignored."""
    shifted, labels = batch.get("shift_labels"), batch.get("labels")
    if shifted is not None:
        return shifted.ne(IGNORE_INDEX).sum()
    return None if labels is None or labels.ndim != 2 else labels[:, 1:].ne(IGNORE_INDEX).sum()


def peak_memory(device: torch.device) -> tuple[int | None, str]:
    """The most memory used so far, and whose: torch's on the GPU, else the process's (None where it is not told)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), f"allocated on {torch.cuda.get_device_name(device)}"
    held = resident_bytes()
    return held, "not measured on Windows" if held is None else "resident, whole process"


def resident_bytes() -> int | None:
    """The most memory that this process had; None on Windows, which does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _with_numbers(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch, with segment numbers in the place of a 4-D mask of one causal block a sequence."""
    mask, shape = batch.get("attention_mask"), batch_shape(batch)
    if not may_be_blocks(mask, shape):
        return batch
    numbers = read_blocks(batch["attention_mask"], shape)
    # of another 4-D mask nothing is known: each row is one sequence then
    return {**batch, "attention_mask": torch.where((numbers < 0).any(), 1, numbers)}


def _real(batch: Mapping[str, Any]) -> Tensor | None:
    """Bool ``[B, S]``: which slots hold real tokens; None where all do."""
    mask = _mask(batch)
    if mask is not None:
        return mask.ne(0)
    positions = _positions(batch)
    if positions is None:
        return None
    # TRL rounds a flattened batch up to `pad_to_multiple_of` with tokens at position 0
    real = positions.ne(0).flip(-1).cumsum(-1).ne(0).flip(-1)
    return real.expand(batch_shape(batch))


def _mask(batch: Mapping[str, Any]) -> Tensor | None:
    """``[B, S]``; masks of other shapes do not say where sequences end."""
    mask = batch.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _positions(batch: Mapping[str, Any]) -> Tensor | None:
    """``[1, S]`` or ``[B, S]``; of positions along several axes the first."""
    positions = batch.get("position_ids")
    if positions is None:
        return None
    while positions.ndim > 2:
        positions = positions[0]
    return positions if positions.ndim == 2 else positions[None]


def _starts(batch: Mapping[str, Any]) -> Tensor:
    """Bool ``[B, S]``: where a sequence begins; under padding anything."""
    rows, columns = batch_shape(batch)
    source = batch.get("input_ids")
    device = (batch["inputs_embeds"] if source is None else source).device
    starts = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    starts[:, :1] = True
    mask, positions = _mask(batch), _positions(batch)
    if mask is not None:
        starts[:, 1:] |= mask.diff() != 0
    numbers, offsets = batch.get("seq_idx"), _offsets(batch, device)
    if positions is not None:
        step = positions.diff()
        # with padding, positions may be skipped inside a sequence
        starts[:, 1:] |= step != 1 if mask is None else step <= 0
    elif isinstance(numbers, Tensor) and numbers.numel() == starts.numel():
        starts[:, 1:] |= numbers.reshape(rows, columns).diff() != 0
    elif offsets is not None and mask is None:
        # the last offset is the end, and so are those of sequences without a token at the end: they are dropped
        flat = torch.cat([starts.reshape(-1), starts.new_zeros(1)])
        starts = flat.index_fill(0, offsets.long(), True)[:-1].reshape(rows, columns)
    return starts


def _offsets(batch: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """Offsets of the sequences in the flattened batch, where it brings some."""
    lengths, offsets = batch.get("packed_seq_lens"), batch.get("cu_seq_lens_q")
    if lengths is None:
        return offsets.to(device, non_blocking=True) if isinstance(offsets, Tensor) else None
    return (lengths if isinstance(lengths, Tensor) else sent(torch.tensor(lengths), device)).to(device).cumsum(0)


def _trained(batch: Mapping[str, Any], starts_BS: Tensor) -> Tensor | None:
    shifted, labels = batch.get("shift_labels"), batch.get("labels")
    if shifted is not None:
        return shifted.ne(IGNORE_INDEX).sum()
    if labels is None or labels.shape != starts_BS.shape:
        return None
    mask = _mask(batch)
    if mask is None:
        return (labels.ne(IGNORE_INDEX) & ~starts_BS).sum()
    # as the loss of a patched model: what a real token predicts is the next slot's label, also where that is padding
    real_BS = mask.ne(0)
    predicted_BS = labels.ne(IGNORE_INDEX) & ~(starts_BS & real_BS)
    return (predicted_BS[:, 1:] & real_BS[:, :-1]).sum()


def _pairs(seen_BS: Tensor, span: Span) -> Tensor:
    if span.chunk is not None:
        return torch.where(seen_BS > 0, (seen_BS - 1) % span.chunk + 1, 0).sum()
    return (seen_BS if span.window is None else seen_BS.clamp(max=span.window)).sum()


def _real_lengths(packed: PackedSeqLens, batch: Mapping[str, Any]) -> tuple[int, ...]:
    """Of the sequences that are neither of the tail nor filler."""
    if packed.is_empty:
        return ()
    lengths = packed.lengths
    filler = packed.filler + sum(packed.tail)
    if not filler and packed.bucket is None and _mask(batch) is None and _positions(batch) is not None:
        filler = sum(1 for _ in takewhile(lambda length: length == 1, reversed(lengths)))  # TRL's, as in _real
    while filler > 0:
        filler -= lengths[-1]
        lengths = lengths[:-1]
    return lengths


def _of_packed(packed: PackedSeqLens, batch: Mapping[str, Any], spans: Sequence[Span]) -> BatchCounts:
    """The host knows the lengths."""
    rows, columns = batch_shape(batch)
    lengths = _real_lengths(packed, batch)
    held = 0 if packed.is_empty else packed.real_tokens  # in slots of the batch
    shifted, labels = batch.get("shift_labels"), batch.get("labels")
    trained: Count | None = None
    if shifted is not None:
        trained = shifted.ne(IGNORE_INDEX).sum()
    elif labels is not None and tuple(labels.shape) == (rows, columns):
        masked = packed.mask_first_labels(labels)
        trained = targets_of(packed, masked, IGNORE_INDEX).ne(IGNORE_INDEX).sum()
    return BatchCounts(
        real=sum(lengths),
        slots=rows * columns,
        padded_slots=len(lengths) * max(lengths, default=0),
        trained=trained,
        pairs=tuple(sum(map(span.pairs, lengths)) for span in spans),
        filler=held - sum(lengths),
    )
