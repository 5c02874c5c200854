"""Kernels leave bucket padding out: its slots belong to no expert, whatever the router chose for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import EVERYTHING, Case, choices, layers, op, operands, run
from op_checks import DEVICES, relative
from torch import Tensor

from fastpack.ops.experts.experts import experts
from fastpack.ops.row_count import RowCount

pytest.importorskip("triton")

FLOAT32 = 2e-5
CASE = replace(EVERYTHING, sizes=(8, 2, 4, 12, 8))
REAL = 4  # torch draws blocks of 16 numbers: the gradients of both results begin with the same 48


def with_padding(count: RowCount) -> Any:
    """Return a block whose last tokens are bucket padding."""

    def block(case: Case, leaves: dict[str, Tensor], index: Tensor) -> Tensor:
        inner, down = layers(case, leaves)
        begun = experts(
            leaves["x"], index, leaves["weights"], inner, down, case.gate, row_count=count, implementation="triton"
        )
        return begun.finish()

    return block


@pytest.mark.parametrize("device", DEVICES)
def test_bucket_padding_adds_nothing(device: str) -> None:
    values, index = operands(CASE, dtype=torch.float32), choices(CASE)
    real = {name: value[:REAL] if name in ("x", "weights") else value for name, value in values.items()}
    count = RowCount(torch.tensor([REAL], dtype=torch.int32, device=device), len(index))
    ours = run(with_padding(count), CASE, values, index, torch.float32, device=device)
    want = run(op("triton"), CASE, real, index[:REAL], torch.float32, device=device)
    everything = run(op("triton"), CASE, values, index, torch.float32, device=device)
    for name, right in want.items():
        per_token = name in ("out", "x", "weights")
        if per_token:
            assert not ours[name][REAL:].any(), name
        assert relative(ours[name][:REAL] if per_token else ours[name], right) <= FLOAT32, name
        if not per_token:
            assert relative(everything[name], right) > 0.01, f"{name}: the padding would have been seen"
    _, choices_of_each, _, hidden, inside = CASE.sizes
    assert count.launches == 3, "the forward in two parts, and the backward"
    assert count.work == 2 * 2 * choices_of_each * 3 * hidden * inside
