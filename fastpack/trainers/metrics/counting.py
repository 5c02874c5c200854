"""Counting what a model is given, on the device that it is on: nothing here waits for it.

Shape suffixes: B rows, S columns of a batch; a *slot* is an entry of ``input_ids`` as the collator made them; it holds
a real token or padding.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.loss import IGNORE_INDEX
from fastpack.packing.block_masks import may_be_blocks, read_blocks
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.tensors import send

Count = Tensor | int
"""A whole number: a 0-dimensional int64 tensor on the batch's device, or one that the host knows."""


@dataclass(frozen=True)
class BatchCounts:
    """The counts of one batch.

    Attributes:
        real: the real tokens.
        slots: the real tokens and padding.
        trained: the labels that a token predicts in the loss, including one after each text if padding has labels; None
            if the batch has no label for each token.
        pairs: for each window, the pairs of a token and one that it sees.
    """

    real: Count
    slots: int
    trained: Tensor | None
    pairs: tuple[Tensor, ...]


@torch.no_grad()
def count_batch(batch: Mapping[str, Any], windows: Sequence[int | None] = ()) -> BatchCounts:
    """Count a batch as it comes to the model.

    Where sequences begin is read from where ``position_ids``, ``seq_idx``, ``packed_seq_lens`` or ``cu_seq_lens_q``
    start anew, or from the (segment) mask; else each row is one. Whether all these agree is not asked: a patched model
    does that.

    Args:
        batch: the model's keywords; ``input_ids`` ``[B, S]`` or ``inputs_embeds`` ``[B, S, H]`` among them.
        windows: how many tokens a token sees at most, itself included; None for all before it in its sequence.
    """
    batch = _with_numbers(batch)
    rows, columns = _shape(batch)
    real_BS, starts_BS = _real(batch), _starts(batch)
    # of each real token, how many there are of its sequence up to it; of padding 0
    at_S = torch.arange(columns, device=starts_BS.device)
    seen_BS = at_S + 1 - torch.where(starts_BS, at_S, 0).cummax(-1).values
    if real_BS is not None:
        seen_BS = seen_BS * real_BS
    return BatchCounts(
        real=rows * columns if real_BS is None else real_BS.sum(),
        slots=rows * columns,
        trained=_trained(batch, starts_BS),
        pairs=tuple((seen_BS if window is None else seen_BS.clamp(max=window)).sum() for window in windows),
    )


def peak_memory(device: torch.device) -> tuple[int | None, str]:
    """Return the largest memory so far, and its kind: torch's on a GPU, else the process's (None if it is unknown)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), f"allocated on {torch.cuda.get_device_name(device)}"
    held = resident_bytes()
    return held, "not measured on Windows" if held is None else "resident, whole process"


def resident_bytes() -> int | None:
    """Return the largest memory of this process, or None on Windows, where it is unknown."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _source(batch: Mapping[str, Any]) -> Tensor:
    """Return the tokens of a batch, or their embeddings."""
    ids: Tensor | None = batch.get("input_ids")
    return batch["inputs_embeds"] if ids is None else ids


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return B and S."""
    shape = _source(batch).shape
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def _with_numbers(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch with a mask of segment numbers in the place of one of blocks, or of lengths that were read."""
    mask, packed, shape = batch.get("attention_mask"), batch.get("packed_seq_lens"), _shape(batch)
    if may_be_blocks(mask, shape):
        numbers = read_blocks(batch["attention_mask"], shape)
        # of another 4-D mask nothing is known: each row is one sequence then
        return {**batch, "attention_mask": torch.where((numbers < 0).any(), 1, numbers)}
    if not isinstance(packed, PackedSeqLens):
        return batch
    batch = {name: value for name, value in batch.items() if name != "packed_seq_lens"}
    packed = packed.to(_source(batch).device, non_blocking=True)
    real = packed.padding.mask()
    if real is None and _positions(batch) is not None:
        return batch  # which say the same, and more of the tokens with which TRL rounds up
    numbers = packed.repad(packed.seq_idx + 1).reshape(shape)
    return {**batch, "attention_mask": numbers if real is None else numbers * real}


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
    return real.expand(_shape(batch))


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
    (rows, columns), device = _shape(batch), _source(batch).device
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
    """Return offsets of the sequences in the flattened batch, where it brings some."""
    lengths, offsets = batch.get("packed_seq_lens"), batch.get("cu_seq_lens_q")
    if lengths is None:
        return offsets.to(device, non_blocking=True) if isinstance(offsets, Tensor) else None
    return (lengths if isinstance(lengths, Tensor) else send(torch.tensor(lengths), device)).to(device).cumsum(0)


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
