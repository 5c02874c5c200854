"""Packed causal attention, forward, for short sequences: kernels of :mod:`fastpack.backends.triton_packed`.

Shape suffixes: T tokens of all sequences, N sequences, H query heads, K key/value heads, D head size, V value size.

A program takes a few tokens of one sequence, with the group of all query heads that share a key/value head. Its rows
are tokens times heads. So keys and values are read once for the whole group, and a tile on the diagonal is a few tokens
wide, not 128. If the size of a group is no power of two, the last rows of a tile are unused (64 rows hold 9 tokens of 7
heads).

Only the device knows where sequences begin. Tile j of sequence i is in slot ``offset_i // tokens + i + j``, with
``tokens`` the tokens of a tile; there are ``T // tokens + N`` slots. A program finds the sequence of its slot by
counting the sequences whose first slot is not after it; the index is this count minus one. Slots after a sequence's
last tile are empty. So a launch depends on T and N alone, and can be recorded.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867; Dao, "FlashAttention-2",
arXiv:2307.08691 (one division at the end, log-sum-exp saved for the backward). Exponentials and logarithms have base 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack.ops.kernels.attention_parts import (
    bounded,
    load_edge,
    load_keys,
    load_rows,
    locate,
    per_row,
    ranges_of,
    rows_of,
    store_rows,
    visible,
)
from fastpack.ops.kernels.launch import early, on_device, rows_that_count, stages_that_fit, wait_for_inputs

LOG2E = math.log2(math.e)
MAX_PART = 16  # the most heads of a group that a program takes at once
MAX_TILE = 256  # no tile has more rows or keys

Ranges = Sequence[Tensor | None]
"""The begin and the end of each token's range, int32 ``[T]``, neither of which falls from one token to the next; or
Nones."""
CAUSAL: Ranges = (None, None)
Tree = Sequence[Tensor | None]
"""The edges of a tree's segments, and where those of each begin (:class:`fastpack.packing.prefix_tree.Edges`); or
Nones."""
NO_TREE: Tree = (None, None)


@dataclass(frozen=True)
class AttentionTile:
    """The tile sizes and compiler options of a kernel.

    Attributes:
        rows: tokens times query heads of a program (of a step, in the kernel that walks over queries).
        keys: tokens of a step (of a program, in the kernel that walks over queries).
        warps, stages: Triton's.
        split: whether a loop of its own, without masks, handles the tiles that every row sees in full. With a window
            there is only one loop.
        registers: the most registers that a thread may use; None leaves this to the compiler, which tends to take all.
        sharing: the largest number of programs for each multiprocessor up to which several programs share a long walk;
            0 to share none.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    split: bool = False
    registers: int | None = None
    sharing: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of a launch."""
        names = ("ROWS", "KEYS", "SPLIT", "num_warps", "num_stages", "maxnreg")
        values = (self.rows, self.keys, self.split, self.warps, self.stages, self.registers)
        return dict(zip(names, values, strict=True))


FORWARD: dict[int, AttentionTile] = {
    # by the larger of head and value size, rounded up to a power of two
    64: AttentionTile(rows=64, keys=64, warps=4, stages=2, split=True),
    128: AttentionTile(rows=64, keys=32, warps=4, stages=2, split=True, registers=128),
    256: AttentionTile(rows=64, keys=32, warps=8, stages=2),
}
FLOAT32: dict[int, AttentionTile] = {
    # for every kernel: float32 doesn't use matrix units, so it matters most that no register is spilled
    64: AttentionTile(rows=32, keys=32, warps=8, stages=1),
    128: AttentionTile(rows=16, keys=32, warps=8, stages=1),
    256: AttentionTile(rows=16, keys=16, warps=8, stages=1),
}


# --- the kernel -------------------------------------------------------------------------------------------------------


@triton.jit
def _walk(
    q, result, largest, total, token, first_key, end_key, K, V, low, high, end, shift, k_token, v_token,
    window, inner, outer,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Update the weighted values, the largest score and the sum of weights with the keys from ``low`` to ``high``.

    If ``shift`` is not None, these keys are those of an edge (:class:`fastpack.packing.prefix_tree.Edge`).
    """
    for first in tl.range(low, high, KEYS):
        k = load_keys(K, first, end, k_token, KEYS, D, BLOCK_D, MASKED)
        score = bounded(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, CAPPED)
        if MASKED:
            key = first + tl.arange(0, KEYS)
            place = key
            if shift is not None:
                place = key - shift
            sees = visible(token[:, None], place[None, :], window, key[None, :], first_key, end_key, WINDOWED)
            if shift is not None:
                sees = sees & (key < end)[None, :]
            score = tl.where(sees, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1) * outer)  # outer is positive
        shrink = tl.exp2(largest - larger)
        weight = tl.exp2(score * outer - larger[:, None])
        total = total * shrink + tl.sum(weight, 1)
        v = load_keys(V, first, end, v_token, KEYS, VALUES, BLOCK_V, MASKED)
        result = tl.dot(weight.to(v.dtype), v, result * shrink[:, None], input_precision="ieee")
        largest = larger
    return result, largest, total


