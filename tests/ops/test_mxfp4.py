"""Dequantised MXFP4 stacks: the kernel against the definition and transformers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_checks import DEVICES, KERNEL_DTYPES, count_calls
from torch import Tensor

from fastpack.ops.mxfp4 import VALUES, definition, dequantize_mxfp4, quantize_mxfp4

pytest.importorskip("triton")
from fastpack.ops.kernels import mxfp4 as kernels

SHAPES = [(1, 1, 1), (2, 3, 2), (3, 40, 3), (2, 129, 5)]  # less than a program's words, some programs, a partial one


def make_stack(shape: tuple[int, int, int], device: str = "cpu", lowest: int = 97) -> tuple[Tensor, Tensor]:
    """Return random blocks ``[E, O, G, 16]`` and scales ``[E, O, G]``."""
    generator = torch.Generator().manual_seed(sum(shape))
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(lowest, 135, shape, generator=generator, dtype=torch.uint8)
    return blocks.to(device), scales.to(device)


def by_hand(byte: int, scale: int) -> list[float]:
    """Return both elements of a byte, from the bits of e2m1 and e8m0."""
    elements = []
    for nibble in (byte & 15, byte >> 4):
        exponent, mantissa = nibble >> 1 & 3, nibble & 1
        value = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        elements.append((-value if nibble & 8 else value) * 2.0 ** (scale - 127))
    return elements


@pytest.mark.parametrize("scale", [0, 1, 126, 127, 130, 253])
def test_definition_is_the_specification_s(scale: int) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16)
    actual = definition(blocks, torch.full((1, 16, 1), scale, dtype=torch.uint8), torch.float64)
    expected = torch.tensor([by_hand(byte, scale) for byte in range(256)], dtype=torch.float64)
    assert torch.equal(actual.flatten(), expected.flatten())
    assert not torch.equal(actual.flatten(), expected.flip(1).flatten()), "halves of bytes that are swapped would show"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
def test_kernel_is_the_definition(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch, kernels, "dequantize_mxfp4")
    blocks, scales = make_stack(shape, device, lowest=0 if dtype == torch.float32 else 115)
    actual = dequantize_mxfp4(blocks, scales, dtype, "triton")
    assert len(calls) == 1
    assert actual.shape == (shape[0], shape[1], shape[2] * 32)
    assert torch.equal(actual, definition(blocks, scales, dtype))
    assert torch.equal(actual, dequantize_mxfp4(blocks.flatten(2), scales, dtype, "triton"))
    assert not torch.equal(actual, definition(blocks.flip(-1), scales, dtype)), "the check can fail"


@pytest.mark.parametrize("device", DEVICES)
def test_a_scale_of_255_is_not_a_number(device: str) -> None:
    blocks, scales = make_stack((1, 2, 2), device)
    scales[0, 1, 0] = 255
    for implementation in ("torch", "triton"):
        dense: Tensor = dequantize_mxfp4(blocks, scales, torch.float32, implementation)  # type: ignore[arg-type]
        assert dense[0, 1, :32].isnan().all()
        assert int(dense.isnan().sum()) == 32


@pytest.mark.parametrize("device", DEVICES)
def test_experts_without_rows_are_left_out(device: str, unwritten_memory_is_not_finite: None) -> None:
    blocks, scales = make_stack((4, 3, 2), device)
    offsets = torch.tensor([0, 5, 5, 7], dtype=torch.int32, device=device)
    dense = dequantize_mxfp4(blocks, scales, torch.float32, "triton", offsets)
    expected = definition(blocks, scales, torch.float32)
    assert torch.equal(dense[1], expected[1])
    assert torch.equal(dense[3], expected[3])
    assert not torch.equal(dense[0].nan_to_num(), expected[0])
    assert not torch.equal(dense[2].nan_to_num(), expected[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_what_transformers_makes_of_a_checkpoint(dtype: torch.dtype) -> None:
    convert: Any = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    blocks, scales = make_stack((2, 4, 3))
    theirs = convert(blocks, scales, dtype=dtype)
    assert torch.equal(dequantize_mxfp4(blocks, scales, dtype), theirs.transpose(1, 2))


def test_shapes_and_stacks_that_are_refused() -> None:
    blocks, scales = make_stack((2, 4, 3))
    with pytest.raises(ValueError, match="a scale for each 16 bytes"):
        dequantize_mxfp4(blocks, scales[:, :2], torch.float32)
    with pytest.raises(ValueError, match="float64"):
        dequantize_mxfp4(blocks, scales, torch.float64, "triton")
    with pytest.raises(ValueError, match="not contiguous"):
        dequantize_mxfp4(blocks.transpose(1, 2), scales.transpose(1, 2), torch.float32, "triton")
    shifted = torch.cat([blocks.new_zeros(1), blocks.flatten()])[1:].view(blocks.shape)
    with pytest.raises(ValueError, match="four bytes"):
        dequantize_mxfp4(shifted, scales, torch.float32, "triton")


def test_quantised_elements_are_the_nearest_that_the_scale_allows() -> None:
    dense = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1, 50])[:, None]
    dense[0, 0, :32] = 0
    blocks, scales = quantize_mxfp4(dense)
    factors = torch.exp2(scales.float() - 127)
    largest = dense.unflatten(-1, (-1, 32)).abs().amax(-1)
    assert bool(((largest < 8 * factors) & ((largest >= 4 * factors) | (largest == 0))).all()), "the largest fits"
    grid = torch.tensor(VALUES) * factors.repeat_interleave(32, -1)[..., None]
    nearest = (grid - dense[..., None]).abs().amin(-1)
    actual = definition(blocks, scales, torch.float32)
    assert torch.equal((actual - dense).abs(), nearest)
    again = quantize_mxfp4(actual)
    assert torch.equal(definition(*again, torch.float32), actual)
    with pytest.raises(ValueError, match="blocks of 32"):
        quantize_mxfp4(dense[..., :40])
