"""One attention call (:class:`AttentionCall`), and the facts from which a backend decides whether it can serve it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastpack.packing.pairs import count_pairs
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.packing.two_way import SeenRanges, TwoWay, seen_ranges

_REASONS = {"two_way": "is causal, and does not support image blocks, whose tokens see later ones"}
"""The reasons of backends that don't serve an attribute, where its name alone would not say enough."""


@dataclass(frozen=True)
class Visibility:
    """The keys that a query sees: a range of its own sequence, and earlier segments that several sequences share.

    The query at position p sees ``[start, p + 1)`` of its sequence. The range starts at the first token, or holds at
    most ``window`` tokens. In a block of an image, it ends with the block; no backend serves such blocks and segments
    together. Each backend names the attributes that it serves in ``SERVES``. A new attribute (for a range that begins
    on another rank) is refused by each backend that does not name it.

    Attributes:
        window: how many tokens a query sees up to itself; None for all tokens before it.
        two_way: how the layer uses the batch's blocks (:class:`fastpack.packing.two_way.TwoWayBlocks`); None if the
            batch has none, or the layer ignores them.
        segments: True if sequences have a common beginning whose tokens are stored once, in segments before
            the tokens that differ (:class:`fastpack.packing.prefixes.SharedTokens`).
    """

    window: int | None = None
    segments: bool = False
    two_way: TwoWay | None = None

    def rejects(self, serves: Collection[str]) -> str | None:
        """Return why a backend that serves only these attributes can't compute this visibility, or None."""
        for part in type(self).__dataclass_fields__.values():  # fields() would filter them anew in each layer
            if part.name not in serves and getattr(self, part.name) != part.default:
                return _REASONS.get(part.name, f"does not support {part.name}")
        if self.segments and self.two_way is not None:
            return "does not support image blocks in sequences that share segments"
        return None


@dataclass(frozen=True)
class AttentionShape:
    """The facts from which a backend decides whether it can serve a call. No tensor is needed to make them.

    Attributes:
        device: the device of the tensors.
        dtype: the dtype of q, k and v.
        num_heads, num_kv_heads: H and K; H is a multiple of K.
        head_dim: the size of a query and of a key.
        value_dim: the size of a value.
        visibility: the keys that a query sees.
        softcap: c in ``c * tanh(score / c)``; None for no softcap.
        sinks: True if each head has a learned score that takes part in the softmax and carries no value.
        dropout: probability that an attention weight is dropped.
        total_tokens, num_sequences, max_seqlen: T, N and the longest length; 0 if not yet known.
        needs_grad: True if a backward pass may follow.
        knows_lengths: as in :class:`fastpack.packing.seqlens.PackedSeqLens`.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    visibility: Visibility
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    total_tokens: int = 0
    num_sequences: int = 0
    max_seqlen: int = 0
    needs_grad: bool = True
    knows_lengths: bool = True

    @property
    def typical_length(self) -> float:
        """The length of a token's sequence, averaged over tokens; estimated from the longest and the mean length."""
        tokens, longest = self.total_tokens, self.max_seqlen
        if not tokens:
            return 0.0
        return (longest**2 + (tokens - longest) * (tokens / max(self.num_sequences, 1))) / tokens

    def describe(self) -> str:
        """Return one line for an error message."""
        parts = [
            f"{str(self.dtype).removeprefix('torch.')} on {self.device.type}",
            f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}",
        ]
        if self.visibility.window is not None:
            parts.append(f"window {self.visibility.window}")
        if self.visibility.segments:
            parts.append("earlier segments")
        if self.visibility.two_way:
            parts.append("image blocks")
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        if self.sinks:
            parts.append("sinks")
        if self.dropout:
            parts.append(f"dropout {self.dropout:g}")
        return ", ".join(parts)