@triton.jit(do_not_specialize=["sequences", "window"])
def forward_kernel(
    Q, K, V, SINKS, OUT, LSE, FIRST_KEY, END_KEY, PATHS, OF_SEGMENT, cu_seqlens, count, sequences, window, inner, outer,
    q_token, q_head, k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write OUT, and LSE ``[T, H]`` of base 2.

    Grid: slots times key/value heads times parts of a group. Neighbouring programs take different heads of one slot.

    If FIRST_KEY is not None, each token sees the keys from FIRST_KEY to END_KEY ``[T]``, which never fall.

    If PATHS is not None, the sequences are the segments of a tree, and each sees the keys of its edges in PATHS, too,
    which begin at OF_SEGMENT ``[N + 1]``.
    """
    wait_for_inputs(EARLY)
    BLOCK_T: tl.constexpr = ROWS // PART
    slot = tl.program_id(0) // (KV_HEADS * PARTS)
    kv_head = tl.program_id(0) // PARTS % KV_HEADS
    part = tl.program_id(0) % PARTS
    sequence, begin, end, tile = locate(cu_seqlens, slot, sequences, BLOCK_T)
    tiles = tl.cdiv(end - begin, BLOCK_T)
    if tile >= tiles:
        return
    first = begin + (tiles - 1 - tile) * BLOCK_T  # a sequence's last tile sees most keys: it starts first
    token, head, valid = rows_of(first, end, part, ROWS, GROUP, PART)
    lse_rows = per_row(LSE + kv_head * GROUP, first, part, KV_HEADS * GROUP, ROWS, PART)
    result = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
    OUT += kv_head * (GROUP * VALUES)
    if begin >= rows_that_count(count, end):
        tl.store(lse_rows, tl.full((ROWS,), 1.0e30, dtype=tl.float32), mask=valid)  # the weight of sinks becomes 0
        store_rows(OUT, result, first, end, part, KV_HEADS * GROUP, ROWS, GROUP, PART, VALUES, BLOCK_V)
        return

    q = load_rows(
        Q + kv_head.to(tl.int64) * GROUP * q_head, first, end, part, q_token, q_head, ROWS, GROUP, PART, D, BLOCK_D
    )
    K += kv_head.to(tl.int64) * k_head
    V += kv_head.to(tl.int64) * v_head
    # finite, so that a row that sees no key of its first tile subtracts no infinities
    largest = tl.full((ROWS,), -1.0e30, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    if SINKS is not None:
        sink = tl.load(SINKS + kv_head * GROUP + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
        total = tl.exp2(sink - largest)

    # fmt: off
    if PATHS is not None:
        for edge in range(tl.load(OF_SEGMENT + sequence), tl.load(OF_SEGMENT + sequence + 1)):
            low, high, _, _, shift = load_edge(PATHS, edge)
            if WINDOWED:
                low = tl.maximum(low, first - window + 1 + shift)
            if SPLIT and not WINDOWED:
                full = low + (high - low) // KEYS * KEYS
                result, largest, total = _walk(
                    q, result, largest, total, token, None, None, K, V, low, full, high, shift,
                    k_token, v_token, window, inner, outer,
                    D, VALUES, BLOCK_D, BLOCK_V, KEYS, False, WINDOWED, CAPPED,
                )
                low = full
            result, largest, total = _walk(
                q, result, largest, total, token, None, None, K, V, low, high, high, shift,
                k_token, v_token, window, inner, outer,
                D, VALUES, BLOCK_D, BLOCK_V, KEYS, True, WINDOWED, CAPPED,
            )
    # fmt: on
    low = begin
    if WINDOWED:
        low = tl.maximum(begin, first - window + 1)
    high = tl.minimum(first + BLOCK_T, end)
    first_key, end_key = None, None
    if FIRST_KEY is not None:
        first_key, end_key = ranges_of(FIRST_KEY, END_KEY, token, valid)
        low, high = tl.load(FIRST_KEY + first), tl.load(END_KEY + high - 1)
    # fmt: off
    if SPLIT and not WINDOWED:
        seen_by_all = first + 1  # one past the last key that every row sees
        if FIRST_KEY is not None:
            seen_by_all = tl.load(END_KEY + first)
        full = low + (seen_by_all - low) // KEYS * KEYS
        result, largest, total = _walk(
            q, result, largest, total, token, first_key, end_key, K, V, low, full, high, None,
            k_token, v_token, window, inner, outer,
            D, VALUES, BLOCK_D, BLOCK_V, KEYS, False, WINDOWED, CAPPED,
        )
        low = full
    result, largest, total = _walk(
        q, result, largest, total, token, first_key, end_key, K, V, low, high, high, None,
        k_token, v_token, window, inner, outer,
        D, VALUES, BLOCK_D, BLOCK_V, KEYS, True, WINDOWED, CAPPED,
    )
    # fmt: on
    lse = largest + tl.log2(total)
    tl.store(lse_rows, lse, mask=valid)
    result /= total[:, None]
    store_rows(OUT, result, first, end, part, KV_HEADS * GROUP, ROWS, GROUP, PART, VALUES, BLOCK_V)


# --- launcher ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """The steps from the product of a query and a key to a score: scale, softcap, window.

    Attributes:
        scale: multiplies the product; positive.
        window: how many tokens a query sees, itself included, or None.
        softcap: c in ``c * tanh(score / c)``, or None.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    @property
    def arguments(self) -> tuple[int, float, float]:
        """The kernels' ``window``, ``inner`` and ``outer``.

        Scores of base 2 are ``outer`` times the result of :func:`bounded` with ``inner``; tanh(x) is
        ``1 - 2 / (1 + 2 ** (2 x log2(e)))``.
        """
        if self.softcap is None:
            return self.window or 0, 0.0, self.scale * LOG2E
        return self.window or 0, 2 * LOG2E * self.scale / self.softcap, self.softcap * LOG2E

    @property
    def flags(self) -> dict[str, bool]:
        """The kernels' constants that turn window and softcap on."""
        return {"WINDOWED": self.window is not None, "CAPPED": self.softcap is not None}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    scores: Scores,
    dtype: torch.dtype | None = None,
    rows: Tensor | None = None,
    seen_keys: Ranges = CAUSAL,
    paths: Tree = NO_TREE,
) -> tuple[Tensor, Tensor]:
    """Return the attention of each token over its own sequence.

    Args:
        q: ``[T, H, D]``, in the same dtype as k and v. The last dimension of all three has stride 1.
        k: ``[T, K, D]``.
        v: ``[T, K, V]``.
        sinks: ``[H]`` or None.
        cu_seqlens: int32 ``[N + 1]``, from 0 to T, never decreasing.
        scores: the steps from products to scores.
        dtype: the dtype of the result, or None for q's dtype.
        rows: int32 ``[1]``, or None: the results of sequences that begin at this row or later are zeros.
        seen_keys: the first key that each token sees, and one past the last.
        paths: the edges from each segment's queries to their keys, if ``cu_seqlens`` are those of a tree's segments.

    Returns:
        ``[T, H, V]``, and the log-sum-exp of base 2, float32 ``[T, H]``, sinks included.
    """
    tokens, heads, _ = q.shape
    out = torch.empty(tokens, heads, v.shape[2], dtype=dtype or q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    tile = chosen(FORWARD, q, v, streams_keys=True)
    part, parts = parts_of(heads // k.shape[1])
    with on_device(q):
        forward_kernel[(slots(cu_seqlens, tokens, tile.rows // part) * k.shape[1] * parts,)](
            q, k, v, sinks, out, lse, *seen_keys, *paths, cu_seqlens, rows, cu_seqlens.numel() - 1, *scores.arguments,
            *strides(q, k, v),
            **sizes(q, k, v), **scores.flags, **tile.arguments, **early(q),
        )  # fmt: skip
    return out, lse


def readable(x: Tensor) -> Tensor:
    """Return ``x [T, heads, size]``, or a copy if the kernels can't read it.

    They can't if its last dimension has a stride other than 1, or if a tile of it spans more than 2^31 elements.
    """
    furthest = max(x.stride(0), x.stride(1)) * MAX_TILE
    return x if x.stride(2) == 1 and furthest < 2**31 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of tokens and of heads."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def slots(cu_seqlens: Tensor, tokens: int, block: int) -> int:
    """Return the largest possible number of tiles of ``block`` tokens, for any lengths; see ``locate``."""
    return tokens // block + cu_seqlens.numel() - 1


def parts_of(group: int) -> tuple[int, int]:
    """Return how many heads of a group a program takes at once, and how many such parts a group has."""
    parts = triton.cdiv(group, MAX_PART)
    return triton.cdiv(group, parts), parts


def sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the constants of the kernels that follow from the shapes."""
    return _sizes(q.shape[1] // k.shape[1], k.shape[1], q.shape[2], v.shape[2])


@functools.cache
def _sizes(group: int, kv_heads: int, head_dim: int, values: int) -> dict[str, int]:
    names = ("KV_HEADS", "GROUP", "PART", "PARTS", "D", "VALUES", "BLOCK_D", "BLOCK_V")
    values_of_names = (kv_heads, group, *parts_of(group), head_dim, values, _block(head_dim), _block(values))
    return dict(zip(names, values_of_names, strict=True))


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # the smallest size that matrix units take


def chosen(table: dict[int, AttentionTile], q: Tensor, v: Tensor, *, streams_keys: bool) -> AttentionTile:
    """Return the tile for these sizes, with as many stages as fit into this device's shared memory.

    Args:
        table: the kernel's tiles for half precision.
        q: the queries.
        v: the values.
        streams_keys: True if the kernel holds rows and walks over keys, False for the reverse.
    """
    blocks = _block(q.shape[2]), _block(v.shape[2])
    tile = (FLOAT32 if q.dtype == torch.float32 else table)[max(64, *blocks)]
    resident, streamed = (tile.rows, tile.keys) if streams_keys else (tile.keys, tile.rows)
    width = sum(blocks) * q.element_size()
    return replace(tile, stages=max(1, stages_that_fit(q.device, tile.stages, resident * width, streamed * width)))
