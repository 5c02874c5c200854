"""The tree of shared prefixes: every kept token sees the beginnings of its own sequences, and nothing else."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_cases import nodes

from fastpack.packing.prefix_tree import Edges, PrefixTree
from fastpack.packing.prefixes import Prefixes, find_prefixes

CPU = torch.device("cpu")
sequences = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=8)
"""Three kinds of token only, so that beginnings are often alike, sequences equal, or one the beginning of another."""


def tree_of(rows: list[list[int]]) -> tuple[PrefixTree, Prefixes]:
    lengths = [len(row) for row in rows]
    prefixes = find_prefixes(lengths, torch.tensor([token for row in rows for token in row]))
    return prefixes.tree(lengths, CPU), prefixes


def kept_tokens(rows: list[list[int]], prefixes: Prefixes) -> list[tuple[int, ...]]:
    """Return the beginning of a sequence that each kept token ends, in order."""
    starts = dict(zip(prefixes.order, prefixes.shared, strict=True))
    return [tuple(row[: at + 1]) for which, row in enumerate(rows) for at in range(starts[which], len(row))]


def seen_by(tree: PrefixTree, edges: Edges) -> list[Counter[int]]:
    """Return the keys that each kept token sees, as a kernel finds them, and how far away each of them is."""
    offsets = tree.cu_seqlens.tolist()
    seen: list[Counter[int]] = [Counter() for _ in range(offsets[-1])]
    for begin, end in pairwise(offsets):
        for query in range(begin, end):
            seen[query].update(range(begin, query + 1))
    for first_key, end_key, first_query, end_query, shift in edges.table.tolist():
        for query in range(first_query, end_query):
            for key in range(first_key, end_key):
                assert query - (key - shift) >= 1
            seen[query].update(range(first_key, end_key))
    return seen


@settings(max_examples=200, deadline=None)
@given(sequences)
def test_each_token_sees_the_tokens_of_its_beginning_once(rows: list[list[int]]) -> None:
    tree, prefixes = tree_of(rows)
    tokens = kept_tokens(rows, prefixes)
    assert len(tokens) == len(set(tokens)) == nodes([torch.tensor(row) for row in rows])
    place = {beginning: at for at, beginning in enumerate(tokens)}
    for edges in (tree.paths, tree.branches):
        for token, seen in zip(tokens, seen_by(tree, edges), strict=True):
            assert seen == Counter(place[token[: at + 1]] for at in range(len(token)))
    assert tree.pairs == sum(len(token) for token in tokens)
    assert tree.pairs_alone == sum(len(row) * (len(row) + 1) // 2 for row in rows)


@settings(max_examples=100, deadline=None)
@given(sequences)
def test_distances_and_offsets(rows: list[list[int]]) -> None:
    """An edge's shift gives the distance of a query and a key; offsets say whose edges they are."""
    tree, prefixes = tree_of(rows)
    tokens = kept_tokens(rows, prefixes)
    offsets = tree.cu_seqlens.tolist()
    for edges, column in ((tree.paths, 2), (tree.branches, 0)):
        assert sorted(edges.table.tolist()) == sorted(tree.paths.table.tolist())
        bounds = edges.offsets.tolist()
        assert (bounds[0], bounds[-1]) == (0, len(edges.table))
        for segment in range(len(rows)):
            for row in edges.table[bounds[segment] : bounds[segment + 1]].tolist():
                assert row[column] == offsets[segment]
    for first_key, end_key, first_query, end_query, shift in tree.paths.table.tolist():
        for query, key in ((first_query, first_key), (end_query - 1, end_key - 1)):
            assert query - (key - shift) == len(tokens[query]) - len(tokens[key])


@pytest.mark.parametrize("rows", [[[1]], [[1, 2], [3, 4, 5]]], ids=str)
def test_nothing_shared(rows: list[list[int]]) -> None:
    tree, _ = tree_of(rows)
    assert tree.cu_seqlens.tolist() == [0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]
    assert len(tree.paths.table) == len(tree.branches.table) == 0
    assert tree.pairs == tree.pairs_alone
