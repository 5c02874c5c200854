"""The stand-in for a mask while a backbone runs packed, and a guard against a packing that got lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.packing.seqlens import PackedSeqLens


def mask_stand_in(packed: PackedSeqLens) -> Tensor:
    """The tensor that a backbone hands down in place of a mask while it runs packed: ``[1, 1, 1, 0]``.

    Being 4-D, it passes through transformers' mask functions untouched, so that no T x T mask is built. Being empty,
    it raises wherever it is used as a mask after all: a loud error, not a leak.
    """
    device = packed.cu_seqlens.device
    return packed.memo(("mask", device), lambda: torch.empty(1, 1, 1, 0, device=device))


def is_stand_in(mask: Any) -> bool:
    """True for what :func:`mask_stand_in` makes."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.numel() == 0


def require_packing(module: nn.Module, packed: PackedSeqLens | None, attention_mask: Any) -> None:
    """Check that a packed forward's lengths, and nothing else, say what an attention module may see.

    Raises:
        PatchError: the stand-in mask came, but ``packed_seq_lens`` got lost on the way; or lengths came with a mask
            of the family's own, which would be dropped.
    """
    stand_in = is_stand_in(attention_mask)
    if packed is None and stand_in:
        raise PatchError(
            f"{type(module).__name__} was reached by a packed batch without packed_seq_lens: a module between it and "
            "the backbone drops keywords. fastpack.unpatch(model) restores the stock model; please report the family."
        )
    if packed is not None and attention_mask is not None and not stand_in:
        shape = tuple(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
        raise PatchError(
            f"{type(module).__name__} got a mask of the family's own ({shape}) with a packed batch; dropping it would "
            "change the result. fastpack.unpatch(model) restores the stock model; please report the family."
        )
