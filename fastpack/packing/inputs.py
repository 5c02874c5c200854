"""Read where the sequences of a batch begin and end, also while ``torch.compile`` traces.

:mod:`fastpack.packing.reading` reads lengths on the host. A compiled region calls it with a graph break
(:mod:`fastpack.packing.outside`).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from fastpack.packing.reading import AXES, already_read, read_inputs
from fastpack.packing.reading import numbers_segments as read_segments
from fastpack.packing.seqlens import PackedSeqLens

PACKING_KEYWORDS = (
    "packed_seq_lens",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
"""The keywords that say how a batch is packed: ours first, then those of TRL and transformers."""


def read_packing(
    shape: tuple[int, int],
    device: torch.device,
    *,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    axes: int = AXES,
    packing: Mapping[str, Any] | None = None,
    ids: Tensor | None = None,
) -> PackedSeqLens:
    """Read from a batch where its sequences begin and end; :class:`fastpack.PackedSeqLens` lists the inputs.

    Args:
        shape: ``(B, S)`` of ``input_ids`` or ``inputs_embeds``.
        device: the batch's device.
        attention_mask: None; ``[B, S]`` of 0 and 1, padded on any side; ``[B, S]`` of segment numbers, 0 for padding
            (1, 1, 2, 2, 0); or ``[B, 1, S, S]``, bool or additive, with one causal block for each sequence
            (:mod:`fastpack.packing.block_masks`); it is read on its device.
        position_ids: None, ``[S]``, ``[1, S]`` or ``[B, S]``. A value that does not grow begins a new sequence.
            Values under padding are ignored. Of ``[1 + axes, B, S]`` the first, the text positions, are read;
            ``[axes, B, S]`` say nothing about sequences, and must not fall inside one if nothing else tells them apart.
        axes: the number of rotary axes of the model, if its positions have several.
        packing: the entries of :data:`PACKING_KEYWORDS` that came with the batch.
        ids: int64 ``[B, S]``, the batch's ``input_ids``, if shared prefixes are to be found too. The ids come to the
            host in the same copy as the other tensors.

    Raises:
        PackingError: the inputs contradict each other, or don't say where sequences end.
    """
    keywords = {key: value for key, value in (packing or {}).items() if value is not None}
    packed = already_read(keywords, shape, device, alone=attention_mask is None and position_ids is None)
    if packed is not None:
        return packed
    if not torch.compiler.is_compiling():
        return read_inputs(
            shape, keywords, device, attention_mask=attention_mask, position_ids=position_ids, axes=axes, ids=ids
        )
    from fastpack.packing.outside import read_outside  # it imports the compiler

    packed = read_outside(shape, keywords, device, attention_mask=attention_mask, position_ids=position_ids, axes=axes)
    return packed


def numbers_segments(mask_BS: Tensor) -> bool:
    """Return whether a mask numbers several sequences in one row. The host waits for the device, except for bools."""
    if mask_BS.dtype == torch.bool:
        return False
    if not torch.compiler.is_compiling():
        return read_segments(mask_BS)
    from fastpack.packing.outside import numbers_segments_outside  # it imports the compiler

    return bool(numbers_segments_outside(mask_BS))


def take_packing(kwargs: MutableMapping[str, Any]) -> dict[str, Any]:
    """Remove the packing keywords from ``kwargs``, and return those that are not None."""
    packing = {key: kwargs.pop(key, None) for key in PACKING_KEYWORDS}
    return {key: value for key, value in packing.items() if value is not None}
