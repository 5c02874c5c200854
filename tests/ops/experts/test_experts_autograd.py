"""A block of experts in autograd: what is frozen, what is not contiguous, what is kept, and what is never made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from expert_cases import EVERYTHING, Case, by_token, choices, cotangent, op, operands, run, subsets, worst
from op_checks import ON_CPU, count_calls
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fastpack.ops.experts import layer

EXACT, FLOAT32 = 1e-12, 2e-5
TRITON = pytest.param("triton", marks=ON_CPU.marks)
IMPLEMENTATIONS = ["torch", TRITON]
NAMES = list(operands(EVERYTHING))


def leaves_of(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    values = operands(case, dtype=dtype)
    return {name: value.to(case.dtype_of(name, dtype)).requires_grad_() for name, value in values.items()}


# --- what trains ------------------------------------------------------------------------------------------------------


def test_frozen_operands() -> None:
    """Whatever needs gradients gets the same ones, and nothing else gets any."""
    values, index = operands(EVERYTHING), choices(EVERYTHING)
    truth = run(by_token, EVERYTHING, values, index)
    for trained in subsets(NAMES, 60):
        actual = run(op("torch"), EVERYTHING, values, index, trained=trained)
        assert actual.keys() == {"out", *trained}
        assert worst(actual, {name: truth[name] for name in actual}) <= EXACT, trained


@ON_CPU.marks[0]
def test_frozen_operands_by_kernels() -> None:
    values, index = operands(EVERYTHING, dtype=torch.float32), choices(EVERYTHING)
    truth = run(by_token, EVERYTHING, values, index)
    for trained in (["x"], ["weights"], ["inner.weight", "down.bias"], [n for n in NAMES if n.endswith((".a", ".b"))]):
        actual = run(op("triton"), EVERYTHING, values, index, torch.float32, trained=trained)
        assert actual.keys() == {"out", *trained}
        assert worst(actual, {name: truth[name] for name in actual}) <= FLOAT32, trained


def test_nothing_trains() -> None:
    values, index = operands(EVERYTHING), choices(EVERYTHING)
    out = op("torch")(EVERYTHING, values, index)
    assert not out.requires_grad
    assert worst({"out": out}, {"out": by_token(EVERYTHING, values, index)}) <= EXACT


def test_gradients_are_accumulated() -> None:
    leaves, index = leaves_of(EVERYTHING), choices(EVERYTHING)
    block = op("torch")
    once = run(block, EVERYTHING, operands(EVERYTHING, dtype=torch.float32), index, torch.float32)
    for _ in range(2):
        out = block(EVERYTHING, leaves, index)
        out.backward(cotangent(out))
    assert worst({name: leaf.grad for name, leaf in leaves.items()}, {n: 2 * once[n] for n in leaves}) <= 1e-6  # type: ignore[misc]


def test_checkpointing_leaves_the_last_matmul_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recomputation stops where all saved tensors are there, and has the same bits."""
    calls = count_calls(monkeypatch, layer, "grouped_matmul")
    index, leaves = choices(EVERYTHING), [leaves_of(EVERYTHING), leaves_of(EVERYTHING)]
    counts = []
    for each, again in zip(leaves, (False, True), strict=True):
        calls.clear()
        block = partial(op("torch"), EVERYTHING, each, index)
        out = checkpoint(block, use_reentrant=False) if again else block()
        before = len(calls)
        out.backward(cotangent(out))
        counts.append((before, len(calls) - before))
    (forward, backward), (checkpointed, with_recomputation) = counts
    assert (forward, checkpointed, with_recomputation) == (4, 4, backward + 3)
    assert all(torch.equal(leaf.grad, leaves[1][name].grad) for name, leaf in leaves[0].items())  # type: ignore[arg-type]


# --- memory layouts ---------------------------------------------------------------------------------------------------


