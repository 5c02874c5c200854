"""Chunks: pieces of sequences, which recurrences compute in parallel inside and one after the other across.

Shape suffixes: T tokens, N sequences, M chunks, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of packed sequences: each sequence is cut into chunks of C tokens, the last of which may be shorter.

    No chunk holds tokens of two sequences.

    Attributes:
        size: C.
        cu_seqlens: int32 ``[N + 1]``, the sequences' offsets, from 0 to T.
        cu_chunks: int32 ``[N + 1]``: sequence i has the chunks from ``cu_chunks[i]`` up to ``cu_chunks[i + 1]``.
        begin: int32 ``[M]``: each chunk's first token.
        end: int32 ``[M]``: one past its last token. Chunks after the last real one are empty: they begin and end at T.
    """

    size: int
    cu_seqlens: Tensor
    cu_chunks: Tensor
    begin: Tensor
    end: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, size: int, count: int) -> Chunks:
        """Cut sequences into chunks, without waiting for the device.

        Args:
            cu_seqlens: int32 ``[N + 1]``.
            size: C.
            count: M, at least the number of chunks; ``T // size + N`` is always enough.
        """
        counts = (cu_seqlens.diff() + size - 1) // size
        cu_chunks = torch.cat([cu_seqlens[:1], counts.cumsum(0, dtype=torch.int32)])
        chunk = torch.arange(count, dtype=torch.int32, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_chunks, chunk, right=True).clamp(max=len(counts)) - 1
        begin = cu_seqlens[sequence] + (chunk - cu_chunks[sequence]) * size
        end = torch.minimum(begin + size, cu_seqlens[sequence + 1])
        absent = chunk >= cu_chunks[-1]
        begin, end = (torch.where(absent, cu_seqlens[-1], edge).to(torch.int32) for edge in (begin, end))
        return cls(size, cu_seqlens, cu_chunks, begin, end)

    @cached_property
    def steps(self) -> tuple[Tensor, list[int]]:
        """The real chunks in the order of a loop over all sequences at once, and how many chunks each step has.

        Step n has the n-th chunk of each sequence, those of the sequences with most chunks first. So the sequences of a
        step are the first ones of the step before. To compute it, the host waits for the device.
        """
        counts, longest_first = self.cu_chunks.diff().sort(descending=True, stable=True)
        step = torch.arange(int(counts[0]), device=counts.device)[:, None]
        exists = step < counts
        return (self.cu_chunks[longest_first] + step)[exists], exists.sum(1).tolist()

    def gather(self, x: Tensor) -> Tensor:
        """Return ``[M, C, ...]`` from ``[T, ...]``, with zeros after the end of a chunk."""
        tokens = self.begin[:, None] + torch.arange(self.size, dtype=torch.int32, device=x.device)
        real = (tokens < self.end[:, None]).view(*tokens.shape, *[1] * (x.ndim - 1))
        return torch.where(real, x[tokens.clamp(max=len(x) - 1)], x.new_zeros(()))

    def scatter(self, x: Tensor, tokens: int) -> Tensor:
        """Return ``[T, ...]`` from ``[M, C, ...]``; the inverse of :meth:`gather`. T is ``tokens``."""
        token = torch.arange(tokens, dtype=torch.int32, device=x.device)
        sequence = torch.searchsorted(self.cu_seqlens, token, right=True) - 1
        slots = self.cu_chunks[sequence] * self.size + token - self.cu_seqlens[sequence]
        return x.flatten(0, 1)[slots]
