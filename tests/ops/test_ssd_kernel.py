"""Mamba-2's kernels against the definition, through Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from op_checks import DEVICES, KERNEL_DTYPES, count_calls, relative
from torch import Tensor

from fastpack import PackedSeqLens
from fastpack.ops.chunks import Chunks
from fastpack.ops.implementation import Implementation
from fastpack.ops.ssd import ssd

pytest.importorskip("triton")
from fastpack.ops.kernels import ssd as kernels
from fastpack.ops.kernels import ssd_backward

SIZE = 16
BOUND = 1e-5
LENGTHS = [[1], [16], [50], [5, 1, 2, 40, 1, 17], [2] * 9]
SHAPES = [(4, 2, 16, 16), (3, 1, 40, 20), (2, 2, 20, 33)]
"""H, G, K, V."""


def inputs_of(tokens: int, shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> list[Tensor]:
    heads, groups, state, value = shape
    generator = torch.Generator().manual_seed(tokens)
    x, B, C = (
        torch.randn(tokens, *size, generator=generator).to(device, dtype)
        for size in ((heads, value), (groups, state), (groups, state))
    )
    dt = 0.5 * torch.rand(tokens, heads, generator=generator).to(device)
    A = -torch.rand(heads, generator=generator).to(device)
    return [y.requires_grad_() for y in (x, dt, A, B, C)]


def with_gradients(inputs: list[Tensor], chunks: Chunks, implementation: Implementation) -> list[Tensor]:
    out = ssd(*inputs, chunks, implementation=implementation)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, direction)]


def chunks_of(lengths: list[int], device: str, size: int = SIZE) -> Chunks:
    return PackedSeqLens.from_lengths(lengths, device=device).chunks(size)


def errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the errors; a gradient that is zero in theory (of A, in sequences of one token) is exactly zero."""
    assert all(not a.any() for a, b in zip(actual, expected, strict=True) if not b.any())
    return [relative(a, b) for a, b in zip(actual, expected, strict=True) if b.any()]


@pytest.mark.sample(8)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
def test_kernels_are_the_definition(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    lengths: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = [
        count_calls(monkeypatch, module, name) for module, name in ((kernels, "forward"), (ssd_backward, "backward"))
    ]
    inputs, chunks = inputs_of(sum(lengths), shape, device, dtype), chunks_of(lengths, device)
    actual = with_gradients(inputs, chunks, "triton")
    assert list(map(len, launches)) == [1, 1]
    wide = [y.detach().double().requires_grad_() for y in inputs]
    truth = with_gradients(wide, chunks, "torch")
    assert list(map(len, launches)) == [1, 1]
    assert actual[0].dtype == torch.float32
    assert [g.dtype for g in actual[1:]] == [y.dtype for y in inputs]
    bound = BOUND if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    assert max(errors(actual, truth)) <= bound, errors(actual, truth)
    if len(lengths) > 1:
        joined = chunks_of([lengths[0] + lengths[1], *lengths[2:]], device)
        assert max(errors(with_gradients(inputs, joined, "triton"), truth)) > 3 * bound, "a boundary less"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 1, 128, 64), (64, 8, 64, 64)], ids=str)
def test_a_gpu_full_of_programs(shape: tuple[int, int, int, int]) -> None:
    """In Bamba's size no element is off, and each run gives the same bits: no copy comes too early."""
    lengths = [700, 1, 690, 657]
    inputs, chunks = inputs_of(sum(lengths), shape, "cuda", torch.bfloat16), chunks_of(lengths, "cuda", 64)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    want, plain = with_gradients(wide, chunks, "torch"), with_gradients(inputs, chunks, "torch")
    runs = [with_gradients(inputs, chunks, "triton") for _ in range(5)]
    for ours, theirs in zip(errors(runs[0], want), errors(plain, want), strict=True):
        assert ours <= 2 * max(theirs, 3 * torch.finfo(torch.bfloat16).eps)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_strong_decays(device: str) -> None:
    """Nothing overflows, and weak decays after strong ones keep their digits."""
    lengths = [40, 9]
    inputs = inputs_of(49, SHAPES[0], device, torch.float32)
    strong = (torch.arange(49, device=device) % 7 < 3)[:, None]
    inputs[2] = torch.full_like(inputs[2], -50.0).requires_grad_()
    inputs[1] = torch.where(strong, 1.0, 1e-3 * inputs[1].detach()).requires_grad_()
    chunks = chunks_of(lengths, device)
    wide = [y.detach().double().requires_grad_() for y in inputs]
    truth = with_gradients(wide, chunks, "torch")
    assert max(errors(with_gradients(inputs, chunks, "triton"), truth)) <= BOUND


@pytest.mark.usefixtures("unwritten_memory_is_not_finite")
@pytest.mark.parametrize("device", DEVICES)
def test_room_for_more_chunks_and_strided_inputs(device: str) -> None:
    """In a bucket, offsets repeat and chunks after the last real one are empty; models pass columns of one tensor."""
    x, dt, A, B, C = inputs_of(40, SHAPES[0], device, torch.float32)
    joined = torch.cat([y.detach().flatten(1) for y in (x, B, C)], 1)
    x_, B_, C_ = (
        part.unflatten(1, y.shape[1:]) for part, y in zip(joined.split([64, 32, 32], 1), (x, B, C), strict=True)
    )
    strided = [y.detach().requires_grad_() for y in (x_, dt, A, B_, C_)]
    assert not strided[0].is_contiguous()
    offsets = torch.tensor([0, 20, 23, 40, 40, 40], dtype=torch.int32, device=device)
    roomy = with_gradients(strided, Chunks.of(offsets, SIZE, 40 // SIZE + 5), "triton")
    assert all(map(torch.equal, roomy, with_gradients([x, dt, A, B, C], chunks_of([20, 3, 17], device), "triton")))


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_kernels_do_not_serve(device: str) -> None:
    x, dt, A, B, C = inputs_of(4, SHAPES[0], device, torch.float32)
    for args, size, message in (
        ((x, dt, A, B.half(), C), SIZE, "the same for x, B and C"),
        ((x.repeat(1, 1, 9), dt, A, B, C), SIZE, "V=144"),
        ((x, dt, A, B, C), 48, "chunks of 48 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            ssd(*args, chunks_of([4], device, size), implementation="triton")
