"""Parts of the kernels of packed attention, forward and backward: where tiles lie, loads, stores, scores, masks.

Shape suffixes as in :mod:`fastpack.ops.kernels.attention`.
"""

import triton
import triton.language as tl


@triton.jit
def locate(cu_seqlens, slot, sequences, BLOCK: tl.constexpr):
    """Return the index, the first token and the end of a slot's sequence, and which of its tiles of ``BLOCK`` tokens.

    If the tile is past the sequence's last tile, the slot is empty.
    """
    CHUNK: tl.constexpr = 256
    started = 0
    for at in range(0, sequences, CHUNK):
        index = at + tl.arange(0, CHUNK)
        exists = index < sequences
        begin = tl.load(cu_seqlens + index, mask=exists, other=0)
        started += tl.sum((exists & (begin // BLOCK + index <= slot)).to(tl.int32), 0)
    sequence = started - 1
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    return sequence, begin, end, slot - (begin // BLOCK + sequence)


@triton.jit
def rows_of(first, end, part, ROWS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr):
    """Return each row's token and head within the group, ``[ROWS]``, for the tile at ``first``; and a mask."""
    row = tl.arange(0, ROWS)
    token = first + row // PART
    head = part * PART + row % PART
    valid = token < end
    if ROWS % PART != 0:
        valid = valid & (row < ROWS // PART * PART)
    if GROUP % PART != 0:
        valid = valid & (head < GROUP)
    return token, head, valid


@triton.jit
def load_rows(
    pointer, first, end, part, token_stride, head_stride,
    ROWS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load ``[ROWS, BLOCK]`` of the group whose first head is at ``pointer``; missing rows and columns are zeros."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    _, _, valid = rows_of(first, end, part, ROWS, GROUP, PART)
    start = pointer + tl.cast(first, tl.int64) * token_stride + tl.cast(part * PART, tl.int64) * head_stride
    offset = row // PART * token_stride + row % PART * head_stride
    mask = valid[:, None]
    if SIZE < BLOCK:
        mask = mask & (column < SIZE)[None, :]
    return tl.load(start + offset[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def per_row(pointer, first, part, HEADS: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr):
    """Return pointers ``[ROWS]`` into a contiguous ``[T, HEADS]``; ``pointer`` is at the group's first head."""
    row = tl.arange(0, ROWS)
    start = pointer + tl.cast(first, tl.int64) * HEADS + part * PART
    return start + (row // PART * HEADS + row % PART)


@triton.jit
def store_rows(
    pointer, value, first, end, part,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``[ROWS, BLOCK]`` into a contiguous ``[T, HEADS, SIZE]``, in the places that :func:`load_rows` reads."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    _, _, valid = rows_of(first, end, part, ROWS, GROUP, PART)
    start = pointer + tl.cast(first, tl.int64) * (HEADS * SIZE) + part * (PART * SIZE)
    offset = row // PART * (HEADS * SIZE) + row % PART * SIZE
    mask = valid[:, None]
    if SIZE < BLOCK:
        mask = mask & (column < SIZE)[None, :]
    tl.store(start + offset[:, None] + column[None, :], value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_keys(
    pointer, first, end, stride, KEYS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Load ``[KEYS, BLOCK]`` of one head from token ``first`` on; with MASKED, tokens from ``end`` on are zeros."""
    key = tl.arange(0, KEYS)
    column = tl.arange(0, BLOCK)
    pointers = pointer + tl.cast(first, tl.int64) * stride + key[:, None] * stride + column[None, :]
    if MASKED:
        mask = (first + key < end)[:, None]
        if SIZE < BLOCK:
            mask = mask & (column < SIZE)[None, :]
        loaded = tl.load(pointers, mask=mask, other=0.0)
    elif SIZE < BLOCK:
        loaded = tl.load(pointers, mask=(column < SIZE)[None, :], other=0.0)
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def bounded(score, inner, CAPPED: tl.constexpr):
    """Return the tanh of a softcap, or the product of q and k unchanged; times ``outer`` it is a score of base 2."""
    if CAPPED:
        score = 1.0 - 2.0 / (1.0 + tl.exp2(score * inner))
    return score


@triton.jit
def visible(token, key, window, index, first, end, WINDOWED: tl.constexpr):
    """Return whether a token sees a key of its sequence, both of which count from the same token.

    If ``first`` is None, attention is causal. Else the range ``[first, end)`` of one of them must hold the ``index`` of
    the other.
    """
    if first is None:
        sees = key <= token
        if WINDOWED:
            sees = sees & (token - key < window)
    else:
        sees = (index >= first) & (index < end)
    return sees


@triton.jit
def ranges_of(FIRST, END, index, valid):
    """Return where the ranges of tokens begin and end, ``[tokens, 1]``; those of tokens that aren't valid hold all."""
    first = tl.load(FIRST + index, mask=valid, other=0)
    end = tl.load(END + index, mask=valid, other=2147483647)
    return first[:, None], end[:, None]


@triton.jit
def load_edge(EDGES, edge):
    """Load the five numbers of a :class:`fastpack.packing.prefix_tree.Edge`."""
    row = EDGES + edge * 5
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
