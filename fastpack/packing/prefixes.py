"""Tokens that sequences of a batch have in common at their beginnings: found, and kept once.

Where attention alone mixes tokens, a token's hidden states depend on nothing but its position and the tokens before it.
So sequences that begin alike (a prompt with its chosen and rejected completions, a group of completions, a system
prompt before everything) are a trie, and its nodes are all that has to be computed: norms, projections and MLPs run on
each node once. Attention alone gets every sequence whole (:func:`fastpack.attention_dispatch.attend`).

Shape suffixes: T tokens of all sequences, N sequences, U tokens that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fastpack.ops.shared_rows import Copies
from fastpack.packing.seqlens import PackedSeqLens, Prefixes, SharedTokens, sent


def find_prefixes(lengths: Sequence[int], ids_T: Tensor, positions_T: Tensor | None = None) -> Prefixes:
    """The longest prefixes that can be shared: neighbours in lexicographic order have the most in common.

    Takes a sort of N strings, and log2(length) comparisons of memory for each.

    Args:
        lengths: of the sequences.
        ids_T: ``[T]`` on the host; they are compared as int32.
        positions_T: ``[T]`` on the host, which must be equal too; None where they restart at 0 in each sequence.
    """
    columns = [ids_T] if positions_T is None else [ids_T, positions_T]
    table = torch.stack([column.to(torch.int32) for column in columns], 1)
    size = 4 * len(columns)
    data = table.numpy().tobytes()
    offsets = list(accumulate(lengths, initial=0))
    # any order by bytes brings equal beginnings together, and sequences never end inside a token
    keys = [data[size * start : size * end] for start, end in pairwise(offsets)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = [_common(keys[a], keys[b], size) for a, b in pairwise(order)]
    return Prefixes(tuple(order), (0, *shared))


def _common(one: bytes, other: bytes, size: int) -> int:
    """How many tokens of so many bytes two strings begin with alike."""
    least, most = 0, min(len(one), len(other)) // size
    while least < most:
        middle = (least + most + 1) // 2
        if one[least * size : middle * size] == other[least * size : middle * size]:
            least = middle
        else:
            most = middle - 1
    return least


def prefixes_of(packed: PackedSeqLens, ids_1T: Tensor) -> Prefixes:
    """Those that were found where the batch was read; else found now, in ids and positions.

    Then it waits for the device, once, if the ids are on one.

    Args:
        ids_1T: int64 ``[1, T]``, un-padded.
    """
    if packed.prefixes is not None:
        return packed.prefixes
    # of what counts on, with the tail of a bucket
    found = torch.cat([ids_1T, packed.position_ids]).to(torch.int32).cpu()
    return find_prefixes(packed.lengths, found[0], found[1])


def share(packed: PackedSeqLens, prefixes: Prefixes) -> PackedSeqLens:
    """The same batch with each token of its prefixes kept once: for modules between a backbone's door and its exit.

    Attention takes and gives ``[U, heads, dim]`` with it. What follows from lengths is that of all T tokens.
    """

    def build() -> PackedSeqLens:
        copies = _copies(packed.lengths, prefixes, packed.cu_seqlens.device)
        positions = packed.position_ids.index_select(1, copies.first)
        full = replace(packed, _memo={})  # another object: the one that keeps this must not be kept by it
        return replace(packed, shared=SharedTokens(full, copies, positions), _memo={})

    # a policy and its reference may be given one and the same object
    made: PackedSeqLens = packed.memo(("shared", prefixes), build)
    return made


def _copies(lengths: Sequence[int], prefixes: Prefixes, device: torch.device) -> Copies:
    """Made on the host, and sent."""
    starts = list(accumulate(lengths, initial=0))
    own = torch.arange(starts[-1])
    kept = own.clone()  # [T]: the token that is kept of each
    for (before, here), count in zip(pairwise(prefixes.order), prefixes.shared[1:], strict=True):
        if count:
            kept[starts[here] : starts[here] + count] = kept[starts[before] : starts[before] + count]
    is_first = kept == own
    first = is_first.nonzero()[:, 0]
    source = (is_first.cumsum(0) - 1)[kept]
    times = source.bincount(minlength=len(first))
    members = source.argsort(stable=True)
    begins = times.cumsum(0) - times
    several = []
    for count in times.unique().tolist():
        if count > 1:
            rows = (times == count).nonzero()[:, 0]
            some = members[begins[rows][:, None] + torch.arange(count)]
            several.append((sent(rows, device), sent(some, device)))
    return Copies(sent(source, device), sent(first, device), tuple(several))
