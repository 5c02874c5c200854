"""The first label of each sequence, which nothing predicts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastpack.packing import PackedSeqLens


def without_first_labels(arguments: dict[str, Any]) -> dict[str, Any]:
    """With the first label of each sequence ignored, on a copy, where the packing was read."""
    packed, labels = arguments.get("packed_seq_lens"), arguments.get("labels")
    if not isinstance(packed, PackedSeqLens) or not isinstance(labels, Tensor):
        return arguments
    return {**arguments, "labels": packed.mask_first_labels(labels)}
