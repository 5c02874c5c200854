"""An op's entry in the benchmark, and the inputs that it is measured on.

Shape suffixes: T tokens, H hidden, I size inside the MLP, D head size, V vocabulary.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig

from fastpack.bench.lengths import make_lengths

PLAIN, OURS, LIGER = "torch", "fastpack", "Liger"

Inputs = list[Any]
"""Tensors, and whatever else a run takes; lists and tuples may be nested."""
Run = Callable[..., Any]
"""Takes a case's inputs, returns a tensor or a tuple of tensors."""


SMALL: Any = LlamaConfig(
    hidden_size=256, intermediate_size=704, num_attention_heads=8, num_key_value_heads=2, vocab_size=1000
)
"""The sizes on a CPU. Rows of weights hold whole blocks of 4-bit ones: there bitsandbytes begins a block with each."""


@dataclass(frozen=True)
class Maker:
    """Makes inputs of one size: random, scaled like activations and weights.

    Attributes:
        sizes: the config of a Llama, the model whose tensors are taken.
        lengths: of the sequences, as :func:`fastpack.bench.lengths.make_lengths` takes them.
    """

    tokens: int
    sizes: Any
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
    """

    name: str
    what: str
    inputs: Callable[[Maker], Inputs]
    runs: Callable[[Inputs], dict[str, Run]]
    work: Callable[[Maker], int]
    bound: Literal["bandwidth", "flops"] = "bandwidth"


def liger_run(module: str, name: str, *more: Any) -> Run:
    """Return a run of one of Liger's autograd Functions; ``more`` is what it takes behind the inputs."""

    def run(*inputs: Any) -> Any:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply(*inputs, *more)

    return run