class Run(NamedTuple):
    """A run of neighbouring sequences of one length: ``n`` sequences of L tokens.

    Attributes:
        q, k, v: ``[n, L, heads, dim]``, views of the call's tensors.
        begin: the index of its first token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    begin: int


class AttentionStore(Protocol):
    """A store for what attention computes, between a checkpointed forward and the recomputation before its backward."""

    def save_attention(self, tensors: Sequence[Tensor], operations: int) -> None:
        """Store tensors, which must not change before they are loaded, and which took so many operations."""

    def load_attention(self) -> list[Tensor] | None:
        """Return the stored tensors, or None if they must be computed."""


Kept = tuple[AttentionStore, int] | None
"""A store and the operations that its tensors take, or None if nothing is stored."""


def stored_or_computed(kept: Kept, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Return the stored tensors; or compute tensors, and store them if there is a store."""
    stored = None if kept is None else kept[0].load_attention()
    if stored is None:
        stored = compute()
        if kept is not None:
            kept[0].save_attention(stored, kept[1])
    return stored


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One layer's packed attention: causal, but for blocks of tokens that see each other in both directions.

    It computes ``softmax(softcap(scale * q k^T) | sinks) v`` over the keys that :attr:`visibility` describes.

    Attributes:
        q: ``[T, H, D]``, contiguous in the last dimension, as k and v are.
        k: ``[T, K, D]``.
        v: ``[T, K, V]``.
        packed: where sequences begin and end. If sequences share tokens, q, k and v hold each shared token once; if
            ranks share the batch, this rank's tokens.
        scale: multiplies the scores.
        sinks: ``[H]`` or None.
        window: as in :class:`Visibility`.
        softcap, dropout: as in :class:`AttentionShape`.
        two_way: how this layer uses the batch's blocks, if it has any; None for a layer that is causal in any batch.
        store: a store that may keep the result until the recomputation, or None. A backend need not use it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    packed: PackedSeqLens
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    two_way: TwoWay | None = None
    store: AttentionStore | None = None

    def __post_init__(self) -> None:
        """Check the counts of tokens and the window."""
        tokens = (self.q.shape[0], self.k.shape[0], self.v.shape[0])
        packed = self.packed
        expected = packed.run_tokens
        if any(count != expected for count in tokens):
            raise ValueError(f"q, k and v have {tokens} tokens, packed_seq_lens has {expected}.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window counts the query itself, so it must be at least 1, not {self.window}.")

    @property
    def shape(self) -> AttentionShape:
        """The facts from which backends decide whether they can serve this call."""
        return AttentionShape(
            device=self.q.device,
            dtype=self.q.dtype,
            num_heads=self.q.shape[1],
            num_kv_heads=self.k.shape[1],
            head_dim=self.q.shape[2],
            value_dim=self.v.shape[2],
            visibility=self.visibility,
            softcap=self.softcap,
            sinks=self.sinks is not None,
            dropout=self.dropout,
            total_tokens=self.packed.total_tokens,
            num_sequences=self.packed.cu_seqlens.numel() - 1,  # in a bucket, empty sequences count too
            max_seqlen=self.packed.max_seqlen,
            knows_lengths=self.packed.knows_lengths,
            needs_grad=torch.is_grad_enabled()
            and any(t is not None and t.requires_grad for t in (self.q, self.k, self.v, self.sinks)),
        )

    @property
    def visibility(self) -> Visibility:
        """The keys that a query of this batch sees, without a window if no sequence is longer than the window."""
        window = None if self.window is None or self.window >= self.packed.max_seqlen else self.window
        two_way = None if self.packed.two_way is None else self.two_way
        return Visibility(window, segments=self.packed.shared is not None, two_way=two_way)

    @property
    def seen_ranges(self) -> SeenRanges | None:
        """The keys that each query sees, as numbers for each token; None if the call is causal.

        They are computed once for a batch, a window and a way to use the blocks.
        """
        window, two_way = self.visibility.window, self.visibility.two_way
        blocks, packed = self.packed.two_way, self.packed
        if blocks is None or two_way is None:
            return None
        return packed.memo(("seen", window, two_way), lambda: seen_ranges(packed, blocks, window, two_way))

    @property
    def operations(self) -> int:
        """The floating-point operations of a forward's two matmuls, on the keys that each query sees up to itself."""
        window, packed = self.visibility.window, self.packed
        pairs: int = packed.memo(("pairs", window), lambda: _pairs(packed, window))
        return 2 * pairs * self.q.shape[1] * (self.q.shape[2] + self.v.shape[2])

    @property
    def groups(self) -> int:
        """The number of query heads that share a key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    def with_qkv(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        """Return the same call on other tensors of the same shapes."""
        return replace(self, q=q, k=k, v=v)

    def runs(self) -> Iterator[Run]:
        """Yield each run of equally long neighbours.

        All runs are split at once: the backward of a split is one concatenation, while the backward of each slice
        would be a zero-filled copy of the whole.
        """
        runs = self.packed.runs
        sizes = [count * length for count, length in runs]
        pieces = zip(*(t.split(sizes) if len(sizes) > 1 else (t,) for t in (self.q, self.k, self.v)), strict=True)
        begin = 0
        for (q, k, v), (count, length) in zip(pieces, runs, strict=True):
            size = (count, length)
            yield Run(q.unflatten(0, size), k.unflatten(0, size), v.unflatten(0, size), begin)
            begin += count * length

    def block(self, run: Run, at: int, end: int) -> tuple[slice, Tensor]:
        """Return the keys that the queries at positions ``[at, end)`` of a run's sequences may see, and a mask.

        Args:
            run: one of :meth:`runs`.
            at: the position of the first of these queries.
            end: one past the last of them.

        Returns:
            The positions of the keys; and a mask over them, True where the query sees the key: bool
            ``[queries, keys]`` if it is the same for all sequences, else ``[n, queries, keys]``. With blocks, whose
            ends only the device knows, the keys run to the end of the sequences.
        """
        window, device = self.visibility.window, run.q.device
        ranges = self.seen_ranges
        cut_blocks = ranges is None or self.visibility.two_way == "in_window"
        first = max(0, at - window + 1) if window is not None and cut_blocks else 0
        if ranges is None:
            distance = torch.arange(at, end, device=device)[:, None] - torch.arange(first, end, device=device)
            seen = distance >= 0
            return slice(first, end), seen if window is None else seen & (distance < window)
        count, length = run.q.shape[:2]
        token = torch.arange(run.begin, run.begin + count * length, device=device).view(count, 1, length)
        first_key, end_key = (
            x[run.begin : run.begin + count * length].view(count, length, 1)[:, at:end]
            for x in (ranges.first_key, ranges.end_key)
        )
        key = token[..., first:]
        return slice(first, length), (key >= first_key) & (key < end_key)

    def expanded_kv(self) -> tuple[Tensor, Tensor]:
        """Return k and v with each head repeated for its query heads, ``[T, H, ...]``: for kernels without groups."""
        if self.groups == 1:
            return self.k, self.v
        return self.k.repeat_interleave(self.groups, 1), self.v.repeat_interleave(self.groups, 1)


def _pairs(packed: PackedSeqLens, window: int | None) -> int:
    """Return the number of pairs of a query and a key that it sees; of shared tokens without a window, each once."""
    if packed.shared is not None and window is None:
        return packed.shared.tree.pairs
    return count_pairs(packed.lengths, window)
