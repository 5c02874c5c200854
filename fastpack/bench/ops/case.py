"""What the benchmark has to know of an op.

Shape suffixes: T tokens, H hidden, I size inside the MLP, D head size, V vocabulary, R rank of LoRA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fastpack.bench.lengths import make_lengths

PLAIN, OURS, LIGER = "torch", "fastpack", "Liger"

Inputs = list[Any]
Run = Callable[..., Any]
"""Takes a case's inputs, returns a tensor or a tuple of tensors."""


@dataclass(frozen=True)
class Sizes:
    """Of the model whose tensors are taken."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256
    rank: int = 16


LLAMA_8B = Sizes()
SMALL = Sizes(hidden=256, inner=704, heads=8, kv_heads=2, head_dim=32, vocabulary=1000, rank=4)
"""Rows of weights hold whole blocks of 4-bit ones: on a CPU bitsandbytes begins a block with each row."""


@dataclass(frozen=True)
class Maker:
    """Makes inputs of one size: random, scaled like activations and weights.

    Attributes:
        lengths: of the sequences, as :func:`fastpack.bench.lengths.make_lengths` takes them.
    """

    tokens: int
    sizes: Sizes
    dtype: torch.dtype
    generator: torch.Generator
    lengths: str = "alpaca"

    def tensor(self, *shape: int, scale: float = 1.0, grad: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed."""
        made = torch.randn(*shape, generator=self.generator, device=self.generator.device) * scale
        return made.to(dtype or self.dtype).requires_grad_(grad)

    def norm_weight(self, size: int) -> Tensor:
        """Near 1."""
        weight = 1 + self.tensor(size, scale=0.1, grad=False)
        return weight.requires_grad_()

    def integers(self, high: int, *shape: int) -> Tensor:
        """int64, uniform, from 0 to below ``high``."""
        return torch.randint(high, shape, generator=self.generator, device=self.generator.device)

    def sequence_lengths(self) -> list[int]:
        """Lengths of sequences that fill T, the last one cut off."""
        lengths: list[int] = []
        left = self.tokens
        for length in make_lengths(self.tokens, kind=self.lengths):
            if left > 0:
                lengths.append(min(length, left))
                left -= length
        return lengths


@dataclass(frozen=True)
class Case:
    """One op.

    Attributes:
        name: what the user calls it; what: one line about it.
        inputs: makes them; tensors that require grad get a gradient.
        runs: the implementations by name for such inputs, plain torch first; all but it are ours.
        work: what forward and backward can't do without, for T tokens: bytes read and written, or operations.
        bound: which of the machine's rates bounds that.
        liger: makes Liger's run for such inputs; called where it is installed and can run.
        packed: whether its tokens are those of sequences, as long as :class:`Maker` says.
    """

    name: str
    what: str
    inputs: Callable[[Maker], Inputs]
    runs: Callable[[Inputs], dict[str, Run]]
    work: Callable[[Maker], int]
    bound: Literal["bandwidth", "flops"] = "bandwidth"
    liger: Callable[[Inputs], Run] | None = None
    packed: bool = False
