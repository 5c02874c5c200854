"""A call of attention (:class:`AttentionCall`), and the facts of it that a backend is asked about beforehand."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastpack.packing.seqlens import PackedSeqLens


@dataclass(frozen=True)
class Visibility:
    """The keys that a query sees: a range of its own sequence, and earlier segments that other sequences see too.

    The query at position p sees ``[start, p + 1)`` of its sequence: from the first token on, or at most ``window``
    tokens. A backend names the attributes that it serves (``SERVES``), so that whatever is added here (a range that
    ends behind the query, as in blocks of an image, or begins on another rank) is refused by those that don't know it.

    Attributes:
        window: how many tokens a query sees, itself included; None for all before it.
        segments: True where tokens that sequences have in common at their beginnings stand once, in segments before
            those that differ (:class:`fastpack.packing.prefixes.SharedTokens`).
    """

    window: int | None = None
    segments: bool = False

    def rejects(self, serves: Collection[str]) -> str | None:
        """Say why a backend that serves these attributes alone can't compute it, or return None."""
        for part in type(self).__dataclass_fields__.values():  # fields() would filter them anew in each layer
            if part.name not in serves and getattr(self, part.name) != part.default:
                return f"serves no {part.name}"
        return None

    def block(self, at: int, end: int, device: torch.device) -> tuple[int, Tensor]:
        """Find the keys of a block of queries, those at positions ``[at, end)`` of a sequence.

        Returns:
            The position of the first key that one of them sees; and bool ``[queries, keys]``, which see which, of the
            keys from there to ``end``.
        """
        first = 0 if self.window is None else max(0, at - self.window + 1)
        distance = torch.arange(at, end, device=device)[:, None] - torch.arange(first, end, device=device)
        seen = distance >= 0
        return first, seen if self.window is None else seen & (distance < self.window)


@dataclass(frozen=True)
class AttentionShape:
    """The facts on which a backend decides whether it can serve. Holds no tensor, so it can be asked ahead of time.

    Attributes:
        device: where the tensors are.
        dtype: of q, k and v.
        num_heads, num_kv_heads: H and K; H is a multiple of K.
        head_dim: size of a query and of a key; ``value_dim``: of a value.
        visibility: the keys that a query sees.
        softcap: c in ``c * tanh(score / c)``; None for none.
        sinks: True where each head has a learned score that takes part in the softmax and carries no value.
        dropout: probability that an attention weight is dropped.
        total_tokens, num_sequences, max_seqlen: T, N and the longest length; 0 where not yet known.
        needs_grad: True where a backward pass may follow.
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
        """One line for an error message."""
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

    ``softmax(softcap(scale * q k^T) | sinks) v``, over the keys that :attr:`visibility` says.

    Attributes:
        q: ``[T, H, D]``; k: ``[T, K, D]``; v: ``[T, K, V]``; contiguous in the last dimension.
        packed: where sequences begin and end; where it says that tokens are shared, q, k and v have each of them once.
        scale: multiplies the scores.
        sinks: ``[H]`` or None.
        window: as in :class:`Visibility`; softcap, dropout: as in :class:`AttentionShape`.
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
        """Check the shapes and the packing."""
        tokens = (self.q.shape[0], self.k.shape[0], self.v.shape[0])
        packed = self.packed
        expected = packed.total_tokens if packed.shared is None else packed.shared.total_tokens
        if any(count != expected for count in tokens):
            raise ValueError(f"q, k and v have {tokens} tokens, packed_seq_lens {expected}.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window counts the query itself, so it is at least 1, not {self.window}.")

    @property
    def shape(self) -> AttentionShape:
        """The shape of the call, by which backends accept or reject it."""
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
            num_sequences=self.packed.cu_seqlens.numel() - 1,  # in a bucket, also those without a token
            max_seqlen=self.packed.max_seqlen,
            needs_grad=torch.is_grad_enabled()
            and any(t is not None and t.requires_grad for t in (self.q, self.k, self.v, self.sinks)),
        )

    @property
    def visibility(self) -> Visibility:
        """The keys that a query of this batch sees; without a window where no sequence is longer than it."""
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
        """q, k and v of each run of equally long neighbours, ``[n, L, heads, dim]``, as views.

        Split at once: the backward of a split is one concatenation, that of a slice a zero-filled copy of the whole.
        """
        runs = self.packed.runs
        sizes = [count * length for count, length in runs]
        pieces = zip(*(t.split(sizes) if len(sizes) > 1 else (t,) for t in (self.q, self.k, self.v)), strict=True)
        for (q, k, v), (count, length) in zip(pieces, runs, strict=True):
            yield q.unflatten(0, (count, length)), k.unflatten(0, (count, length)), v.unflatten(0, (count, length))

    def expanded_kv(self) -> tuple[Tensor, Tensor]:
        """Return k and v with every head repeated for each of its query heads, ``[T, H, ...]``."""
        if self.groups == 1:
            return self.k, self.v
        return self.k.repeat_interleave(self.groups, 1), self.v.repeat_interleave(self.groups, 1)
