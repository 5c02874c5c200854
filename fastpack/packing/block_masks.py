"""Read 4-D attention masks with one causal block for each sequence, as LLaMA-Factory's ``neat_packing`` makes them.

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
    -3: "does not let the token see exactly the tokens of its own sequence so far: a window, a shared prefix, or a gap",
    -4: "lets other tokens see a slot that does not see itself: neither a real token nor padding",
}
_MEND = (
    "A patched model takes causal blocks: each token sees its own sequence up to itself, and no token sees padding. "
    "Pass a [B, S] mask (0 and 1, or segment numbers with 0 for padding), or train the model unpatched "
    "(fastpack.unpatch(model))."
)


def may_be_blocks(mask: object, shape: tuple[int, int]) -> bool:
    """Return whether a mask of a batch of shape ``(B, S)`` has the shape and dtype that :func:`read_blocks` takes."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return False
    readable = mask.is_floating_point() or mask.dtype == torch.bool
    rows, *rest = mask.shape
    return readable and rows in (1, shape[0]) and rest == [1, shape[1], shape[1]]


def real_slots(mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return where a ``[B, S]`` mask, or one of causal blocks, has real tokens: bool ``[B, S]``, on its device."""
    return read_blocks(mask, shape) > 0 if may_be_blocks(mask, shape) else mask != 0


def read_blocks(mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """Assign numbers to the sequences of a mask of causal blocks, on its device, without making the host wait.

    A slot that does not see itself is padding, and its row of the mask is not read. The function needs memory for two
    bools for each entry of the mask.

    Args:
        mask: ``[B, 1, S, S]`` or ``[1, 1, S, S]``: bool, True for keys that are seen, or floating, added to the scores.
        shape: ``(B, S)`` of the batch.

    Returns:
        int64 ``[B, S]``: 1, 2, ... for the sequences of each row, 0 for padding, and a negative number where the mask
        is not of causal blocks (:func:`check_blocks` says why).

    Raises:
        PackingError: the mask has another shape or dtype.
    """
    rows, columns = shape
    if not may_be_blocks(mask, shape):
        raise PackingError(
            f"attention_mask of shape {tuple(mask.shape)} and {mask.dtype} came with inputs of shape {shape}. A "
            "patched model takes [B, S] of 0 and 1 (or segment numbers), or causal blocks of sequences as "
            "[B, 1, S, S] for all heads: bool, True for keys that are seen, or floating, added to the scores."
        )
    mask = mask.detach()[:, 0]
    visible = mask if mask.dtype == torch.bool else mask == 0
    at = torch.arange(columns, device=mask.device)
    real = visible.diagonal(dim1=-2, dim2=-1)
    begins = real & (visible.view(torch.uint8).argmax(-1) == at)  # it sees no key before itself
    start = torch.where(begins, at, -1).cummax(-1).values
    differs = at >= start[..., None]  # each query must see the real keys from its start up to itself, and no other
    differs &= at <= at[:, None]
    differs &= real[:, None]
    differs ^= visible
    wrong = differs.any(-1) & real
    differs &= at > at[:, None]
    ahead = differs.any(-1) & real
    del differs
    number = begins.cumsum(-1) * real
    number = number.masked_fill(visible.any(-2) & ~real, -4).masked_fill(wrong, -3).masked_fill(ahead, -2)
    if mask is not visible:
        valid = mask <= HIDDEN
        valid |= visible
        number = number.masked_fill(~valid.all(-1), -1)
    return number.expand(rows, columns)


def check_blocks(number: Tensor, columns: int) -> None:
    """Raise if a mask that :func:`read_blocks` has read is not of causal blocks.

    Args:
        number: ``[B * S]``, the result of :func:`read_blocks` on the host.
        columns: S.

    Raises:
        PackingError: a token does not see its own sequence up to itself; the message names the first one and its fault.
    """
    wrong = (number < 0).nonzero()[:, 0]
    if wrong.numel():
        at = int(wrong[0])
        fault = _FAULTS[int(number[at])].format(hidden=HIDDEN)
        raise PackingError(f"attention_mask (4-D), at row {at // columns}, column {at % columns}, {fault}. {_MEND}")
