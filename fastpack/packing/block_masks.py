"""4-D attention masks that hold one causal block a sequence, as LLaMA-Factory's ``neat_packing`` sends them.

Shape suffixes: B rows, S columns of the batch; a mask is ``[B, 1, S, S]``, queries before keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack.errors import PackingError

HIDDEN = torch.finfo(torch.float16).min
"""The largest number that hides a key in an additive mask: it leaves no weight on the key in any dtype."""

_FAULTS = {
    -1: "adds something other than 0 (seen) or {hidden:.0f} and less (hidden) to a score: a bias, or NaN",
    -2: "lets the token see later ones: it is not causal",
    -3: "lets the token see other tokens than those from the beginning of its own sequence on: a window, a shared "
    "prefix, or a gap",
    -4: "lets others see a slot that does not see itself: neither a real token nor padding",
}
_MEND = (
    "A patched model takes blocks: each token sees all of its own sequence up to itself, and nobody sees padding. Pass "
    "a [B, S] mask (0 and 1, or segment numbers with 0 for padding), or train the model unpatched "
    "(fastpack.unpatch(model))."
)


def may_be_blocks(mask: object, shape: tuple[int, int]) -> bool:
    """Return whether a mask of a batch of shape ``(B, S)`` has the shape and dtype that :func:`read_blocks` takes."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return False
    known = mask.is_floating_point() or mask.dtype == torch.bool
    rows, *rest = mask.shape
    return known and rows in (1, shape[0]) and rest == [1, shape[1], shape[1]]


def real_slots(mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return where a ``[B, S]`` mask, or one of blocks, has real tokens: bool ``[B, S]``, on its device."""
    return read_blocks(mask, shape) > 0 if may_be_blocks(mask, shape) else mask != 0


def read_blocks(mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """Number the sequences of a mask of causal blocks; it runs on the mask's device, and the host waits for nothing.

    A slot is padding where it does not see itself; what a slot of padding sees is not read. Beside the mask, two bools
    an entry are held at a time.

    Args:
        mask: ``[B, 1, S, S]`` or ``[1, 1, S, S]``; bool, True for keys that are seen, or floating, added to the scores.
        shape: ``(B, S)`` of the batch.

    Returns:
        int64 ``[B, S]``: 1, 2, ... for the sequences of each row, 0 for padding; negative where the mask is no such
        blocks (:func:`check_blocks` says what it is).

    Raises:
        PackingError: it has another shape or dtype.
    """
    rows, columns = shape
    if not may_be_blocks(mask, shape):
        raise PackingError(
            f"attention_mask of shape {tuple(mask.shape)} and {mask.dtype} came with inputs of shape {shape}. A "
            "patched model takes [B, S] of 0 and 1 (or segment numbers), or causal blocks of sequences as "
            "[B, 1, S, S], one for all heads: bools, True for keys that are seen, or floating, added to the scores."
        )
    mask = mask.detach()[:, 0]
    seen = mask if mask.dtype == torch.bool else mask == 0
    at = torch.arange(columns, device=mask.device)
    real = seen.diagonal(dim1=-2, dim2=-1)
    begins = real & (seen.view(torch.uint8).argmax(-1) == at)  # its first key is itself
    start = torch.where(begins, at, -1).cummax(-1).values
    differs = at >= start[..., None]  # and so each query sees every real key from there up to itself, and no other
    differs &= at <= at[:, None]
    differs &= real[:, None]
    differs ^= seen
    wrong = differs.any(-1) & real
    differs &= at > at[:, None]
    ahead = differs.any(-1) & real
    del differs
    number = begins.cumsum(-1) * real
    number = number.masked_fill(seen.any(-2) & ~real, -4).masked_fill(wrong, -3).masked_fill(ahead, -2)
    if mask is not seen:
        known = mask <= HIDDEN
        known |= seen
        number = number.masked_fill(~known.all(-1), -1)
    return number.expand(rows, columns)


def check_blocks(number: Tensor, columns: int) -> None:
    """Raise where a mask that :func:`read_blocks` read was none of causal blocks.

    Args:
        number: ``[B * S]``, what it returned, on the host.
        columns: S.

    Raises:
        PackingError: it names the first token that sees something else, and what.
    """
    wrong = (number < 0).nonzero()[:, 0]
    if wrong.numel():
        at = int(wrong[0])
        fault = _FAULTS[int(number[at])].format(hidden=HIDDEN)
        raise PackingError(f"attention_mask (4-D), at row {at // columns}, column {at % columns}, {fault}. {_MEND}")
