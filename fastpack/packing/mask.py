"""The placeholder for a mask while a backbone runs packed, and a check that no module has lost the packing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.packing.seqlens import PackedSeqLens


def mask_placeholder(packed: PackedSeqLens) -> Tensor:
    """Return the tensor that a packed backbone passes to its layers in place of a mask: ``[1, 1, 1, 0]``.

    Since the tensor is 4-D, transformers' mask functions return it unchanged, and no T x T mask is built. Since it is
    empty, a module that uses it as a mask raises an error, and nothing leaks.
    """
    device = packed.cu_seqlens.device
    return packed.memo(("mask", device), lambda: torch.empty(1, 1, 1, 0, device=device))


def is_mask_placeholder(mask: Any) -> bool:
    """Return whether a mask is the placeholder of :func:`mask_placeholder`."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.numel() == 0


def require_packing(module: nn.Module, packed: PackedSeqLens | None, attention_mask: Any) -> None:
    """Check that an attention module got its lengths, and no other mask than the placeholder.

    Raises:
        PatchError: the module got the placeholder without ``packed_seq_lens``, which another module has dropped; or it
            got the lengths together with a mask of the family's own, which would have no effect.
    """
    placeholder = is_mask_placeholder(attention_mask)
    if packed is None and placeholder:
        raise PatchError(
            f"{type(module).__name__} got a packed batch without packed_seq_lens: a module between it and the backbone "
            "drops keywords. fastpack.unpatch(model) restores the stock model; please report the family."
        )
    if packed is not None and attention_mask is not None and not placeholder:
        shape = tuple(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
        raise PatchError(
            f"{type(module).__name__} got a mask of the family's own ({shape}) with a packed batch; dropping it would "
            "change the result. fastpack.unpatch(model) restores the stock model; please report the family."
        )
