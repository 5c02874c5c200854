"""Mixers of a batch that ranks share: a convolution gets the tokens before a rank's own, a recurrence all of its heads.

Shape suffixes: T tokens, t of them on this rank, C channels, H heads; G ranks, each with h = H / G.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpack.attention_dispatch import check_heads, heads_reject
from fastpack.families.mixer_spec import DeltaNetSpec, FastMixerSpec, KimiDeltaSpec, Mamba2Spec
from fastpack.ops.exchange import all_rows
from fastpack.ops.exchange_heads import to_heads, to_tokens
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.packing.shards import TokenShards


def with_tokens_before(
    shards: TokenShards, packed: PackedSeqLens, x_1Ct: Tensor, reach: int
) -> tuple[Tensor, PackedSeqLens]:
    """Return this rank's tokens behind the ``reach`` tokens before them, and the parts of sequences that these are.

    Args:
        shards: the shares of the ranks, each of which calls this at once.
        packed: the batch's packing.
        x_1Ct: ``[1, C, t]``.
        reach: how many tokens before its own a token meets.

    Returns:
        ``[1, C, b + t]``, where b is ``reach``, or less if there are not so many tokens before; and their packing.
    """
    tails = [min(reach, size) for size in shards.sizes]
    x_tC = x_1Ct.squeeze(0).t()
    own = tails[shards.rank]
    # of ranks with fewer tokens than that, these are all
    last_of_all = all_rows(x_tC[len(x_tC) - own :], tails, shards.group)
    end = sum(tails[: shards.rank])
    before = last_of_all[max(0, end - reach) : end]
    first = shards.begin - len(before)
    part = packed.memo(("from token", first), lambda: packed.part(first, shards.begin + shards.total_tokens))
    return torch.cat([before, x_tC]).t().unsqueeze(0), part


def own_heads(shards: TokenShards, arguments: Sequence[Any]) -> list[Any]:
    """Return a recurrence's arguments for all tokens of this rank's heads.

    Args:
        shards: the shares of the ranks.
        arguments: tensors ``[1, t, heads, ...]``, of which some may have fewer heads, each for equally many of the
            others; tensors ``[H]``; anything else stays.

    Raises:
        BackendUnavailableError: the ranks can't have equally many heads.
    """
    given = {i: each.squeeze(0) for i, each in enumerate(arguments) if isinstance(each, Tensor) and each.ndim > 2}
    counts = [each.shape[1] for each in given.values()]
    check_heads(max(counts), min(counts), shards.ranks, what="a recurrence")
    by_dtype = defaultdict(list)
    for i, each in given.items():
        by_dtype[each.dtype].append(i)
    own = [_own(shards, each) if isinstance(each, Tensor) and each.ndim == 1 else each for each in arguments]
    for places in by_dtype.values():
        tensors = [given[i].reshape(*given[i].shape[:2], -1) for i in places]
        repeated = [x.repeat_interleave(max(1, shards.ranks // x.shape[1]), 1) for x in tensors]
        for i, x in zip(places, to_heads(repeated, shards.sizes, shards.group), strict=True):
            own[i] = x.reshape(1, *x.shape[:2], *given[i].shape[2:])
    return own


def tokens_of_heads(shards: TokenShards, x_1ThV: Tensor) -> Tensor:
    """Return this rank's tokens of all heads, ``[1, t, H, V]``."""
    return to_tokens(x_1ThV.squeeze(0), shards.sizes, shards.rank, shards.group).unsqueeze(0)


def mixer_rejects(module: Any, spec: FastMixerSpec | None, ranks: int) -> str | None:
    """Return why so many ranks can't share a mixer's heads, or None; heads are unknown without a spec.

    Args:
        module: the mixer.
        spec: what it computes.
        ranks: the size of the group.
    """
    heads: list[int] = []
    if isinstance(spec, DeltaNetSpec):
        heads = [module.key_dim // module.head_k_dim, module.value_dim // module.head_v_dim]
    elif isinstance(spec, KimiDeltaSpec):
        heads = [module.qkv_dim // module.head_dim]
    elif isinstance(spec, Mamba2Spec):
        heads = [module.n_groups, module.num_heads]
    return heads_reject(max(heads), min(heads), ranks, what="a recurrence") if heads else None


def _own(shards: TokenShards, x: Tensor) -> Tensor:
    """Return the entries of this rank's heads."""
    return x.chunk(shards.ranks)[shards.rank]
