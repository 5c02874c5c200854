"""Bringing small tensors to one dtype in one launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from fastpack.ops.kernels import cast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("count", [1, 2, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_end_to_end_in_order(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3 + 700 * (i % 3), 5 + i, device=DEVICE) for i in range(count)]
    tensors[0] = tensors[0].t()
    made = cast.cast_together(tensors, dtype)
    assert made.dtype == dtype
    assert torch.equal(made, torch.cat([t.reshape(-1).to(dtype) for t in tensors]))
    assert not torch.equal(made.flip(0), torch.cat([t.reshape(-1).to(dtype) for t in tensors]))
