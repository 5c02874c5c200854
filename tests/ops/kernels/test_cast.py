"""Bringing small tensors to one dtype in one launch."""

from __future__ import annotations

import pytest
import torch
from op_checks import KERNEL_DTYPES
from torch import Tensor

pytest.importorskip("triton")
from fastpack.ops.kernels import cast


def drawn(count: int, device: str) -> list[Tensor]:
    """Of more than a block and of less, one of them transposed."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3 + 700 * (i % 3), 5 + i, generator=generator).to(device) for i in range(count)]
    return [tensors[0].t(), *tensors[1:]]


def one_after_another(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors])


@pytest.mark.parametrize("count", [1, 2, 6, 8])
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
def test_end_to_end_in_order(device: str, dtype: torch.dtype, count: int) -> None:
    tensors = drawn(count, device)
    made = cast.cast_together(tensors, dtype)
    assert made.dtype == dtype
    assert torch.equal(made, one_after_another(tensors, dtype))
    assert not torch.equal(made.flip(0), one_after_another(tensors, dtype))


@pytest.mark.parametrize("empty", [[0], [2], [5], [6, 7], [0, 1, 2, 3, 4, 5], [*range(8)]], ids=str)
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
def test_tensors_without_elements(device: str, dtype: torch.dtype, empty: list[int]) -> None:
    """First, last, all of a launch, or all there are."""
    tensors = [t[:0] if i in empty else t for i, t in enumerate(drawn(8, device))]
    made = cast.cast_together(tensors, dtype)
    assert made.dtype == dtype
    assert torch.equal(made, one_after_another(tensors, dtype))


@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
def test_a_narrow_tensor_among_wide_ones(device: str, dtype: torch.dtype) -> None:
    tensors = [t.half() if i == 1 else t for i, t in enumerate(drawn(3, device))]
    made = cast.cast_together(tensors, dtype)
    assert torch.equal(made, one_after_another(tensors, dtype))
    assert dtype == torch.float16 or not torch.equal(made, one_after_another(drawn(3, device), dtype))
