"""The short convolution in torch against zeros before each sequence."""

from __future__ import annotations

import pytest
import torch
from op_checks import relative
from recurrences import LENGTHS, convolved
from torch import Tensor

from fastpack.ops.short_conv import ConvActivation, short_conv

BOUND = 1e-12
CHANNELS = 6


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs_of(tokens: int, taps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = (tokens, CHANNELS), (CHANNELS, taps), (CHANNELS,)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad((out * direction).sum(), inputs)]


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_definition(lengths: list[int], taps: int, activation: ConvActivation | None) -> None:
    inputs = inputs_of(sum(lengths), taps)
    expected = with_gradients(convolved(*inputs, lengths, activation is not None), inputs)
    actual = with_gradients(short_conv(*inputs, offsets_of(lengths), activation=activation), inputs)
    for mine, right in zip(actual, expected, strict=True):
        assert float((mine - right).abs().max()) <= BOUND * max(1.0, float(right.abs().max()))
    if len(lengths) > 1:
        joined = short_conv(*inputs, offsets_of([lengths[0] + lengths[1], *lengths[2:]]), activation=activation)
        assert relative(joined, expected[0]) > 1e-3, "one boundary less is another result"


def test_strided_rows_without_bias() -> None:
    x, weight, _ = inputs_of(20, 4)
    wide = torch.cat([x, x.flip(0)], 1)
    expected = convolved(x, weight, None, [7, 13], False)
    assert torch.allclose(short_conv(wide[:, :CHANNELS], weight, None, offsets_of([7, 13])), expected, atol=1e-12)
    assert not torch.allclose(short_conv(wide[:, CHANNELS:], weight, None, offsets_of([7, 13])), expected, atol=1e-2)


def test_half_precision_is_rounded_once() -> None:
    x, weight, bias = (y.detach().bfloat16() for y in inputs_of(20, 4))
    offsets = offsets_of([7, 13])
    wide = short_conv(x.float(), weight.float(), bias.float(), offsets, activation="silu")
    assert torch.equal(short_conv(x, weight, bias, offsets, activation="silu"), wide.bfloat16())
