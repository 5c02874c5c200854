"""Re-pad a backbone's outputs, copy them to all sequences that share tokens, or put the tokens of ranks together.

Shape suffixes: T tokens; U tokens, with each shared one kept once; A streams of hidden states (Gemma 3n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpack.ops.autograd import as_row
from fastpack.ops.shared_rows import spread
from fastpack.packing.prefixes import SharedTokens
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.packing.shards import TokenShards

Change = Callable[[Tensor], Tensor]


def repad_outputs(outputs: object, packed: PackedSeqLens) -> Any:
    """Re-pad every output that has one entry for each token; the other outputs stay unchanged."""
    if packed.padding.is_packed_row:
        return outputs
    return _change(outputs, packed.total_tokens, packed.repad, packed.padding.repad_flat)


def copy_to_all_tokens(outputs: object, shared: SharedTokens) -> Any:
    """Copy every output that has one entry for each token from the U kept tokens to all T tokens."""
    copies = shared.copies
    return _change(outputs, shared.total_tokens, lambda x: as_row(spread(x[0], copies)), lambda x: spread(x, copies))


def put_together(outputs: Any, shards: TokenShards, *, hidden: bool) -> Any:
    """Put every output that has one entry for each of this rank's tokens together with the other ranks' tokens.

    Args:
        outputs: the outputs of a backbone.
        shards: the shares of the ranks, each of which calls this at once.
        hidden: whether the last hidden states are put together, too.
    """
    last = outputs.last_hidden_state
    kept = [] if hidden else [(last, last)]
    return _change(outputs, shards.total_tokens, lambda x: as_row(shards.put_together(x[0])), shards.put_together, kept)


def _change(
    outputs: Any, tokens: int, batched: Change, flat: Change, known: Sequence[tuple[Tensor, Tensor]] = ()
) -> Any:
    """Replace every tensor in the outputs that has an entry for each of ``tokens`` tokens, at any depth of nesting.

    Each ``[tokens, ...]`` becomes ``flat(x)``. Each ``[1, tokens, ...]``, and each stream of ``[A, 1, tokens, ...]``,
    becomes ``batched(x)``. The ``known`` pairs of a tensor and its replacement come first.
    """
    replaced = [*known]
    for key in list(outputs.keys()):
        outputs[key] = _changed(outputs[key], tokens, batched, flat, replaced)
    return outputs


def _changed(value: object, tokens: int, batched: Change, flat: Change, replaced: list[tuple[Tensor, Tensor]]) -> Any:
    """Return an output with its tensors replaced; see :func:`_change`.

    This is a function of the module, since a nested function would refer to itself, and so keep every tensor alive
    until a garbage collection.

    Args:
        value: an output, or a tuple or list of outputs.
        tokens: see :func:`_change`.
        batched: see :func:`_change`.
        flat: see :func:`_change`.
        replaced: pairs of a tensor and its replacement, which this function extends.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(_changed(item, tokens, batched, flat, replaced) for item in value)
    if not isinstance(value, Tensor):
        return value
    for before, after in replaced:
        if before is value:  # hidden_states[-1] is last_hidden_state, and must stay the same object
            return after
    if value.ndim >= 2 and value.shape[:2] == (1, tokens):
        replaced.append((value, batched(value)))
    elif value.ndim >= 4 and value.shape[1:3] == (1, tokens):
        replaced.append((value, torch.stack([batched(stream) for stream in value])))
    elif value.ndim >= 2 and value.shape[0] == tokens:
        replaced.append((value, flat(value)))  # router_logits
    else:
        return value
    return replaced[-1][1]