def strided(value: Tensor) -> Tensor:
    """Return the same values in a tensor whose last dimension has gaps."""
    wide = value.new_full((*value.shape, 2), 77.0)
    wide[..., 0] = value
    assert not wide[..., 0].is_contiguous()
    return wide[..., 0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("how", ["strided", "transposed"])
def test_operands_that_are_not_contiguous(how: str, implementation: Any) -> None:
    leaves, index = leaves_of(EVERYTHING), choices(EVERYTHING)

    def block(case: Case, leaves: dict[str, Tensor], index: Tensor) -> Tensor:
        change = strided if how == "strided" else lambda x: x.mT.contiguous().mT
        index = index.t().contiguous().t() if how == "transposed" else strided(index.float()).to(index.dtype)
        return op(implementation)(case, {name: change(leaf) for name, leaf in leaves.items()}, index)

    values = {name: leaf.detach().double() for name, leaf in leaves.items()}
    truth = run(by_token, EVERYTHING, values, index)
    assert worst(run(block, EVERYTHING, values, index, torch.float32), truth) <= FLOAT32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("how", ["expanded", "transposed", "strided"])
def test_gradients_that_are_not_contiguous(how: str, implementation: Any) -> None:
    leaves, index = leaves_of(EVERYTHING), choices(EVERYTHING)

    def gradients(grad: Tensor) -> dict[str, Tensor]:
        out = op(implementation)(EVERYTHING, leaves, index)
        before = grad.clone()
        result = dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], grad), strict=True))
        assert torch.equal(grad, before), "nothing is written over it"
        return result

    tokens, _, _, hidden, _ = EVERYTHING.sizes
    torch.manual_seed(0)
    grad = {
        "expanded": torch.tensor(0.7).expand(tokens, hidden),
        "transposed": torch.randn(hidden, tokens).t(),
        "strided": strided(torch.randn(tokens, hidden)),
    }[how]
    assert not grad.is_contiguous()
    for ours, right in zip(gradients(grad).values(), gradients(grad.contiguous()).values(), strict=True):
        assert torch.equal(ours, right)


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_second_backward(implementation: Any, lora: bool) -> None:
    """It finds the tensors that were saved as they were, and gives the same bits; operands are never written."""
    case = EVERYTHING if lora else replace(EVERYTHING, ranks=(0, 0))
    leaves, index = leaves_of(case), choices(case)
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    out = op(implementation)(case, leaves, index)
    inputs, grad = [*leaves.values()], cotangent(out)
    first = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    again = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    last = torch.autograd.grad(out, inputs, grad)
    for one, two, three in zip(first, again, last, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert all(torch.equal(leaf, before[name]) for name, leaf in leaves.items())
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, grad)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_two_runs_give_the_same_bits(implementation: Any) -> None:
    """Checkpointing computes a block again, and must find what it had found."""
    values, index = operands(EVERYTHING, dtype=torch.float32), choices(EVERYTHING)
    first, again = (run(op(implementation), EVERYTHING, values, index, torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool) -> None:
    def block(case: Case, leaves: dict[str, Tensor], index: Tensor) -> Tensor:
        names = list(leaves)

        def inside(*values: Tensor) -> Tensor:
            return op("torch")(case, dict(zip(names, values, strict=True)), index)

        result: Tensor = torch.utils.checkpoint.checkpoint(inside, *leaves.values(), use_reentrant=reentrant)
        return result

    values, index = operands(EVERYTHING), choices(EVERYTHING)
    stock, ours = (run(each, EVERYTHING, values, index) for each in (op("torch"), block))
    assert all(torch.equal(stock[name], ours[name]) for name in stock)


def test_gradients_of_gradients_are_refused() -> None:
    leaves, index = leaves_of(EVERYTHING), choices(EVERYTHING)
    (grad,) = torch.autograd.grad(op("torch")(EVERYTHING, leaves, index).sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice.*fastpack\.unpatch"):
        grad.square().sum().backward()


# --- what is never made -----------------------------------------------------------------------------------------------


class NewTensors(TorchDispatchMode):
    """Record the elements of each new tensor; views are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.elements.append(x.untyped_storage().nbytes() // x.element_size())
        return result


WIDE = Case(sizes=(3, 2, 8, 96, 64), ranks=(2, 2))
"""All but its stacks, adapters of padded ranks included, is smaller than half of a stack."""
STACK = 8 * 96 * 64
"""The elements of the smaller stack."""


@contextmanager
def no_tensor_of_a_stack(expected: int = 0) -> Iterator[None]:
    with NewTensors() as new:
        yield
    assert new.elements
    large = [elements for elements in new.elements if elements >= STACK / 2]
    assert len(large) == expected, large


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_frozen_stacks_are_only_read(transposed: bool, implementation: Any) -> None:
    case = replace(WIDE, transposed=transposed, bias=True)
    values, index = operands(case, dtype=torch.float32), choices(case)
    trained = [name for name in values if not name.endswith("weight")]
    leaves = {name: value.float().requires_grad_(name in trained) for name, value in values.items()}
    with no_tensor_of_a_stack():
        out = op(implementation)(case, leaves, index)
        out.sum().backward()
    assert all((leaf.grad is not None) == (name in trained) for name, leaf in leaves.items())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_stacks_are_made_once(implementation: Any) -> None:
    leaves, index = leaves_of(WIDE), choices(WIDE)
    with no_tensor_of_a_stack(expected=2):
        torch.autograd.grad(op(implementation)(WIDE, leaves, index).sum(), [*leaves.values()])


def test_the_watch_sees_dense_updates() -> None:
    """The control: the definition makes an update, and a gradient, of each stack."""
    leaves, index = leaves_of(WIDE), choices(WIDE)
    for name in ("inner.weight", "down.weight"):
        leaves[name].requires_grad_(False)
    with NewTensors() as new:
        by_token(WIDE, leaves, index).sum().backward()
    assert sum(elements >= STACK for elements in new.elements) >= 4
