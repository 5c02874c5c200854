"""A tensor times a number on the device."""

from __future__ import annotations

import pytest
import torch
from op_checks import KERNEL_DTYPES, relative

pytest.importorskip("triton")
from fastpack.ops.kernels.scale import BLOCK, times


@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (BLOCK,), (7, 5 * BLOCK + 1), (0, 4)])
def test_is_the_product(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    x = torch.randn(shape, device=device)
    factor = torch.tensor(-1.7, device=device)
    truth = (x * factor).to(dtype)
    out = torch.full_like(x, float("nan"), dtype=dtype)
    times(x, factor, out)
    assert torch.equal(out, truth), "from float32, rounded once"
    same = x.to(dtype)
    expected = (same.float() * factor).to(dtype)
    times(same, factor, same)
    assert torch.equal(same, expected)
    for one in (torch.ones((), device=device), torch.ones(1, device=device, dtype=torch.float16)):
        times(same, one, same)
        assert torch.equal(same, expected)
        times(x, one, out)
        assert torch.equal(out, x.to(dtype)), "elsewhere, one is a factor as any other"


def test_negative_control() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(9, device=device)
    out = torch.empty_like(x)
    times(x, torch.tensor(2.0, device=device), out)
    assert relative(out, x) > 0.9


@pytest.mark.gpu
def test_one_is_not_computed() -> None:
    x = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    took = {}
    for value in (1.0, 2.0, 1.0, 2.0):
        factor = torch.tensor(value, device="cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        times(x, factor, x)
        end.record()
        end.synchronize()
        took[value] = begin.elapsed_time(end)
    assert took[1.0] < took[2.0] / 4
