"""Mamba-2's scan in torch against the recurrence, token by token."""

from __future__ import annotations

import pytest
import torch
from op_checks import relative
from recurrences import LENGTHS, SIZE, token_by_token
from torch import Tensor

from fastpack import PackedSeqLens
from fastpack.ops.chunks import Chunks
from fastpack.ops.ssd import ssd

BOUND = 1e-12
HEADS, GROUPS, STATE, VALUE = 4, 2, 5, 8


def inputs_of(tokens: int, decay: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return x, dt, A, B and C; A dt is about ``-decay``."""
    generator = torch.Generator().manual_seed(tokens)
    x, B, C = (
        torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)
        for shape in ((HEADS, VALUE), (GROUPS, STATE), (GROUPS, STATE))
    )
    dt = 0.5 + torch.rand(tokens, HEADS, generator=generator, dtype=torch.float64)
    A = -decay * torch.arange(1, HEADS + 1, dtype=torch.float64) / HEADS
    return [y.to(dtype).requires_grad_() for y in (x, dt, A, B, C)]


def chunks_of(lengths: list[int], size: int = SIZE) -> Chunks:
    return PackedSeqLens.from_lengths(lengths).chunks(size)


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad((out * direction).sum(), inputs)]


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error; a gradient that is zero in theory is exactly zero."""
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True) if not b.any())
    return max(relative(a, b) for a, b in zip(actual, expected, strict=True) if b.any())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_chunks_are_the_recurrence(lengths: list[int]) -> None:
    inputs = inputs_of(sum(lengths))
    expected = with_gradients(token_by_token(*inputs, lengths), inputs)
    actual = with_gradients(ssd(*inputs, chunks_of(lengths)), inputs)
    assert worst(actual, expected) <= BOUND
    if len(lengths) > 1:
        joined = [lengths[0] + lengths[1], *lengths[2:]]
        control = with_gradients(ssd(*inputs, chunks_of(joined)), inputs)
        assert worst(control, expected) > 1e-3, "one boundary less is another result"


def test_two_sequences_are_each_alone() -> None:
    lengths = [37, 50]
    inputs = inputs_of(sum(lengths))
    x, dt, A, B, C = inputs
    parts = zip(*(y.split(lengths) for y in (x, dt, B, C)), strict=True)
    alone = [ssd(x, dt, A, B, C, chunks_of([len(x)])) for x, dt, B, C in parts]
    together = with_gradients(ssd(*inputs, chunks_of(lengths)), inputs)
    assert worst(together, with_gradients(torch.cat(alone), inputs)) <= BOUND
    control = with_gradients(ssd(*inputs, chunks_of([sum(lengths)])), inputs)
    assert worst(control, together) > 1e-3


def test_room_for_more_chunks_changes_nothing() -> None:
    """In a bucket, offsets repeat and chunks after the last real one are empty."""
    lengths = [20, 3, 17]
    inputs = inputs_of(sum(lengths))
    offsets = torch.tensor([0, 20, 23, 40, 40, 40], dtype=torch.int32)
    roomy = ssd(*inputs, Chunks.of(offsets, SIZE, 40 // SIZE + 5))
    assert torch.equal(roomy, ssd(*inputs, chunks_of(lengths)))


@pytest.mark.parametrize("decay", [50.0, 1e4])
def test_strong_decays(decay: float) -> None:
    """No exponential overflows, in float32 either, and weak decays after strong ones keep their digits."""
    lengths = [40, 9]
    inputs = inputs_of(49, decay)
    inputs[1] = torch.where(torch.arange(49)[:, None] % 7 < 3, inputs[1], 1e-3 * inputs[1]).detach().requires_grad_()
    expected = with_gradients(token_by_token(*inputs, lengths), inputs)
    assert worst(with_gradients(ssd(*inputs, chunks_of(lengths)), inputs), expected) <= BOUND
    narrow = [y.detach().float().requires_grad_() for y in inputs]
    assert worst(with_gradients(ssd(*narrow, chunks_of(lengths)), narrow), expected) <= 1e-5


def test_half_precision_is_computed_in_float32() -> None:
    x, dt, A, B, C = inputs_of(40, dtype=torch.float32)
    x, B, C = (y.bfloat16() for y in (x, B, C))
    out = ssd(x, dt, A, B, C, chunks_of([40]))
    assert out.dtype == torch.float32
    assert torch.equal(out, ssd(x.float(), dt, A, B.float(), C.float(), chunks_of([40])))


def test_autocast_does_not_reach_the_definition() -> None:
    inputs = inputs_of(14, dtype=torch.float32)
    want = ssd(*inputs, chunks_of([5, 9]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ssd(*inputs, chunks_of([5, 9])), want)
