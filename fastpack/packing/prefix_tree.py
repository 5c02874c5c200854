"""The tree that shared prefixes make of a batch: which of the kept tokens each of them sees.

Each sequence has a segment, which holds the tokens that it does not share with the sequence before it in order. The
segments lie one after the other, in the order of the sequences. A sequence is a path through the tree: the first tokens
of some segments, then its own segment. So each key is stored once, whatever the number of queries that see it.

Shape suffixes: N sequences, U kept tokens, P edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from fastpack.packing.pairs import count_pairs
from fastpack.utils.tensors import send


class Edge(NamedTuple):
    """One step of a path: the queries of a segment see the first keys of another segment.

    Attributes:
        first_key, end_key: the kept tokens that are seen, from ``first_key`` up to ``end_key``.
        first_query, end_query: the kept tokens that see them: a whole segment.
        shift: query minus (key minus shift) is their distance in the sequence.
    """

    first_key: int
    end_key: int
    first_query: int
    end_query: int
    shift: int


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of a tree, in the order of the segments at one of their ends.

    Attributes:
        table: int32 ``[P, 5]``, the attributes of each :class:`Edge`.
        offsets: int32 ``[N + 1]``, where each segment's edges begin in the table.
    """

    table: Tensor
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The tree of a batch, on its device.

    Attributes:
        cu_seqlens: int32 ``[N + 1]``, the segments' offsets, from 0 to U. A segment may be empty.
        paths: the edges to the keys that each segment's queries see, in the order of the tokens.
        branches: the same edges, from each segment's keys to the queries that see them.
        pairs: the number of pairs of a query and a key up to it, each counted once.
        pairs_alone: their number if each sequence had all of its tokens.
    """

    cu_seqlens: Tensor
    paths: Edges
    branches: Edges
    pairs: int
    pairs_alone: int


def make_tree(order: Sequence[int], shared: Sequence[int], lengths: Sequence[int], device: torch.device) -> PrefixTree:
    """Return the tree of a batch; the tensors are made on the host and sent to the device.

    Args:
        order: indices of the sequences; each shares its first tokens with the one before it.
        shared: the number of tokens that it shares, for each sequence in this order.
        lengths: the tokens of each sequence.
        device: the batch's device.
    """
    starts = [0] * len(lengths)  # the position of each segment's first token in its sequence
    for here, count in zip(order, shared, strict=True):
        starts[here] = count
    sizes = [length - start for length, start in zip(lengths, starts, strict=True)]
    offsets = list(accumulate(sizes, initial=0))

    edges: list[tuple[int, int, Edge]] = []
    path: list[tuple[int, int]] = []  # of one sequence: segments, and how many of their first tokens it has
    for here in order:
        path = list(_first_tokens(path, starts[here]))
        for segment, count in path if sizes[here] else ():
            begin = offsets[segment]
            shift = starts[here] - offsets[here] - starts[segment] + begin
            edges.append((here, segment, Edge(begin, begin + count, offsets[here], offsets[here + 1], shift)))
        path.append((here, sizes[here]))

    own = zip(sizes, starts, strict=True)
    return PrefixTree(
        send(torch.tensor(offsets, dtype=torch.int32), device),
        _edges(edges, 0, len(lengths), device),
        _edges(edges, 1, len(lengths), device),
        sum(size * start + size * (size + 1) // 2 for size, start in own),
        count_pairs(lengths),
    )


def _first_tokens(path: Sequence[tuple[int, int]], tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the part of a path that holds a sequence's first tokens."""
    for segment, count in path:
        if not tokens:
            return
        if count:
            yield segment, min(count, tokens)
        tokens -= min(count, tokens)


def _edges(edges: Sequence[tuple[int, int, Edge]], end: int, segments: int, device: torch.device) -> Edges:
    """Return the edges in the order of the segments at one end: 0 for the queries', 1 for the keys'."""
    in_order = sorted(edges, key=itemgetter(end))
    table = torch.tensor([edge for _, _, edge in in_order], dtype=torch.int32).view(-1, len(Edge._fields))
    at = torch.tensor([edge[end] for edge in in_order], dtype=torch.int64)
    offsets = torch.searchsorted(at, torch.arange(segments + 1))
    return Edges(send(table, device), send(offsets.to(torch.int32), device))
