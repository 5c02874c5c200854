"""The convolution's kernels against the definition, through Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from op_checks import DEVICES, KERNEL_DTYPES, assert_no_worse, count_calls, relative
from torch import Tensor

from fastpack.ops.implementation import Implementation
from fastpack.ops.short_conv import ConvActivation, short_conv

pytest.importorskip("triton")
from fastpack.ops.kernels import short_conv as kernels

LENGTHS = [[1], [16], [33], [5, 1, 2, 40, 1, 1, 3, 20], [2] * 20]


def offsets_of(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def inputs_of(tokens: int, channels: int, taps: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = (tokens, channels), (channels, taps), (channels,)
    return [torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def with_gradients(
    inputs: list[Tensor], offsets: Tensor, activation: ConvActivation | None, implementation: Implementation
) -> list[Tensor]:
    out = short_conv(*inputs, offsets, activation=activation, implementation=implementation)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, direction)]


@pytest.mark.sample(12)
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("taps", [1, 4, 8])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
def test_kernel_is_the_definition(
    device: str,
    dtype: torch.dtype,
    lengths: list[int],
    taps: int,
    activation: ConvActivation | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = [count_calls(monkeypatch, kernels, name) for name in ("forward", "backward")]
    inputs, offsets = inputs_of(sum(lengths), 130, taps, device, dtype), offsets_of(lengths, device)
    actual = with_gradients(inputs, offsets, activation, "triton")
    assert list(map(len, launches)) == [1, 1]
    plain = with_gradients(inputs, offsets, activation, "torch")
    assert list(map(len, launches)) == [1, 1]
    wide = [y.detach().double().requires_grad_() for y in inputs]
    truth = with_gradients(wide, offsets, activation, "torch")
    for mine, theirs, right in zip(actual, plain, truth, strict=True):
        assert_no_worse(mine, theirs, right)
    if len(lengths) > 1 and taps > 1:
        joined = offsets_of([lengths[0] + lengths[1], *lengths[2:]], device)
        control = with_gradients(inputs, joined, activation, "triton")
        assert min(relative(*pair) for pair in zip(control[:3], truth[:3], strict=True)) > 1e-3, "a boundary less"


@pytest.mark.parametrize("device", DEVICES)
def test_strided_rows_and_what_is_not_trained(device: str) -> None:
    """Only what needs a gradient gets one; x and its gradient may be columns of wider tensors."""
    lengths = [5, 12]
    offsets = offsets_of(lengths, device)
    wide, weight, _ = (y.detach() for y in inputs_of(sum(lengths), 20, 4, device, torch.float32))
    x, weight = wide[:, 4:12].requires_grad_(), weight[:8].requires_grad_()
    direction = wide.flip(0)[:, :8]
    expected = torch.autograd.grad(short_conv(x, weight, None, offsets, implementation="torch"), [x, weight], direction)
    for trained in ([x, weight], [x], [weight]):
        frozen = [y if any(y is z for z in trained) else y.detach() for y in (x, weight)]
        out = short_conv(frozen[0], frozen[1], None, offsets, implementation="triton")
        for got, y in zip(torch.autograd.grad(out, trained, direction), trained, strict=True):
            assert relative(got, expected[0 if y is x else 1]) <= 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_programs_that_walk_over_several_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "processors", lambda device: 1)
    monkeypatch.setattr(kernels, "WAVES", 2)
    lengths = [50, 1, 29]
    channels = kernels.FORWARD["BLOCK_C"] + 40
    inputs, offsets = inputs_of(sum(lengths), channels, 4, device, torch.float32), offsets_of(lengths, device)
    actual, expected = (with_gradients(inputs, offsets, "silu", how) for how in ("triton", "torch"))
    assert all(relative(mine, right) <= 1e-6 for mine, right in zip(actual, expected, strict=True))
    monkeypatch.setattr(kernels, "WAVES", 1000)
    spread = with_gradients(inputs, offsets, "silu", "triton")
    assert torch.equal(actual[1], spread[1])
    assert not torch.equal(actual[2], spread[2]), "the weight's sums have another order"


@pytest.mark.parametrize("device", DEVICES)
def test_equal_bits_in_every_run_and_empty_sequences(device: str) -> None:
    """In a bucket the last offset is repeated."""
    inputs = inputs_of(40, 16, 4, device, torch.float32)
    first = with_gradients(inputs, offsets_of([30, 10], device), "silu", "triton")
    again = with_gradients(inputs, offsets_of([30, 10, 0, 0, 0], device), "silu", "triton")
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("device", DEVICES)
def test_values_of_other_sequences_are_never_read_as_factors(device: str) -> None:
    """Not even where they are not finite."""
    (x, weight, bias), offsets = inputs_of(30, 16, 4, device, torch.float32), offsets_of([10, 9, 11], device)
    clean = with_gradients([x, weight, bias], offsets, "silu", "triton")
    rows = x.detach().clone()
    rows[10:19] = float("nan")
    out = short_conv(rows.requires_grad_(), weight, bias, offsets, activation="silu", implementation="triton")
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    (dx,) = torch.autograd.grad(out, [rows], direction)
    for mine, right in ((out, clean[0]), (dx, clean[1])):
        for part in (slice(0, 10), slice(19, 30)):
            assert torch.equal(mine[part], right[part])
        assert mine[10:19].isnan().any(), "the control"


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_and_a_bias_with_gaps(device: str) -> None:
    (x, weight, bias), offsets = inputs_of(8, 4, 3, device, torch.float32), offsets_of([5, 3], device)
    gaps = torch.stack([bias.detach(), -bias.detach()], 1)[:, 0].requires_grad_()
    out, *grads = with_gradients([x, weight, gaps], offsets, "silu", "triton")
    assert not gaps.is_contiguous()
    for mine, right in zip((out, *grads), with_gradients([x, weight, bias], offsets, "silu", "triton"), strict=True):
        assert torch.equal(mine, right)
    none = [x.detach()[:0].requires_grad_(), weight, bias]
    out, *grads = with_gradients(none, offsets_of([0], device), "silu", "triton")
    assert out.shape == (0, 4)
    assert not any(bool(grad.any()) for grad in grads)


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_in_another_dtype(device: str) -> None:
    inputs, offsets = inputs_of(20, 8, 4, device, torch.float32), offsets_of([12, 8], device)
    inputs[0] = inputs[0].detach().bfloat16().requires_grad_()
    actual, expected = (with_gradients(inputs, offsets, "silu", how) for how in ("triton", "torch"))
    for mine, right in zip(actual, expected, strict=True):
        assert mine.dtype == right.dtype
        assert relative(mine, right) <= 1e-2


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_kernel_does_not_serve(device: str) -> None:
    inputs, offsets = inputs_of(4, 2, 9, device, torch.float32), offsets_of([4], device)
    with pytest.raises(ValueError, match="9 taps, but supports up to 8"):
        short_conv(*inputs, offsets, implementation="triton")
    with pytest.raises(ValueError, match="float64"):
        short_conv(*(y.double()[..., :2] for y in inputs), offsets, implementation="triton")
