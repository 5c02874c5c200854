"""What the benchmark has to know of an op.

Shape suffixes: T tokens, H hidden, I size inside the MLP, D head size, V vocabulary, R rank of LoRA.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack.bench.lengths import make_lengths

PLAIN, OURS, LIGER = "torch", "fastpack", "Liger"

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
class Work:
    """What a pass can't do without: bytes read and written, or operations of matrix products where those decide."""

    bytes: int = 0
    flops: int = 0


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


class FourBit(NamedTuple):
    """A packed weight, and bitsandbytes' state of it."""

    packed: Tensor
    state: Any


@dataclass(frozen=True)
class Case:
    """One op.

    Attributes:
        name: what the user calls it; what: one line about it.
        inputs: makes them; tensors that require grad get a gradient.
        runs: the implementations by name for such inputs, plain torch first; all but it and Liger's are ours.
        forward, backward: what a pass has to do, for T tokens; an op whose inputs have no gradient has no backward.
        reference: computes the same from the inputs in a wider dtype; None for the plain one.
        plain_in_half: where plain torch computes partly in float32, the same under autocast, whose errors are allowed.
        avoided: bytes of what the op is there not to hold, for comparison with the memory that it takes.
        packed: whether its tokens are those of sequences, as long as :class:`Maker` says.
    """

    name: str
    what: str
    inputs: Callable[[Maker], list[Any]]
    runs: Callable[[Sequence[Any]], dict[str, Run]]
    forward: Callable[[Maker], Work]
    backward: Callable[[Maker], Work]
    reference: Run | None = None
    plain_in_half: Run | None = None
    avoided: Callable[[Maker], int] | None = None
    packed: bool = False


def with_liger(runs: dict[str, Run], device: torch.device, load: Callable[[], Run]) -> dict[str, Run]:
    """``runs``, and Liger's where it is installed and can run."""
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        runs[LIGER] = load()
    return runs


def leaves(inputs: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Copies of the inputs, float tensors in ``dtype`` if given, that autograd sees as its own leaves."""
    return [_leaf(value, dtype) for value in inputs]


def _leaf(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, FourBit):
        return FourBit(value.packed.clone(), value.state)
    if not isinstance(value, Tensor):
        return value
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to(wanted, copy=True).requires_grad_(value.requires_grad)


def bytes_of(inputs: Sequence[Any]) -> int:
    """What is copied of the inputs."""
    tensors = (value.packed if isinstance(value, FourBit) else value for value in inputs)
    return sum(value.nbytes for value in tensors if isinstance(value, Tensor))


def given_up(inputs: Sequence[Any]) -> list[Any]:
    """The inputs as an op that works in place may have them: results of another op, not leaves."""
    return [v.clone() if isinstance(v, Tensor) and v.requires_grad else v for v in inputs]


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """As a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def packed_lengths(make: Maker) -> list[int]:
    """Lengths of sequences that fill T, the last one cut off."""
    lengths: list[int] = []
    for length in make_lengths(make.tokens, kind=make.lengths):
        left = make.tokens - sum(lengths)
        if left <= 0:
            break
        lengths.append(min(length, left))
    return lengths
