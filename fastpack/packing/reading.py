"""Read on the host where the sequences of a batch begin and end.

Only this module knows how other libraries spell packing: ``cu_seq_lens_q``, ``max_length_q``, ``seq_idx``, restarting
``position_ids``, integer segment masks and 4-D masks of blocks. It synchronises with the device at most once a batch,
and refuses a batch that contradicts itself. It trusts lengths that a collator has read: code that changes the batch
later must leave the sequences where they are, or remove the lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastpack.errors import PackingError
from fastpack.packing.block_masks import check_blocks, read_blocks
from fastpack.packing.padding import Padding
from fastpack.packing.prefixes import find_prefixes
from fastpack.packing.seqlens import PackedSeqLens, build_lengths, check_lengths, check_vector
from fastpack.utils.tensors import send

AXES = 3
"""The number of rotary axes of most models whose positions have several: time, height and width."""
FIRST_AXIS = "the first axis of position_ids"


def read_inputs(
    shape: tuple[int, int],
    keywords: Mapping[str, Any],
    device: torch.device,
    *,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    axes: int = AXES,
    ids: Tensor | None = None,
) -> PackedSeqLens:
    """Read on the host where sequences begin and end; see :func:`fastpack.packing.inputs.read_packing`.

    Args:
        shape: ``(B, S)`` of the batch.
        keywords: the packing keywords of the batch that are not None.
        device: the batch's device.
        attention_mask: as in :func:`~fastpack.packing.inputs.read_packing`.
        position_ids: as in :func:`~fastpack.packing.inputs.read_packing`.
        axes: as in :func:`~fastpack.packing.inputs.read_packing`.
        ids: as in :func:`~fastpack.packing.inputs.read_packing`.
    """
    rows, columns = shape
    slots = rows * columns
    if slots == 0:
        raise PackingError(f"the batch has shape {shape}, without a single slot. Pass at least one token, or padding.")
    text, first = split_axes(position_ids, axes)
    host = _to_host(shape, attention_mask, {"position_ids": text, FIRST_AXIS: first}, keywords, ids)
    # index of every real token in the flattened batch, and the sequence number its mask gives it
    mask = host.get("attention_mask", torch.ones(slots, dtype=torch.long))
    blocks = attention_mask is not None and attention_mask.ndim == 4
    if blocks:
        check_blocks(mask, columns)
    if bool((mask < 0).any()):
        raise PackingError(
            "attention_mask holds negative, fractional or infinite values, or NaN: an additive mask does not say "
            "where sequences end. Pass 0 and 1, or segment numbers with 0 for padding."
        )
    index = mask.nonzero()[:, 0]
    segment = mask[index]
    if index.numel() == 0:
        if attention_mask.is_floating_point() and not blocks:
            raise PackingError(
                "attention_mask is of a floating-point dtype and holds zeros only: padding everywhere, or an additive "
                "mask that hides nothing? Pass it as integers or bools, 1 for a real token."
            )
        _explicit_boundary(keywords, host, index, row=index, implied=index.bool(), slots=slots)
        padding = Padding(batch_shape=shape, indices=send(torch.zeros(1, dtype=torch.long), device), is_empty=True)
        return replace(build_lengths([1], device), padding=padding)
    row = index // columns
    gap = index.diff() != 1
    new_row = row.diff() != 0
    new_segment = segment.diff() != 0
    if (at := _first(gap & ~new_row & ~new_segment)) is not None:
        raise PackingError(
            f"attention_mask has a hole: row {int(row[at])} has real tokens in columns {int(index[at] % columns)} "
            f"and {int(index[at + 1] % columns)} with padding between them. Padding may stand left and right of a "
            "sequence, not inside it. Number the segments (1, 1, 0, 2, 2) if they are separate sequences; if a prompt "
            "was padded before its completion, pad it left (tokenizer.padding_side='left'); if PEFT put its virtual "
            "tokens before the padding, pad on the right."
        )
    boundary = new_row | new_segment  # [T - 1]: does token i + 1 begin a sequence?

    # the input that states where sequences begin: offsets, lengths, or a mask that numbers them
    numbered = blocks or bool((new_segment & ~new_row).any())
    author = "attention_mask (its segments)" if numbered else None
    explicit = _explicit_boundary(keywords, host, index, row=row, implied=boundary, slots=slots)
    if explicit is not None:
        if author is not None and (at := _first(explicit[1] & ~boundary)) is not None:
            raise PackingError(
                f"{explicit[0]} begins a sequence at token {at + 1}, in the middle of a segment of attention_mask. "
                "Pass one of them, or make them agree."
            )
        author, boundary = explicit
    positions = host.get("position_ids")
    real_positions = None if positions is None else positions[index]
    if real_positions is not None:
        if bool((real_positions < 0).any()):
            raise PackingError(
                "position_ids holds negative or fractional positions of real tokens. Pass whole numbers from 0 on."
            )
        step = real_positions.diff()
        if author is None:
            restarts = boundary | (step <= 0)
            _reject_repeats(step, boundary, restarts)
            boundary = restarts
            _reject_jumps(step, boundary, all_real=index.numel() == slots)
        else:
            _check_positions(author, step, boundary, new_row)
    elif first is not None and author is None:
        _reject_falls(host[FIRST_AXIS][index].diff(), boundary, axes)

    starts = torch.cat([torch.zeros(1, dtype=torch.long), boundary.nonzero()[:, 0] + 1])
    lengths = starts.diff(append=torch.tensor([index.numel()])).tolist()
    _check_max_length(keywords, host, max(lengths))
    padding = Padding(
        batch_shape=shape,
        indices=None if index.numel() == slots else send(index, device),
        starts_rows=not bool((index[starts] % columns).any()),
    )
    prefixes = None if ids is None else find_prefixes(lengths, host["input_ids"][index], real_positions)
    packed = build_lengths(lengths, device, real_positions)
    return replace(packed, padding=padding, prefixes=prefixes, is_unwindowed=blocks)


def numbers_segments(mask_BS: Tensor) -> bool:
    """Return whether a mask numbers several sequences in one row. The host waits for the device."""
    number = _whole(mask_BS)
    return bool(((number > 0) & (number != number.amax(1, keepdim=True))).any())


def already_read(
    keywords: Mapping[str, Any], shape: tuple[int, int], device: torch.device, *, alone: bool
) -> PackedSeqLens | None:
    """Return the batch's ``packed_seq_lens`` if it needs no further check against the batch, else None."""
    ours = keywords.get("packed_seq_lens")
    if not isinstance(ours, PackedSeqLens):
        return None
    compiling = torch.compiler.is_compiling()
    if compiling and ours.cu_seqlens.device != device:
        return None
    if ours.padding.batch_shape == shape:
        return ours.to(device)  # the head or a collator has read and checked it from this very batch
    if ours.padding.batch_shape is None and alone and len(keywords) == 1 and shape == (1, ours.real_tokens):
        if compiling:  # a copy would guard on every length, and the shape says nothing new
            return ours
        ours = ours.to(device)
        padding = replace(ours.padding, batch_shape=shape, starts_rows=ours.num_sequences == 1)
        return replace(ours, padding=padding)  # shares the memo of the object that was passed
    return None


