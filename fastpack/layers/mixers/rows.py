"""Sequences as rows of a batch: from ``[1, T, ...]`` to ``[n, L, ...]`` and back.

Shape suffixes: T tokens, n rows, L length of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastpack.errors import PatchError
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.tensors import send

RATIO = 0.75
"""The least length of a row, as a share of the longest row in its group, if rows may be padded."""
FULL = 8192
"""On a GPU, the slots that a group must have before another begins: a smaller group takes less time than its launch."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some sequences of a batch, one per row, padded on the right with copies of their last tokens.

    Padding must not be zeros, since some norms would divide by zero. Other values make no difference: the results of
    padding are dropped, so its gradient is zero.

    Attributes:
        tokens: int64 ``[n, L]``: the token in each slot, as an index into T.
        slots: int64: the real tokens' slots in ``[n * L]``, row after row. None if every slot holds a real token;
            empty if the results of all slots are dropped.
    """

    tokens: Tensor
    slots: Tensor | None

    @property
    def count(self) -> int:
        """The number of rows, n."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """The length of the rows, L."""
        return self.tokens.shape[1]


@dataclass(frozen=True, eq=False)
class RowGroups:
    """All sequences of a batch, in groups of similar lengths.

    Attributes:
        groups: the groups, longest first.
        order: int64 ``[T]``: each token's index in the groups' concatenated results; None if they are in order.
    """

    groups: tuple[Rows, ...]
    order: Tensor | None

    def gather(self, results: Sequence[Tensor]) -> Tensor:
        """Return ``[T, ...]`` from the groups' results, ``[n * L, ...]`` each."""
        real = [
            x if rows.slots is None else x.index_select(0, rows.slots)
            for x, rows in zip(results, self.groups, strict=True)
        ]
        joined = real[0] if len(real) == 1 else torch.cat(real)
        return joined if self.order is None else joined.index_select(0, self.order)


def row_groups(packed: PackedSeqLens, *, equal: bool, among: Sequence[dist.ProcessGroup] = ()) -> RowGroups:
    """Return the row groups of a batch, which are made once per batch.

    Args:
        packed: the lengths of the sequences.
        equal: whether rows of a group must be equally long, so that nothing is padded.
        among: process groups whose members must run the same number of row groups, as each run exchanges weights.
            Processes with fewer row groups run one of their rows again, and drop the result.
    """
    groups = packed.memo(("rows", equal), lambda: _make_groups(packed, equal))
    if among:
        groups = packed.memo(("rows", equal, "agreed"), lambda: _as_many(groups, among))
    return groups


def _as_many(groups: RowGroups, among: Sequence[dist.ProcessGroup]) -> RowGroups:
    last = groups.groups[-1]
    most = torch.tensor(len(groups.groups), device=last.tokens.device)
    for processes in among:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=processes)
    again = Rows(last.tokens[:1], torch.empty(0, dtype=torch.int64, device=last.tokens.device))
    return replace(groups, groups=(*groups.groups, *[again] * (int(most) - len(groups.groups))))


def _make_groups(packed: PackedSeqLens, equal: bool) -> RowGroups:
    device = packed.cu_seqlens.device
    starts = list(accumulate(packed.lengths, initial=0))
    groups: list[Rows] = []
    placed: list[Tensor] = []
    least = 0 if equal or device.type == "cpu" else FULL
    for members in similar(packed.lengths, 1.0 if equal else RATIO, least):
        lengths = torch.tensor([packed.lengths[i] for i in members])
        first = torch.tensor([starts[i] for i in members])
        longest = int(lengths.max())
        at = torch.arange(longest)
        tokens = first[:, None] + torch.minimum(at, lengths[:, None] - 1)
        real = at < lengths[:, None]
        slots = None if bool(real.all()) else real.flatten().nonzero()[:, 0]
        groups.append(Rows(send(tokens, device), None if slots is None else send(slots, device)))
        placed.append(tokens[real])
    where = torch.cat(placed)
    in_order = torch.equal(where, torch.arange(len(where)))
    return RowGroups(tuple(groups), None if in_order else send(where.argsort(), device))


