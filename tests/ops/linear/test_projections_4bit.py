"""Groups of projections with 4-bit weights: one weight is dequantised at a time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from test_projections import T, agree, leaf
from torch import Tensor

from fastpack.ops.linear import projections
from fastpack.ops.linear.operands import Lora, Projection
from fastpack.ops.linear.projections import project
from fastpack.ops.row_count import RowCount


def four_bit(out: int) -> Any:
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear4bit(64, out, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    linear.weight = bnb.nn.Params4bit(torch.randn(out, 64), requires_grad=False, quant_type="nf4")
    return linear.to("cpu")


@pytest.mark.parametrize("update", [True, False], ids=["LoRA", "no LoRA"])
@pytest.mark.parametrize("counted", [False, True], ids=["all rows", "rows that count"])
def test_one_dense_copy_of_a_group_s_4bit_weights_at_a_time(
    counted: bool, update: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if counted:
        pytest.importorskip("triton")
    stock = projections.dequantize
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most: list[int] = []

    def watched(*args: Any) -> Tensor:
        dense = stock(*args)
        alive.add(dense)
        most.append(len(alive))
        return dense

    monkeypatch.setattr(projections, "dequantize", watched)
    group = [
        Projection(
            linear.weight,
            torch.float32,
            lora=Lora(leaf(4, 64), leaf(out, 4), 1.7) if update else None,
            quant_state=linear.weight.quant_state,
        )
        for out in (32, 16, 16)
        for linear in [four_bit(out)]
    ]
    count = RowCount(torch.tensor([T], dtype=torch.int32), T) if counted else None
    x = leaf(T, 64)
    outputs, _ = project(x, group, row_count=count, implementation="triton" if counted else "torch")
    sum(y.sum() for y in outputs).backward()
    assert most == [1] * 6
    assert not alive
    assert count is None or count.launches > 0, "the kernel that skips bucket padding has run"


def test_4bit_weights_are_dequantised_in_place_of_modules() -> None:
    linear = four_bit(32)
    x = leaf(T, 64)
    theirs = linear(x)
    expected = torch.autograd.grad(theirs.sum(), x)[0]
    p = Projection(linear.weight, torch.float32, quant_state=linear.weight.quant_state)
    (mine,), _ = project(x, [p])
    agree([mine], [theirs])
    agree([torch.autograd.grad(mine.sum(), x)[0]], [expected])
