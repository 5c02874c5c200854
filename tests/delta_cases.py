"""Cases of the gated delta rule, for the tests of its definition and of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.ops.chunks import Chunks

HEADS = 4
KEY_HEADS = 2
LENGTHS = [[1], [15], [16], [17], [50], [1, 16, 40, 3, 17], [2] * 20]
"""For chunks of 16 tokens."""


def make_inputs(
    tokens: int,
    *,
    by_channel: bool = False,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int] = (8, 6),
    device: str = "cpu",
    heads: tuple[int, int] = (KEY_HEADS, HEADS),
) -> list[Tensor]:
    """Return q, k, v, g and beta; the decays of a quarter of the tokens are close to 1."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    key, value = sizes
    of_keys, of_values = heads
    q, k = (normal(tokens, of_keys, key) for _ in range(2))
    v = normal(tokens, of_values, value)
    g = F.logsigmoid(2 * normal(*((tokens, of_values, key) if by_channel else (tokens, of_values))) + 1)
    beta = normal(tokens, of_values).sigmoid()
    return [x.to(device, dtype) for x in (q, k, v, g, beta)]


def chunks_of(lengths: list[int], size: int, spare: int = 0, device: str = "cpu") -> Chunks:
    """Return the chunks of these sequences, and of ``spare`` sequences and chunks that are empty."""
    offsets = list(accumulate(lengths, initial=0))
    counts = [-(-length // size) for length in lengths]
    cu_seqlens = torch.tensor(offsets + offsets[-1:] * spare, dtype=torch.int32, device=device)
    return Chunks.of(cu_seqlens, size, sum(counts) + spare)


def gradients_of(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the result, and the gradient of each input for one direction that is the same for each dtype."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, direction)]


def errors(actual: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Return the error of the result and of each gradient, relative to the largest entry.

    A gradient that is zero (a decay's in sequences of one token) is held to the largest gradient.
    """
    floor = 1e-3 * max(float(x.abs().max()) for x in truth[1:])
    pairs = zip(actual, truth, strict=True)
    return [
        float((a.double() - b).abs().nan_to_num(torch.inf).max() / max(float(b.abs().max()), floor)) for a, b in pairs
    ]