def similar(lengths: Sequence[int], ratio: float, least: int) -> Iterator[list[int]]:
    """Yield groups of indices of sequences with similar lengths, the longest group first; each group is in order.

    Args:
        lengths: the lengths of the sequences.
        ratio: the least length of a sequence, as a share of the longest in its group.
        least: the least number of slots in a group, whatever the ratio; the last group may have fewer.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    group: list[int] = []
    for i in order:
        longest = lengths[group[0]] if group else 0
        if lengths[i] < ratio * longest and len(group) * longest >= least:
            yield sorted(group)
            group = []
        group.append(i)
    yield sorted(group)


def repad(x: object, rows: Rows, total: int) -> Any:
    """Re-pad an argument: bring each tensor with a dimension of T tokens, in any nesting, to the shape of the rows.

    ``[1, T, ...]`` becomes ``[n, L, ...]``; ``[1, heads, T, ...]`` becomes ``[n, heads, L, ...]``; positions
    ``[axes, 1, T]`` become ``[axes, n, L]``; positions ``[T]`` become ``[L]``, counted from 0; a size that begins with
    1 and T begins with n and L. Anything else is returned unchanged.
    """
    if isinstance(x, torch.Size) and x[:2] == (1, total):
        return torch.Size((*rows.tokens.shape, *x[2:]))
    if isinstance(x, tuple | list):
        return type(x)(repad(item, rows, total) for item in x)
    if isinstance(x, dict):
        return {key: repad(item, rows, total) for key, item in x.items()}
    if not isinstance(x, Tensor):
        return x
    if x.ndim >= 2 and x.shape[0] == 1 and x.shape[1] == total:
        return x[0][rows.tokens]
    if x.ndim >= 3 and x.shape[0] == 1 and x.shape[2] == total:
        return x[0].transpose(0, 1)[rows.tokens].transpose(1, 2)
    if x.ndim == 3 and x.shape[1] == 1 and x.shape[2] == total:
        return x[:, 0][:, rows.tokens]
    if x.ndim == 1 and x.shape[0] == total and not x.is_floating_point():
        return torch.arange(rows.length, device=x.device, dtype=x.dtype)
    return x


def _are_weights(results: Sequence[Tensor], shapes: Sequence[tuple[int, int]]) -> bool:
    """Return whether results are attention weights, ``[n, heads, L, L]``, or with more keys (DeepSeek-V4's compressed).

    A group with as many heads as tokens is ambiguous. Another group then decides, or all results must be square.
    """
    pairs = list(zip(results, shapes, strict=True))
    if not all(x.ndim == 4 and x.shape[0] == n and x.shape[2] == s <= x.shape[3] for x, (n, s) in pairs):
        return False
    return any(x.shape[1] != s for x, (_, s) in pairs) or all(x.shape[3] == s for x, (_, s) in pairs)


def unpad(results: Sequence[Any], groups: RowGroups, what: str) -> Any:
    """Un-pad the groups' results, in any nesting, to one result ``[1, T, ...]`` (``[T, ...]`` if rows were flattened).

    Raises:
        PatchError: a tensor does not have the rows' shape, so it can't be put into one result of the batch.
    """
    first = results[0]
    if isinstance(first, tuple | list):
        return type(first)(unpad(items, groups, what) for items in zip(*results, strict=True))
    if isinstance(first, dict):  # a ModelOutput is a dict; a row's pooled output has no place in a packed batch
        joined = {
            key: None if key == "pooler_output" else unpad([result[key] for result in results], groups, what)
            for key in first
        }
        return joined if type(first) is dict else type(first)(**joined)
    if not isinstance(first, Tensor) or isinstance(first, nn.Parameter):
        return first
    shapes = [(rows.count, rows.length) for rows in groups.groups]
    if _are_weights(results, shapes):
        return None  # no caller needs them: callers that ask for attention weights are on the stock path
    if all(x.ndim >= 2 and x.shape[:2] == shape for x, shape in zip(results, shapes, strict=True)):
        return groups.gather([x.flatten(0, 1) for x in results])[None]
    if all(x.ndim >= 3 and x.shape[:2] == (1, length) for x, (_, length) in zip(results, shapes, strict=True)):
        # one result for all rows, as for values that depend only on positions
        return groups.gather(
            [x.expand(n, *x.shape[1:]).flatten(0, 1) for x, (n, _) in zip(results, shapes, strict=True)]
        )[None]
    if all(x.ndim >= 1 and x.shape[0] == n * length for x, (n, length) in zip(results, shapes, strict=True)):
        return groups.gather(results)
    if all(x.ndim >= 1 and x.shape[0] == length for x, (_, length) in zip(results, shapes, strict=True)):
        return groups.gather([x.expand(n, *x.shape).flatten(0, 1) for x, (n, _) in zip(results, shapes, strict=True)])
    raise PatchError(
        f"{what} returned a tensor of shape {tuple(first.shape)} for rows of {shapes[0]} tokens, which can't be put "
        "back into a packed batch. fastpack.unpatch(model) restores the stock model; please report the family."
    )
