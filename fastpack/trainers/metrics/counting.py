"""Count the tokens of a model's batches on their device, without waiting for it.

Shape suffixes: B rows, S columns of a batch. A *slot* is an entry of the collator's ``input_ids``; it holds a real
token or padding.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.ops.loss import IGNORE_INDEX
from fastpack.packing.block_masks import may_be_blocks, read_blocks
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.tensors import send

Count = Tensor | int
"""A whole number: a 0-d int64 tensor on the batch's device, or an int."""


@dataclass(frozen=True)
class BatchCounts:
    """The counts of one batch.

    Attributes:
        real: the real tokens.
        slots: the real tokens and padding.
        trained: the labels that are predicted in the loss, including the first padding label after each text if padding
            has labels; None if the batch has no label for each token.
        pairs: for each window, the number of pairs of a token and a token that it sees.
    """

    real: Count
    slots: int
    trained: Tensor | None
    pairs: tuple[Tensor, ...]


@torch.no_grad()
def count_batch(batch: Mapping[str, Any], windows: Sequence[int | None] = ()) -> BatchCounts:
    """Count the tokens and the pairs of a batch, as the model gets it.

    Sequence starts are read from ``position_ids``, ``seq_idx``, ``packed_seq_lens`` or ``cu_seq_lens_q``, or from the
    (segment) mask; without any of them, each row is one sequence. This function doesn't check that these inputs agree;
    a patched model does.

    Args:
        batch: the model's keyword arguments, with ``input_ids`` ``[B, S]`` or ``inputs_embeds`` ``[B, S, H]``.
        windows: for each window, the largest number of tokens that a token sees, itself included; None if a token sees
            all tokens of its sequence up to itself.
    """
    batch = _with_numbers(batch)
    rows, columns = _shape(batch)
    real_BS, starts_BS = _real(batch), _starts(batch)
    # for each real token, the number of tokens that it sees without a window; 0 for padding
    at_S = torch.arange(columns, device=starts_BS.device)
    visible_BS = at_S + 1 - torch.where(starts_BS, at_S, 0).cummax(-1).values
    if real_BS is not None:
        visible_BS = visible_BS * real_BS
    return BatchCounts(
        real=rows * columns if real_BS is None else real_BS.sum(),
        slots=rows * columns,
        trained=_trained(batch, starts_BS),
        pairs=tuple((visible_BS if window is None else visible_BS.clamp(max=window)).sum() for window in windows),
    )


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch of a model's forward, from its arguments.

    TRL's distillation runs its loss as the model's forward, so that wrappers around the model take part. The arguments
    then are those of the loss: the model, and the trainer's prompts and completions.
    """
    if not args or not isinstance(args[0], nn.Module):
        return {**kwargs, "input_ids": args[0]} if args else kwargs
    for inputs in args:
        if isinstance(inputs, Mapping) and "completion_ids" in inputs:
            return _joined(inputs)
    return {}


def _joined(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch of padded prompts and completions; all completion tokens but those of tools have labels."""
    ids, mask = (torch.cat([inputs[f"prompt_{part}"], inputs[f"completion_{part}"]], 1) for part in ("ids", "mask"))
    learned = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    completions = inputs["completion_ids"].masked_fill(learned == 0, IGNORE_INDEX)
    labels = torch.cat([torch.full_like(inputs["prompt_ids"], IGNORE_INDEX), completions], 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def peak_memory(device: torch.device) -> tuple[int | None, str]:
    """Return the peak memory so far in bytes (torch's on a GPU, else the process's or None) and how it was measured."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), f"allocated on {torch.cuda.get_device_name(device)}"
    resident = resident_bytes()
    return resident, "not measured on Windows" if resident is None else "resident, whole process"


def resident_bytes() -> int | None:
    """Return the peak memory of this process in bytes, or None on Windows, where it is unknown."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _source(batch: Mapping[str, Any]) -> Tensor:
    """Return a batch's token ids, or their embeddings if it has no ids."""
    ids: Tensor | None = batch.get("input_ids")
    return batch["inputs_embeds"] if ids is None else ids


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return B and S."""
    shape = _source(batch).shape
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def _with_numbers(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch with a 2-D mask of segment numbers instead of a block mask or a :class:`PackedSeqLens`."""
    mask, packed, shape = batch.get("attention_mask"), batch.get("packed_seq_lens"), _shape(batch)
    if may_be_blocks(mask, shape):
        numbers = read_blocks(batch["attention_mask"], shape)
        # any other 4-D mask can't be read: then each row is one sequence
        return {**batch, "attention_mask": torch.where((numbers < 0).any(), 1, numbers)}
    if not isinstance(packed, PackedSeqLens):
        return batch
    batch = {name: value for name, value in batch.items() if name != "packed_seq_lens"}
    packed = packed.to(_source(batch).device, non_blocking=True)
    real = packed.padding.mask()
    if real is None and _positions(batch) is not None:
        return batch  # positions say the same, and also which tokens TRL added to round the batch up
    numbers = packed.repad(packed.seq_idx + 1).reshape(shape)
    return {**batch, "attention_mask": numbers if real is None else numbers * real}


def _real(batch: Mapping[str, Any]) -> Tensor | None:
    """Return bool ``[B, S]``, True at real tokens; None if all slots hold real tokens."""
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
    """Return the 2-D mask ``[B, S]``, or None; masks of other shapes don't say where sequences end."""
    mask = batch.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _positions(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the positions ``[1, S]`` or ``[B, S]``, or None; the first axis if there are several."""
    positions = batch.get("position_ids")
    if positions is None:
        return None
    while positions.ndim > 2:
        positions = positions[0]
    return positions if positions.ndim == 2 else positions[None]


def _starts(batch: Mapping[str, Any]) -> Tensor:
    """Return bool ``[B, S]``, True at the start of each sequence; at padding the value has no meaning."""
    (rows, columns), device = _shape(batch), _source(batch).device
    starts = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    starts[:, :1] = True
    mask, positions = _mask(batch), _positions(batch)
    if mask is not None:
        starts[:, 1:] |= mask.diff() != 0
    numbers, offsets = batch.get("seq_idx"), _offsets(batch, device)
    if positions is not None:
        step = positions.diff()
        # in a padded batch, positions may skip numbers inside a sequence
        starts[:, 1:] |= step != 1 if mask is None else step <= 0
    elif isinstance(numbers, Tensor) and numbers.numel() == starts.numel():
        starts[:, 1:] |= numbers.reshape(rows, columns).diff() != 0
    elif offsets is not None and mask is None:
        # drop the last offset, which is the batch's end, and those of empty sequences at the end, which equal it
        flat = torch.cat([starts.reshape(-1), starts.new_zeros(1)])
        starts = flat.index_fill(0, offsets.long(), True)[:-1].reshape(rows, columns)
    return starts


def _offsets(batch: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """Return the offsets of the sequences in the flattened batch, or None if the batch has none."""
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
    # as in a patched model's loss, a real token predicts the next slot's label, even if that slot is padding
    real_BS = mask.ne(0)
    predicted_BS = labels.ne(IGNORE_INDEX) & ~(starts_BS & real_BS)
    return (predicted_BS[:, 1:] & real_BS[:, :-1]).sum()
