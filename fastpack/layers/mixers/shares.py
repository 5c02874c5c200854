"""Mixers of a batch that ranks share: each rank mixes all tokens of its own channels or heads.

Shape suffixes: T tokens, t of them on this rank, C channels, H heads; G ranks, each with c = C / G and h = H / G.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastpack.attention_dispatch import check_heads, heads_reject
from fastpack.families.mixer_spec import DeltaNetSpec, FastMixerSpec, KimiDeltaSpec, Mamba2Spec
from fastpack.ops.exchange import to_heads, to_tokens
from fastpack.packing.shards import TokenShards


def own_channels(
    shards: TokenShards, x_1Ct: Tensor, weight_CW: Tensor, bias_C: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return all tokens of this rank's channels ``[1, c, T]``, and its rows of a convolution's weight and bias.

    Raises:
        BackendUnavailableError: the ranks can't have equally many channels.
    """
    check_heads(x_1Ct.shape[1], x_1Ct.shape[1], shards.ranks, what="a convolution")
    (own,) = to_heads([x_1Ct.squeeze(0).t().unsqueeze(-1)], shards.sizes, shards.group)
    weight, bias = (None if each is None else _own(shards, each) for each in (weight_CW, bias_C))
    assert weight is not None
    return own.squeeze(-1).t().unsqueeze(0), weight, bias


def own_tokens(shards: TokenShards, x_1cT: Tensor) -> Tensor:
    """Return this rank's tokens of all channels, ``[1, C, t]``."""
    tokens = to_tokens(x_1cT.squeeze(0).t().unsqueeze(-1), shards.sizes, shards.rank, shards.group)
    return tokens.squeeze(-1).t().unsqueeze(0)


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
    """Return why so many ranks can't share a mixer's channels and heads, or None; heads are unknown without a spec.

    Args:
        module: the mixer.
        spec: what it computes.
        ranks: the size of the group.
    """
    convolutions = [child.out_channels for child in module.modules() if isinstance(child, nn.Conv1d)]
    heads: list[int] = []
    if isinstance(spec, DeltaNetSpec):
        heads = [module.key_dim // module.head_k_dim, module.value_dim // module.head_v_dim]
    elif isinstance(spec, KimiDeltaSpec):
        heads = [module.qkv_dim // module.head_dim]
    elif isinstance(spec, Mamba2Spec):
        heads = [module.n_groups, module.num_heads]
    reasons = [heads_reject(count, count, ranks, what="a convolution") for count in convolutions]
    if heads:
        reasons.append(heads_reject(max(heads), min(heads), ranks, what="a recurrence"))
    return next((reason for reason in reasons if reason is not None), None)


def _own(shards: TokenShards, x: Tensor) -> Tensor:
    """Return the entries of this rank's channels or heads."""
    return x.chunk(shards.ranks)[shards.rank]
