"""An op's entry in the benchmark, and the inputs that it is measured on.

Shape suffixes: T tokens, H hidden, I size inside the MLP, D head size, V vocabulary, R rank of LoRA.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fastpack.bench.lengths import make_lengths

PLAIN, OURS, LIGER = "torch", "fastpack", "Liger"

Inputs = list[Any]
"""Tensors, and whatever else a run takes; lists and tuples may be nested."""
Run = Callable[..., Any]
"""Takes a case's inputs, returns a tensor or a tuple of tensors."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model whose tensors are taken."""

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

    def tensor(
        self,
        *shape: int,
        mean: float = 0.0,
        scale: float = 1.0,
        grad: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return a normally distributed tensor."""
        made = mean + scale * torch.randn(*shape, generator=self.generator, device=self.generator.device)
        return made.to(dtype or self.dtype).requires_grad_(grad)

    def sequence_lengths(self) -> list[int]:
        """Return lengths of sequences that fill T, the last one cut off."""
        ends = itertools.accumulate(make_lengths(self.tokens, kind=self.lengths))
        bounds = [0, *itertools.takewhile(lambda end: end < self.tokens, ends), self.tokens]
        return [end - begin for begin, end in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Case:
    """One op.

    Attributes:
        name: what the user calls it; what: one line about it.
        inputs: makes them; tensors that require grad get a gradient.
        runs: the implementations by name for such inputs, plain torch first. Liger's runs where it is installed.
        work: what forward and backward can't do without, for T tokens: bytes read and written, or operations.
        bound: which of the machine's rates bounds that.
        packed: whether its tokens are those of sequences, as long as :class:`Maker` says.
    """

    name: str
    what: str
    inputs: Callable[[Maker], Inputs]
    runs: Callable[[Inputs], dict[str, Run]]
    work: Callable[[Maker], int]
    bound: Literal["bandwidth", "flops"] = "bandwidth"
    packed: bool = False


def liger_run(module: str, name: str, *more: Any) -> Run:
    """Return a run of one of Liger's autograd Functions; ``more`` is what it takes behind the inputs."""

    def run(*inputs: Any) -> Any:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply(*inputs, *more)

    return run
