"""One attention call (:class:`AttentionCall`), and the facts from which a backend decides whether it can serve it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastpack.packing.seqlens import PackedSeqLens


@dataclass(frozen=True)
class Visibility:
    """The keys that a query sees: a range of its own sequence, and earlier segments that several sequences share.

    The query at position p sees ``[start, p + 1)`` of its sequence. The range starts at the first token, or holds at
    most ``window`` tokens. Each backend names the attributes that it serves in ``SERVES``. A new attribute (for a range
    that ends after the query, as in blocks of an image, or that begins on another rank) is refused by each backend that
    does not name it.

    Attributes:
        window: how many tokens a query sees, itself included; None for all tokens before it.
        segments: True if sequences have a common beginning whose tokens are stored once, in segments before
            the tokens that differ (:class:`fastpack.packing.prefixes.SharedTokens`).
    """

    window: int | None = None
    segments: bool = False

    def rejects(self, serves: Collection[str]) -> str | None:
        """Return why a backend that serves only these attributes can't compute this visibility, or None."""
        for part in type(self).__dataclass_fields__.values():  # fields() would filter them anew in each layer
            if part.name not in serves and getattr(self, part.name) != part.default:
                return f"does not support {part.name}"
        return None

    def block(self, at: int, end: int, device: torch.device) -> tuple[int, Tensor]:
        """Return the keys that the queries at positions ``[at, end)`` of a sequence see.

        Returns:
            The position of the first key that any of these queries sees; and a mask, bool ``[queries, keys]``, over
            the keys from that position to ``end``: True where the query sees the key.
        """
        first = 0 if self.window is None else max(0, at - self.window + 1)
        distance = torch.arange(at, end, device=device)[:, None] - torch.arange(first, end, device=device)
        seen = distance >= 0
        return first, seen if self.window is None else seen & (distance < self.window)


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
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        if self.sinks:
            parts.append("sinks")
        if self.dropout:
            parts.append(f"dropout {self.dropout:g}")
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One layer's packed causal attention.

    It computes ``softmax(softcap(scale * q k^T) | sinks) v`` over the keys that :attr:`visibility` describes.

    Attributes:
        q: ``[T, H, D]``, contiguous in the last dimension, as k and v are.
        k: ``[T, K, D]``.
        v: ``[T, K, V]``.
        packed: where sequences begin and end. If sequences share tokens, q, k and v hold each shared token once.
        scale: multiplies the scores.
        sinks: ``[H]`` or None.
        window: as in :class:`Visibility`.
        softcap, dropout: as in :class:`AttentionShape`.
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

    def __post_init__(self) -> None:
        """Check the counts of tokens and the window."""
        tokens = (self.q.shape[0], self.k.shape[0], self.v.shape[0])
        packed = self.packed
        expected = packed.total_tokens if packed.shared is None else packed.shared.total_tokens
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
            needs_grad=torch.is_grad_enabled()
            and any(t is not None and t.requires_grad for t in (self.q, self.k, self.v, self.sinks)),
        )

    @property
    def visibility(self) -> Visibility:
        """The keys that a query of this batch sees, without a window if no sequence is longer than the window."""
        window = None if self.window is None or self.window >= self.packed.max_seqlen else self.window
        return Visibility(window, segments=self.packed.shared is not None)

    @property
    def groups(self) -> int:
        """The number of query heads that share a key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    def with_qkv(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        """Return the same call on other tensors of the same shapes."""
        return replace(self, q=q, k=k, v=v)

    def runs(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield q, k and v of each run of equally long neighbours, ``[n, L, heads, dim]``, as views.

        All runs are split at once: the backward of a split is one concatenation, while the backward of each slice
        would be a zero-filled copy of the whole.
        """
        runs = self.packed.runs
        sizes = [count * length for count, length in runs]
        pieces = zip(*(t.split(sizes) if len(sizes) > 1 else (t,) for t in (self.q, self.k, self.v)), strict=True)
        for (q, k, v), (count, length) in zip(pieces, runs, strict=True):
            yield q.unflatten(0, (count, length)), k.unflatten(0, (count, length)), v.unflatten(0, (count, length))

    def expanded_kv(self) -> tuple[Tensor, Tensor]:
        """Return k and v with each head repeated for its query heads, ``[T, H, ...]``: for kernels without groups."""
        if self.groups == 1:
            return self.k, self.v
        return self.k.repeat_interleave(self.groups, 1), self.v.repeat_interleave(self.groups, 1)
