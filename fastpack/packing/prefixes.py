"""Find the prefixes that sequences of a batch share, and keep each of their tokens once.

If attention alone mixes tokens, a token's hidden state depends only on its position and the tokens before it. Sequences
that begin alike (a prompt with its chosen and rejected completions, a group of completions, a system prompt of many
chats) form a trie, and only the nodes of the trie have to be computed: norms, projections and MLPs run on each node
once. So does attention, if its backend serves segments; to other backends, :func:`fastpack.attention_dispatch.attend`
gives all tokens of every sequence.

Shape suffixes: T tokens of all sequences, N sequences, U kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fastpack.errors import PackingError
from fastpack.ops.shared_rows import Copies, copies_of, first_copies
from fastpack.packing.prefix_tree import PrefixTree, make_tree
from fastpack.utils.tensors import map_tensors, send

_OTHER_IDS = (
    "input_ids changed after the prefixes in packed_seq_lens were found: sequences that began alike now differ. Leave "
    "input_ids as the collator made them, or make packed_seq_lens anew from lengths."
)


@dataclass(frozen=True)
class Prefixes:
    """The prefixes that sequences share, as the host knows them.

    Attributes:
        order: indices of the sequences, sorted so that sequences that begin alike are neighbours.
        shared: for each sequence in this order, the number of leading tokens that it shares with the one before it; 0
            for the first.
    """

    order: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def saved(self) -> int:
        """T - U, the number of tokens that need not be computed."""
        return sum(self.shared)

    def copies(self, lengths: Sequence[int], device: torch.device) -> Copies:
        """Return which token is a copy of which other token, for sequences of these lengths.

        The tensors are made on the host and sent to the device.
        """
        starts = list(accumulate(lengths, initial=0))
        own = torch.arange(starts[-1])
        kept = own.clone()  # [T]: the token that is kept in place of each token
        for (before, here), count in zip(pairwise(self.order), self.shared[1:], strict=True):
            if count:
                kept[starts[here] : starts[here] + count] = kept[starts[before] : starts[before] + count]
        is_first = kept == own
        first = is_first.nonzero()[:, 0]
        source = (is_first.cumsum(0) - 1)[kept]
        return map_tensors(copies_of(source, first), lambda x: send(x, device))

    def tree(self, lengths: Sequence[int], device: torch.device) -> PrefixTree:
        """Return which of the kept tokens each of them sees, for sequences of these lengths."""
        return make_tree(self.order, self.shared, lengths, device)


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """The kept tokens of a batch with shared prefixes.

    Attributes:
        copies: the kept token, one of U, that each of the T tokens is a copy of.
        position_ids: int64 ``[1, U]``, the positions of the kept tokens.
        tree: which of the kept tokens each of them sees.
    """

    copies: Copies
    position_ids: Tensor
    tree: PrefixTree

    @property
    def total_tokens(self) -> int:
        """U, the number of kept tokens."""
        return self.position_ids.shape[1]

    @property
    def indices(self) -> Tensor:
        """The indices of the kept tokens, int64 ``[U]``: the first copies."""
        return self.copies.first

    def keep(self, x_1T: Tensor) -> Tensor:
        """Return the entries of the kept tokens, ``[1, T, ...]`` to ``[1, U, ...]``."""
        return first_copies(x_1T[0], self.copies)[None]

    def keep_ids(self, ids_1T: Tensor) -> Tensor:
        """Return the kept ids, int64 ``[1, U]``, after a check that all copies are equal.

        On CUDA the host does not wait: a failed check raises asynchronously, with one of the next kernels.

        Raises:
            PackingError: the prefixes were found in other ids.
        """
        ids_1U = ids_1T.index_select(1, self.copies.first)
        same = (ids_1U.index_select(1, self.copies.source) == ids_1T).all()
        if same.device.type == "cuda":
            torch._assert_async(same, _OTHER_IDS)
        elif not bool(same):
            raise PackingError(_OTHER_IDS)
        return ids_1U


def find_prefixes(lengths: Sequence[int], ids_T: Tensor, positions_T: Tensor | None = None) -> Prefixes:
    """Find the longest prefixes that sequences share: neighbours in lexicographic order have the most in common.

    This costs a sort of N strings, and log2(length) memory comparisons for each string.

    Args:
        lengths: the tokens of each sequence.
        ids_T: ``[T]`` on the host; they are compared as int32.
        positions_T: ``[T]`` on the host; shared tokens have equal positions too. None if positions restart at 0 in each
            sequence.
    """
    columns = [ids_T] if positions_T is None else [ids_T, positions_T]
    return common_prefixes(lengths, torch.stack([column.to(torch.int32) for column in columns], 1))


def common_prefixes(lengths: Sequence[int], keys: Tensor) -> Prefixes:
    """Find the longest prefixes that sequences share, as :func:`find_prefixes`, by integers of any kind.

    Args:
        lengths: the tokens of each sequence.
        keys: ``[T, ...]`` on the host; tokens are the same if all of their integers are.
    """
    data = keys.numpy().tobytes()
    size = keys[0].numel() * keys.element_size()
    offsets = list(accumulate(lengths, initial=0))
    # sorting by bytes puts equal beginnings side by side; a key always ends with a whole token
    rows = [data[size * start : size * end] for start, end in pairwise(offsets)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shared = [_common(rows[a], rows[b], size) for a, b in pairwise(order)]
    return Prefixes(tuple(order), (0, *shared))


def without_cut_blocks(
    prefixes: Prefixes, lengths: Sequence[int], first: Sequence[int], end: Sequence[int]
) -> Prefixes:
    """Return prefixes that end before a block of tokens that they would cut: its tokens see each other both ways.

    Args:
        prefixes: prefixes of tokens that are the same, and whose blocks begin alike.
        lengths: the tokens of each sequence.
        first: ``[T]``, the first token of each token's block (:class:`fastpack.packing.two_way.TwoWayBlocks`).
        end: ``[T]``, one past the last token of each token's block.
    """
    starts = list(accumulate(lengths, initial=0))
    shared = [0]
    for (before, here), count in zip(pairwise(prefixes.order), prefixes.shared[1:], strict=True):
        last = starts[before] + count - 1
        cut = count and (end[last] > last + 1 or end[starts[here] + count - 1] > starts[here] + count)
        shared.append(first[last] - starts[before] if cut else count)
    return Prefixes(prefixes.order, tuple(shared))


def _common(one: bytes, other: bytes, size: int) -> int:
    """Return the number of leading tokens, of ``size`` bytes each, that two byte strings share."""
    least, most = 0, min(len(one), len(other)) // size
    while least < most:
        middle = (least + most + 1) // 2
        if one[least * size : middle * size] == other[least * size : middle * size]:
            least = middle
        else:
            most = middle - 1
    return least
