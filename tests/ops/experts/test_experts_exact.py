"""A block of experts against a loop over tokens: its result, and the gradient of each of its operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import (
    GATES,
    LAYOUTS,
    ODD_SIZES,
    RANKS,
    ROUTINGS,
    SIZES,
    Case,
    by_expert,
    by_token,
    cases,
    choices,
    op,
    operands,
    other_lora,
    run,
    worst,
)
from op_checks import DEVICES, ON_CPU, count_calls
from torch.autograd.graph import saved_tensors_hooks

from fastpack.ops.expert_operands import Gate

EXACT, FLOAT32 = 1e-12, 2e-5


def every_form(function: Any) -> Any:
    """Parametrize a test over gates, ranks and layouts."""
    for name, values in (("gate", GATES), ("ranks", RANKS), ("layout", LAYOUTS)):
        function = pytest.mark.parametrize(name, values)(function)
    return function


@pytest.mark.sample(48)
@every_form
def test_in_float64(gate: str, ranks: str, layout: str) -> None:
    case = cases(gate, ranks, layout, (*SIZES, *ODD_SIZES))
    values, index = operands(case), choices(case)
    assert worst(run(op("torch"), case, values, index), run(by_token, case, values, index)) <= EXACT


@ON_CPU.marks[0]
@pytest.mark.sample(10)
@every_form
def test_kernels_in_float32(gate: str, ranks: str, layout: str) -> None:
    case = cases(gate, ranks, layout)
    values, index = operands(case, dtype=torch.float32), choices(case)
    actual = run(op("triton"), case, values, index, torch.float32)
    assert worst(actual, run(by_token, case, values, index)) <= FLOAT32


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("sizes", [SIZES[0], ODD_SIZES[1]])
def test_every_routing(sizes: Any, routing: str, index_dtype: torch.dtype) -> None:
    case = Case(sizes=sizes, routing=routing, index_dtype=index_dtype, bias=True)
    values, index = operands(case), choices(case)
    actual = run(op("torch"), case, values, index)
    assert worst(actual, run(by_token, case, values, index)) <= EXACT
    if routing == "nowhere":
        assert not any(value.any() for value in actual.values())


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("unwritten_memory_is_not_finite")
def test_every_routing_by_kernels(routing: str, device: str) -> None:
    """Rows of no expert are never written: nothing of them may reach a result."""
    case = Case(routing=routing, bias=True, index_dtype=torch.int32)
    values, index = operands(case, dtype=torch.float32), choices(case)
    actual = run(op("triton"), case, values, index, torch.float32, device=device)
    assert worst(actual, run(by_token, case, values, index)) <= FLOAT32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("unwritten_memory_is_not_finite")
def test_more_rows_of_no_expert_than_a_tile_has(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after that tile are undefined. In the control all are, and outer products read some."""
    from fastpack.ops.kernels import expert_gate
    from fastpack.ops.kernels.routing import TILE_ROWS

    case = Case(bias=True, routing="elsewhere", sizes=(60, 4, 3, 12, 8))
    values, index = operands(case, dtype=torch.float32), choices(case)
    elsewhere = index >= 3
    assert elsewhere.sum() > TILE_ROWS
    index[elsewhere] -= 9 * (index[elsewhere] % 2)  # half of these are negative
    actual = run(op("triton"), case, values, index, torch.float32, device=device)
    truth = run(by_token, case, values, index.where(~elsewhere, 3))
    assert worst(actual, truth) <= FLOAT32
    monkeypatch.setattr(expert_gate, "TILE_ROWS", 0)
    assert not worst(run(op("triton"), case, values, index, torch.float32, device=device), truth) <= FLOAT32


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.usefixtures("unwritten_memory_is_not_finite")
def test_memory_for_the_rows_of_experts_alone(implementation: Any, device: str, spare: int, routing: str) -> None:
    case = Case(routing=routing, bias=True)
    values, index = operands(case, dtype=torch.float32), choices(case)
    most = min(int((index < case.sizes[2]).sum()) + spare, index.numel())
    saved: list[int] = []
    with saved_tensors_hooks(lambda x: (saved.append(len(x)), x)[1], lambda x: x):
        actual = run(op(implementation, most_rows=most), case, values, index, torch.float32, device=device)
    assert worst(actual, run(by_token, case, values, index)) <= FLOAT32
    assert most in saved
    assert (index.numel() in saved) == (most == index.numel())


def test_too_few_rows_would_be_found() -> None:
    """The negative control. Kernels would write to memory that is not theirs."""
    case = Case(routing="distinct")
    values, index = operands(case), choices(case)
    actual = run(op("torch", most_rows=index.numel() - 1), case, values, index)
    assert worst(actual, run(by_token, case, values, index)) > 0.01


