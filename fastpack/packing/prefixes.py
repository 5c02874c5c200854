"""Tokens that sequences of a batch have in common at their beginnings: found, and kept once.

Where attention alone mixes tokens, a token's hidden states depend on nothing but its position and the tokens before it.
So sequences that begin alike (a prompt with its chosen and rejected completions, a group of completions, a system
prompt before everything) are a trie, and its nodes are all that has to be computed: norms, projections and MLPs run on
each node once. Attention alone gets every sequence whole (:func:`fastpack.attention_dispatch.attend`).

Shape suffixes: T tokens of all sequences, N sequences, U tokens that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fastpack.errors import PackingError
from fastpack.ops.shared_rows import Copies
from fastpack.utils.tensors import map_tensors, send

_OTHER_IDS = (
    "input_ids are not those that the prefixes in packed_seq_lens were found in: sequences begin differently that are "
    "said to begin alike. Leave input_ids as the collator made them, or make packed_seq_lens anew from lengths."
)


@dataclass(frozen=True)
class Prefixes:
    """What sequences have in common at their beginnings, as the host knows it.

    Attributes:
        order: numbers of the sequences, sorted so that those that begin alike are neighbours.
        shared: how many tokens each, in this order, begins with that the one before it begins with; the first 0.
    """

    order: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def saved(self) -> int:
        """T - U: tokens that need not be computed."""
        return sum(self.shared)

    def copies(self, lengths: Sequence[int], device: torch.device) -> Copies:
        """Make the copies that the tokens of sequences of these lengths are, on the host, and send them."""
        starts = list(accumulate(lengths, initial=0))
        own = torch.arange(starts[-1])
        kept = own.clone()  # [T]: the token that is kept of each
        for (before, here), count in zip(pairwise(self.order), self.shared[1:], strict=True):
            if count:
                kept[starts[here] : starts[here] + count] = kept[starts[before] : starts[before] + count]
        is_first = kept == own
        first = is_first.nonzero()[:, 0]
        source = (is_first.cumsum(0) - 1)[kept]
        times = source.bincount(minlength=len(first))
        members = source.argsort(stable=True)
        begins = times.cumsum(0) - times
        by_count = [(times == count).nonzero()[:, 0] for count in times.unique().tolist() if count > 1]
        several = [(rows, members[begins[rows][:, None] + torch.arange(int(times[rows[0]]))]) for rows in by_count]
        return map_tensors(Copies(source, first, tuple(several)), lambda x: send(x, device))


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """A batch of which each token of a trie is kept once.

    Attributes:
        copies: which of its T tokens are copies of which of the U that are kept.
        position_ids: int64 ``[1, U]``.
    """

    copies: Copies
    position_ids: Tensor

    @property
    def total_tokens(self) -> int:
        """U."""
        return self.position_ids.shape[1]

    def keep_ids(self, ids_1T: Tensor) -> Tensor:
        """``[1, T]`` ids to ``[1, U]``, after a check that copies are copies.

        It waits for the device nowhere on CUDA, where a failed check raises with the kernels that follow it.

        Raises:
            PackingError: these are not the ids that the prefixes were found in.
        """
        ids_1U = ids_1T.index_select(1, self.copies.first)
        same = (ids_1U.index_select(1, self.copies.source) == ids_1T).all()
        if same.device.type == "cuda":
            torch._assert_async(same, _OTHER_IDS)
        elif not bool(same):
            raise PackingError(_OTHER_IDS)
        return ids_1U


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
