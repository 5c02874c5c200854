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

from fastpack.bench.ceiling import Ceiling
from fastpack.bench.lengths import make_lengths

PLAIN, OURS, LIGER = "torch", "fastpack", "Liger"

Inputs = list[Any]
"""Tensors and other arguments of a run; lists and tuples may be nested."""
Run = Callable[..., Any]
"""A function of a case's inputs that returns a tensor or a tuple of tensors."""


SMALL: Any = LlamaConfig(
    hidden_size=256, intermediate_size=704, num_attention_heads=8, num_key_value_heads=2, vocab_size=1000
)
"""The sizes on a CPU. Each row holds whole 4-bit blocks: on a CPU bitsandbytes begins a block with each row."""


@dataclass(frozen=True)
class Maker:
    """A maker of random inputs of one size, scaled like activations and weights.

    Attributes:
        tokens: T.
        sizes: the config of the Llama whose tensors are imitated.
        dtype: the dtype of the tensors.
        generator: the source of randomness; its device is that of the tensors.
        lengths: the kind of sequence lengths, as :func:`fastpack.bench.lengths.make_lengths` takes them.
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
        values = mean + scale * torch.randn(*shape, generator=self.generator, device=self.generator.device)
        return values.to(dtype or self.dtype).requires_grad_(grad)

    def sequence_lengths(self) -> list[int]:
        """Return sequence lengths that sum to T; the last sequence is truncated."""
        ends = itertools.accumulate(make_lengths(self.tokens, kind=self.lengths))
        bounds = [0, *itertools.takewhile(lambda end: end < self.tokens, ends), self.tokens]
        return [end - begin for begin, end in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Case:
    """An op of the benchmark.

    Attributes:
        name: its name on the command line.
        what: a one-line description.
        inputs: makes the inputs; tensors that require grad get a gradient.
        runs: returns the implementations by name, plain torch first. Liger's runs if it is installed.
        work: the least that forward and backward need for T tokens: bytes read and written, or operations.
        bound: the rate of the machine that limits this work.
        traffic: for work in operations, the bytes that are read and written at least, if these may take longer.
    """

    name: str
    what: str
    inputs: Callable[[Maker], Inputs]
    runs: Callable[[Inputs], dict[str, Run]]
    work: Callable[[Maker], int]
    bound: Literal["bandwidth", "flops"] = "bandwidth"
    traffic: Callable[[Maker], int] | None = None

    def least_seconds(self, make: Maker, ceiling: Ceiling) -> float:
        """Return the seconds that forward and backward take at least, at the rates of a machine."""
        seconds: float = self.work(make) / getattr(ceiling, self.bound)
        return seconds if self.traffic is None else max(seconds, self.traffic(make) / ceiling.bandwidth)


def liger_run(module: str, name: str, *more: Any) -> Run:
    """Return a run of one of Liger's autograd Functions; ``more`` are its arguments after the inputs."""

    def run(*inputs: Any) -> Any:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply(*inputs, *more)

    return run
