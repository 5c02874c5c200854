"""Fingerprints: equal rows have equal ones, and a single other bit gives another."""

from __future__ import annotations

import pytest
import torch

from fastpack.packing import fingerprints as module
from fastpack.packing.fingerprints import fingerprints, joined

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_rows_and_no_others(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(40, 6, 5, generator=generator) * 3).to(dtype)
    numbers = torch.randint(40, (100,), generator=generator)
    prints = fingerprints(x[numbers])
    assert prints.shape == (100, 2)
    same = (x[numbers][:, None] == x[numbers][None]).flatten(2).all(-1)
    for column in prints.T:
        assert torch.equal(column[:, None] == column[None], same)
    monkeypatch.setattr(module, "_AT_ONCE", 70)
    assert torch.equal(fingerprints(x[numbers]), prints), "a part at a time"
    assert torch.equal(fingerprints(x[numbers].transpose(1, 2)), fingerprints(x[numbers].transpose(1, 2).contiguous()))


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    row = torch.randn(8, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = row.view(torch.int32 if dtype == torch.float32 else torch.int16)
    size = 8 * row.element_size()
    flipped = torch.stack([bits.clone() for _ in range(8 * size)])
    for at in range(8 * size):
        bit = torch.tensor(1).bitwise_left_shift(torch.tensor(at % size)).to(torch.int64)
        flipped[at, at // size] = (flipped[at, at // size].long() ^ bit).to(bits.dtype)
    prints = fingerprints(torch.cat([bits[None], flipped]).view(dtype))
    assert len(prints[:, 0].unique()) == len(prints[:, 1].unique()) == len(prints)


def test_order_counts_and_nothing_is_nothing() -> None:
    assert not torch.equal(fingerprints(torch.tensor([[1, 2]])), fingerprints(torch.tensor([[2, 1]])))
    one, other = fingerprints(torch.tensor([[1], [2]])), fingerprints(torch.tensor([[2], [1]]))
    assert not torch.equal(joined([one, other])[0], joined([one, other])[1])
    assert fingerprints(torch.zeros(3, 0)).tolist() == [[0, 0]] * 3
    assert fingerprints(torch.zeros(0, 4)).shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_computes_the_same(dtype: torch.dtype) -> None:
    x = (torch.randn(300, 70, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    assert torch.equal(fingerprints(x.cuda()).cpu(), fingerprints(x))


def test_two_signs_of_float64_do_not_cancel() -> None:
    prints = fingerprints(torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, 3.0], [1.0, -2.0, -3.0]], dtype=torch.float64))
    assert len({(*row,) for row in prints.tolist()}) == 3
