"""Models with experts on a GPU: the kernels run, and are exact in float32 and as precise as stock in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_models import FAMILIES, check_against_stock, check_half, expert_model, with_expert_lora
from op_checks import count_calls
from oracle import GPU_FLOAT32_BOUND

import fastpack
from fastpack.ops.kernels import grouped_matmul as kernels

pytestmark = pytest.mark.gpu

TUNED = pytest.mark.parametrize("lora", [False, True], ids=["whole", "LoRA"])


def build(model_type: str, lora: bool, dtype: torch.dtype = torch.float32) -> Any:
    model = expert_model(model_type).to("cuda", dtype)
    return with_expert_lora(model) if lora else model


@TUNED
@pytest.mark.parametrize("model_type", FAMILIES)
def test_float32(model_type: str, lora: bool, expert_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock model computes expert by expert: its grouped matmuls need bfloat16 here."""
    model, stock = build(model_type, lora), build(model_type, lora)
    stock.set_experts_implementation("eager")
    fastpack.patch(model, strict=True)
    launches = count_calls(monkeypatch, kernels, "grouped_matmul")
    check_against_stock(model, stock, expert_calls, bound=GPU_FLOAT32_BOUND)
    assert len(launches) >= 4 * len(expert_calls), "forward and backward of two layers of each block"


@TUNED
@pytest.mark.parametrize("autocast", ["", "cuda"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_bfloat16(
    model_type: str, autocast: str, lora: bool, expert_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    model, stock, wide = (build(model_type, lora, dtype) for _ in range(3))
    for each in (stock, wide):
        each.set_experts_implementation("eager")
    fastpack.patch(model)
    launches = count_calls(monkeypatch, kernels, "grouped_matmul")
    check_half(model, stock, wide.float(), expert_calls, autocast)
    assert len(launches) >= 4 * len(expert_calls)