def _to_host(
    shape: tuple[int, int],
    attention_mask: Any,
    positions: Mapping[str, Tensor | None],
    keywords: Mapping[str, Any],
    ids: Tensor | None,
) -> dict[str, Tensor]:
    """Bring every tensor that describes the batch to the host, flat and int64, in one copy.

    Each of ``positions`` is ``[S]``, ``[1, S]`` or ``[B, S]``, and arrives under its name.
    """
    rows, columns = shape
    parts: dict[str, Tensor] = {} if ids is None else {"input_ids": ids}
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor):
            raise PackingError(
                f"attention_mask is a {type(attention_mask).__name__}; a patched model takes None or a [B, S] tensor "
                "of 0 and 1 (or segment numbers), and builds what the backend needs itself."
            )
        if attention_mask.ndim == 4:
            parts["attention_mask"] = read_blocks(attention_mask, shape)
        elif tuple(attention_mask.shape) == shape:
            parts["attention_mask"] = _whole(attention_mask)
        else:
            raise PackingError(
                f"attention_mask has shape {tuple(attention_mask.shape)} for inputs of shape {shape}; a patched model "
                "takes [B, S], or causal blocks of sequences as [B, 1, S, S]."
            )
    for name, position_ids in positions.items():
        if position_ids is None:
            continue
        if position_ids.shape[-1] != columns or position_ids.numel() not in (columns, rows * columns):
            raise PackingError(
                f"position_ids has shape {tuple(position_ids.shape)} for inputs of shape {shape}; pass [B, S]."
            )
        parts[name] = _whole(position_ids).reshape(-1, columns).expand(rows, columns)
    for key, value in keywords.items():
        if key != "packed_seq_lens":
            parts[key] = _numbers(key, value)
        elif isinstance(value, Tensor):
            check_vector(value)
            parts[key] = value
    host = {key: part.detach().reshape(-1).long() for key, part in parts.items() if part.device.type == "cpu"}
    remote = {key: part for key, part in parts.items() if key not in host}
    if remote:
        device = next(iter(remote.values())).device
        joined = torch.cat([part.detach().reshape(-1).to(device, torch.int32) for part in remote.values()])
        split = joined.cpu().long().split([part.numel() for part in remote.values()])
        host.update(zip(remote, split, strict=True))
    return host