def test_the_definition_by_experts() -> None:
    """The oracle of tests with many tokens is that of the others."""
    case = Case(routing="elsewhere", bias=True)
    values, index = operands(case), choices(case)
    assert worst(run(by_expert, case, values, index), run(by_token, case, values, index)) <= EXACT


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=ON_CPU.marks)])
def test_negative_choices_add_nothing(implementation: Any) -> None:
    case = Case(routing="elsewhere", bias=True)
    values, index = operands(case, dtype=torch.float32), choices(case)
    assert (index >= case.sizes[2]).any()
    negative = index.masked_fill(index >= case.sizes[2], -1)
    actual = run(op(implementation), case, values, negative, torch.float32)
    assert worst(actual, run(by_token, case, values, index)) <= FLOAT32


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=ON_CPU.marks)])
def test_factors_that_do_not_fit(implementation: Any) -> None:
    case = Case(sizes=(13, 2, 5, 32, 12))
    values, index = operands(case, dtype=torch.float32), choices(case)
    a, b = values["inner.a"], values["inner.b"]
    values |= {"inner.a": torch.zeros(len(a), len(b)), "inner.b": torch.zeros(a.shape[1], b.shape[1])}
    with pytest.raises(ValueError, match="A is"):
        run(op(implementation), case, values, index, torch.float32)


@ON_CPU.marks[0]
def test_weights_at_an_odd_address() -> None:
    """Kernels can't read them, and say so."""
    case = Case()
    values, index = operands(case, dtype=torch.float32), choices(case)
    weight = values["inner.weight"].float()
    leaves = {name: value.float() for name, value in values.items()}
    leaves["inner.weight"] = torch.zeros(weight.numel() + 1)[1:].view(weight.shape).copy_(weight)
    with pytest.raises(ValueError, match="16 bytes"):
        op("triton")(case, leaves, index)
    assert op("auto")(case, leaves, index).isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_of_several_columns_and_steps(device: str) -> None:
    """The sizes are beyond those of a tile, and no multiples of them."""
    case = Case(sizes=(20, 2, 3, 68, 140), ranks=(3, 33), transposed=device == "cuda")
    values, index = operands(case, dtype=torch.float32), choices(case)
    truth = run(by_expert, case, values, index)
    assert worst(run(op("triton"), case, values, index, torch.float32, device=device), truth) <= FLOAT32


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=ON_CPU.marks)])
def test_no_tokens(implementation: Any) -> None:
    case = Case(sizes=(0, 2, 5, 20, 12), bias=True)
    values, index = operands(case, dtype=torch.float32), torch.empty(0, 2, dtype=torch.int64)
    actual = run(op(implementation), case, values, index, torch.float32)
    assert actual.pop("out").shape == actual.pop("x").shape == (0, 20)
    assert actual.keys() == values.keys() - {"x"}
    assert not any(value.any() for value in actual.values())


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=ON_CPU.marks)])
def test_the_check_can_fail(implementation: Any) -> None:
    """Controls: adapters of two experts swapped, another scale, another routing, and other columns of the gate."""
    case = Case(sizes=(5, 2, 3, 8, 4))
    values, index = operands(case, dtype=torch.float32), choices(case)
    truth = run(by_token, case, values, index)

    def error(case: Case, values: dict[str, torch.Tensor], index: torch.Tensor) -> float:
        return worst(run(op(implementation), case, values, index, torch.float32), truth)

    assert error(case, values, index) <= FLOAT32
    assert error(case, other_lora(values, case), index) > 1e-2
    assert error(case, {**values, "inner.b": values["inner.b"] * 1.1}, index) > 1e-2
    assert error(case, values, index.flip(0)) > 1e-2
    assert error(replace(case, gate=Gate("silu", "interleaved")), values, index) > 1e-2


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=ON_CPU.marks)])
@pytest.mark.parametrize(
    ("weights", "lora"), [(torch.float32, torch.float32), (torch.float16, None), (None, torch.float32)]
)
def test_operands_of_several_dtypes(implementation: Any, weights: torch.dtype | None, lora: torch.dtype | None) -> None:
    """Each gradient has its operand's dtype, which ``run`` checks."""
    case = Case(weights_dtype=weights, lora_dtype=lora, bias=True, sizes=(13, 2, 5, 24, 16))
    values, index = operands(case, dtype=torch.float16), choices(case)
    truth = run(by_token, replace(case, weights_dtype=None, lora_dtype=None), values, index)
    actual = run(op(implementation), case, values, index, torch.float16)
    assert worst(actual, truth) <= 1e-2


def test_which_implementation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels refuse what they don't support if they were chosen by name; on a CPU, ``auto`` is torch."""
    from fastpack.ops.kernels import grouped_matmul as kernels

    calls = count_calls(monkeypatch, kernels, "grouped_matmul")
    case = Case(sizes=(2, 1, 3, 8, 4))
    values, index = operands(case, dtype=torch.float32), choices(case)
    for implementation, expected in (("torch", False), ("auto", torch.cuda.is_available()), ("triton", True)):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        run(op(implementation), case, values, index, torch.float32, device=device)  # type: ignore[arg-type]
        assert bool(calls) == expected
        calls.clear()
    with pytest.raises(ValueError, match=r"experts got torch.float64, but supports float32"):
        op("triton")(case, values, index)
    odd = Case(sizes=ODD_SIZES[0])
    leaves = {name: value.float() for name, value in operands(odd).items()}
    with pytest.raises(ValueError, match=r"rows of \d+ torch.float32, but needs multiples of 16 bytes"):
        op("triton")(odd, leaves, choices(odd))