def split_axes(position_ids: Tensor | None, axes: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the positions that count the tokens of each sequence, or the first axis of positions without them.

    Args:
        position_ids: None; positions of one axis; ``[1 + axes, B, S]``, text positions first; or ``[axes, B, S]``.
        axes: the number of the model's rotary axes.

    Raises:
        PackingError: there is another number of axes.
    """
    if position_ids is None or position_ids.ndim <= 2:
        return position_ids, None
    if position_ids.ndim > 3 or position_ids.shape[0] not in (axes, axes + 1):
        raise PackingError(
            f"position_ids has shape {tuple(position_ids.shape)}; pass [B, S] or, for vision-language models, "
            f"[{axes}, B, S] or [{axes + 1}, B, S] with the text positions first."
        )
    return (position_ids[0], None) if position_ids.shape[0] == axes + 1 else (None, position_ids[0])


def _numbers(key: str, value: Any) -> Tensor:
    """Read another library's keyword as a tensor of integers; fractions would be rounded and join sequences."""
    try:
        numbers = value if isinstance(value, Tensor) else torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PackingError(f"{key}={str(value)[:80]} ({type(value).__name__}): pass integers, or a tensor.") from error
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise PackingError(f"{key} is of dtype {numbers.dtype}; pass integers, which say where sequences begin.")
    return numbers


def _whole(values: Tensor) -> Tensor:
    """Return a mask or positions with -1 in place of negative and fractional values."""
    if not values.is_floating_point():
        return values
    return torch.where(values == values.trunc(), values.clamp(min=-1), -1)


def _explicit_boundary(
    keywords: Mapping[str, Any], host: Mapping[str, Tensor], index: Tensor, *, row: Tensor, implied: Tensor, slots: int
) -> tuple[str, Tensor] | None:
    """Return the boundaries that a keyword states, after a check that all keywords agree.

    Args:
        keywords: the packing keywords of the batch.
        host: the tensors of the batch, flat and on the host.
        index: ``[T]``, the slot of each real token in the flattened batch.
        row: ``[T]``, the row of each real token.
        implied: bool ``[T - 1]``, the boundaries that rows and the mask make.
        slots: the number of slots of the batch, for real tokens and padding.

    Returns:
        The keyword, and bool ``[T - 1]``; None if no keyword states boundaries.
    """
    total = index.numel()
    sources: dict[str, Tensor] = {}
    ours = keywords.get("packed_seq_lens")
    if ours is not None:
        lengths = (
            list(ours.lengths) if isinstance(ours, PackedSeqLens) else check_lengths(host.get("packed_seq_lens", ours))
        )
        if sum(lengths) != total:
            raise PackingError(
                f"packed_seq_lens sum to {sum(lengths)}, but the batch holds {total} real tokens. They must be the "
                "lengths of the sequences in input_ids, in order."
            )
        sources["packed_seq_lens"] = torch.tensor(lengths).cumsum(0)[:-1]
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if key in keywords:
            offsets = host[key]
            if offsets.numel() < 1 or int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
                raise PackingError(f"{key} must rise from 0; got {offsets.tolist()[:8]}.")
            if int(offsets[-1]) != total:
                raise PackingError(
                    f"{key} ends at {int(offsets[-1])}, but the batch holds {total} tokens. It must be the offsets "
                    "of the sequences in input_ids, from 0 to their total."
                )
            sources[key] = offsets.unique()[1:-1]  # repeated offsets are sequences without tokens
    if "seq_idx" in keywords:
        numbers = host["seq_idx"]
        if numbers.numel() not in (total, slots):
            raise PackingError(f"seq_idx holds {numbers.numel()} entries, but the batch has {total} tokens.")
        changes = (numbers if numbers.numel() == total else numbers[index]).diff() != 0
        if getattr(keywords["seq_idx"], "ndim", 1) == 2 and len(keywords["seq_idx"]) > 1:
            changes |= row.diff() != 0  # each row numbers its own sequences
        sources["seq_idx"] = changes.nonzero()[:, 0] + 1
    if not sources:
        return None
    first, starts = next(iter(sources.items()))
    for other, others in sources.items():
        if not torch.equal(starts, others):
            raise PackingError(
                f"{first} and {other} disagree about where sequences begin: {starts.tolist()[:8]} against "
                f"{others.tolist()[:8]}. Pass one of them, or make them agree."
            )
    boundary = torch.zeros_like(implied)
    boundary[starts - 1] = True
    if (at := _first(implied & ~boundary)) is not None:
        raise PackingError(
            f"{first} lets a sequence run over token {at + 1}, where a new row or a new segment of attention_mask "
            "begins. Make them agree, or pass one of them."
        )
    return first, boundary


def _first(flags: Tensor) -> int | None:
    """Return the index of the first True in a bool ``[T]``, or None."""
    places = flags.nonzero()
    return int(places[0, 0]) if len(places) else None


def _reject_repeats(step: Tensor, boundary: Tensor, restarts: Tensor) -> None:
    # two sequences may both begin at 0 if the first has one token; inside a sequence no position may come twice
    begins = torch.cat([torch.ones(1, dtype=torch.bool), restarts[:-1]])
    if (at := _first((step == 0) & ~boundary & ~begins)) is not None:
        raise PackingError(
            f"position_ids repeat a position at token {at + 1}, inside a sequence: neither the next position nor a "
            "restart. Restart them where a sequence begins, or leave them out and pass packed_seq_lens."
        )


def _reject_falls(step: Tensor, boundary: Tensor, axes: int) -> None:
    """Raise if positions of several axes, without text positions, fall inside a sequence."""
    if (at := _first((step < 0) & ~boundary)) is not None:
        raise PackingError(
            f"position_ids of {axes} axes fall at token {at + 1}, inside a sequence: several sequences seem to share a "
            f"row, but no axis counts the tokens of each. Pass position_ids [{axes + 1}, B, S], the text positions "
            "first, or packed_seq_lens."
        )


def _reject_jumps(step: Tensor, boundary: Tensor, *, all_real: bool) -> None:
    # With padding in the mask, the user may skip positions (the stock model keeps one sequence). Without padding,
    # transformers reads a jump as a new sequence, so a jump is ambiguous.
    if all_real and (at := _first((step > 1) & ~boundary)) is not None:
        raise PackingError(
            f"position_ids jump by {int(step[at])} at token {at + 1}: neither the next position nor a restart. Pass "
            "packed_seq_lens to say where sequences begin."
        )


def _check_positions(author: str, step: Tensor, explicit: Tensor, new_row: Tensor) -> None:
    # If each packed row holds one sequence, its positions need not restart visibly. packed_seq_lens allows skipped
    # positions; other libraries' keywords come with positions that restart.
    wrong = torch.where(explicit, (step == 1) & ~new_row, step <= 0 if author == "packed_seq_lens" else step != 1)
    if (at := _first(wrong)) is not None:
        what = "begin a sequence" if bool(explicit[at]) else "continue one"
        raise PackingError(
            f"{author} and position_ids disagree: token {at + 1} should {what}, but its position "
            f"is {int(step[at]):+d} from the token before. position_ids must restart where a sequence begins "
            "and grow by 1 inside it. Or leave them out: the model makes them."
        )


def _check_max_length(keywords: Mapping[str, Any], host: Mapping[str, Tensor], longest: int) -> None:
    for key in ("max_length_q", "max_length_k"):
        if key in keywords and (value := int(host[key].max())) < longest:
            raise PackingError(f"{key} is {value}, but the longest sequence has {longest} tokens.")
