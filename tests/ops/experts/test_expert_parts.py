"""The parts of a block of experts: routing, grouped matmuls, and gated units; kernels against definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import GATES, gated
from op_checks import DEVICES, relative
from torch import Tensor

from fastpack.ops.autograd import clamp_passes_its_limits
from fastpack.ops.expert_operands import Gate, Routing, Stack
from fastpack.ops.experts.gate import gate_backward, gate_forward
from fastpack.ops.experts.grouped_matmul import grouped_matmul, grouped_outer
from fastpack.ops.experts.lora_factors import pack_factors, padded_rank
from fastpack.ops.experts.routing import gather_rows, route, row_weights, sum_rows

pytest.importorskip("triton")
from fastpack.ops.kernels import expert_gate
from fastpack.ops.kernels.routing import TILE_ROWS

FLOAT32 = 1e-5
BOTH = ["torch", "triton"]


def drawn(tokens: int, count: int, most: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(most, (tokens, count), generator=torch.Generator().manual_seed(seed)).to(dtype)


def of_expert(routing: Routing, expert: int) -> slice:
    ends = [0, *routing.offsets.tolist()]
    return slice(ends[expert], ends[expert + 1])


# --- routing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(
    ("tokens", "count", "experts", "most"),
    [(1, 1, 1, 1), (50, 2, 5, 5), (50, 2, 5, 8), (5, 3, 4, 1), (700, 4, 7, 9), (20, 8, 256, 256), (3, 2, 300, 700)],
)
def test_rows_are_sorted_by_expert(
    tokens: int, count: int, experts: int, most: int, implementation: Any, device: str
) -> None:
    """The sort is stable; slots of no expert are last; tiles list each row of an expert once."""
    for dtype in (torch.int64, torch.int32):
        index = drawn(tokens, count, most, dtype=dtype)
        routing = route(index.to(device), experts, implementation=implementation)
        slots = index.flatten().clamp(max=experts).tolist()
        here = sorted((slot for slot in range(len(slots)) if slots[slot] < experts), key=slots.__getitem__)
        assert routing.order.tolist()[: len(here)] == here
        assert sorted(routing.order.tolist()) == list(range(len(slots)))
        ends = torch.tensor([slots.count(expert) for expert in range(experts)]).cumsum(0)
        assert routing.offsets.tolist() == ends.tolist()
        assert routing.for_kernels == (implementation == "triton")
        if routing.tiles is not None and routing.tile_count is not None:
            rows: list[tuple[int, int]] = []
            for expert, first in routing.tiles[: int(routing.tile_count)].tolist():
                of = range(len(slots))[of_expert(routing, expert)]
                rows += [(expert, row) for row in range(first, min(first + TILE_ROWS, of.stop))]
            assert rows == [(slots[slot], row) for row, slot in enumerate(here)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("width", [4, 1100])
def test_rows_and_sums(width: int, implementation: Any, device: str) -> None:
    """What rows of no expert hold does not matter, and sums have a fixed order."""
    torch.manual_seed(0)
    index = drawn(6, 3, 7).to(device)
    routing = route(index, 5, implementation=implementation)
    x, weights = torch.randn(6, width, device=device), torch.rand(6, 3, device=device)
    tokens = (routing.order // 3).long()
    assert torch.equal(gather_rows(x, routing), x[tokens])
    assert torch.equal(row_weights(weights, routing)[:, 0], weights.flatten()[routing.order.long()])

    y = torch.randn(18, width, device=device)
    y[int(routing.offsets[-1]) :] = float("nan")
    slots = torch.empty_like(y)
    slots[routing.order.long()] = y.nan_to_num()
    slots = slots.view(6, 3, width)
    for factors in (None, weights, weights.half()):
        by_slot = slots if factors is None else slots * factors[..., None].float()
        total = (by_slot[:, 0] + by_slot[:, 1]) + by_slot[:, 2]
        assert relative(sum_rows(y, routing, factors), total) <= 1e-6
    assert (index >= 5).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("each", [1, 8])
@pytest.mark.usefixtures("unwritten_memory_is_not_finite")
def test_kernels_write_one_tile_of_rows_of_no_expert(each: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most experts are another rank's, and have negative numbers or high ones."""
    monkeypatch.setattr(expert_gate, "_rows_of_a_program", lambda _: each)
    torch.manual_seed(0)
    tokens, gate = 150, Gate("silu")
    index = (drawn(tokens, 4, 12) - 4).to(device)
    routing = route(index, 3, implementation="triton")
    real, total = int(routing.offsets[-1]), 4 * tokens
    written = real + TILE_ROWS
    assert 0 < real < written < total
    x, weights = torch.randn(tokens, 8, device=device), torch.rand(tokens, 4, device=device)
    n = gather_rows(x, routing)
    a = gate_forward(n, gate, routing)
    slots = routing.order.long()
    of_rows = x[slots // 4]
    assert torch.equal(n[:written], of_rows[:written])
    assert relative(a[:real], gated(of_rows[:real], gate)) <= FLOAT32
    grad, result = torch.randn(total, 4, device=device), n.clone()
    of_n, of_weights = gate_backward(grad, result, weights, gate, routing, keep=True, overwrite=True)
    assert of_weights.flatten()[slots[:real]].all()
    assert not of_weights.flatten()[slots[real:]].any()
    for name, rows in {"a": a, "grad": grad, "of n": of_n}.items():
        assert rows[:real].any(), name
        assert not rows[real:written].any(), name
    for name, rows in {"n": n, "a": a, "of n": of_n}.items():
        assert rows[written:].isnan().all(), f"{name} is never written"


# --- grouped matmuls --------------------------------------------------------------------------------------------------


def a_stack(experts: int, height: int, width: int, transposed: bool, device: str) -> Stack:
    shape = (experts, width, height) if transposed else (experts, height, width)
    return Stack(torch.randn(shape, device=device), transposed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "most", "height", "width", "rank", "bias"),
    [(9, 6, 4, 8, 0, False), (9, 6, 68, 300, 16, True), (500, 4, 36, 20, 48, True), (5, 9, 12, 132, 0, True)],
)
def test_each_row_is_multiplied_with_its_expert_s_matrix(
    tokens: int,
    most: int,
    height: int,
    width: int,
    rank: int,
    bias: bool,
    transposed: bool,
    implementation: Any,
    device: str,
) -> None:
    """Rows of no expert are not read: they are NaN here. An expert has several tiles, and several columns."""
    torch.manual_seed(0)
    index = drawn(tokens, 1, most).to(device)
    index[: tokens // 2] = 1
    routing = route(index, 5, implementation=implementation)
    stack = a_stack(5, height, width, transposed, device)
    x, biases = torch.randn(tokens, height, device=device), torch.randn(5, width, device=device) if bias else None
    low, factors = torch.randn(tokens, rank, device=device), a_stack(5, rank, width, not transposed, device)
    real = int(routing.offsets[-1])
    x[real:], low[real:] = float("nan"), float("nan")
    update = (low, factors) if rank else None
    truth = torch.zeros(real, width, dtype=torch.float64, device=device)
    for expert in range(5):
        rows = of_expert(routing, expert)
        truth[rows] = x[rows].double() @ stack.of(expert).double()
        truth[rows] += 0 if biases is None else biases[expert].double()
        truth[rows] += low[rows].double() @ factors.of(expert).double() if rank else 0
    out = grouped_matmul(x, stack, routing, bias=biases, update=update)
    assert relative(out[:real], truth) <= FLOAT32
    if not rank and biases is None:
        assert relative(grouped_matmul(x, stack, routing, scale=1.7)[:real], truth * 1.7) <= FLOAT32
    flipped = grouped_matmul(out, stack.flipped(), routing)
    back = torch.cat([out[of_expert(routing, e)].double() @ stack.of(e).double().t() for e in range(5)])
    assert relative(flipped[:real], back) <= FLOAT32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(("tokens", "height", "width"), [(9, 4, 8), (300, 36, 20), (70, 140, 260)])
def test_outer_products_of_each_expert_s_rows(
    tokens: int, height: int, width: int, implementation: Any, device: str
) -> None:
    """Experts without rows get zeros; rows of no expert add nothing, and x may hold anything there."""
    torch.manual_seed(0)
    index = drawn(tokens, 1, 6).to(device)
    index[index == 2] = 1
    routing = route(index, 5, implementation=implementation)
    x, y = torch.randn(tokens, height, device=device), torch.randn(tokens, width, device=device)
    x[int(routing.offsets[-1]) :] = float("nan")
    rows = [of_expert(routing, e) for e in range(5)]
    truth = torch.stack([x[each].double().t() @ y[each].double() for each in rows])
    wide = torch.full((height, 5, 2 * width), 7.0, device=device)
    views = {"new": torch.empty(5, height, width, device=device), "strided": wide[..., ::2].transpose(0, 1)}
    views["fewer columns of x"] = torch.empty(5, height - 3, width, device=device)
    views["strided, of another dtype"] = torch.full((width, height, 5), 7.0, device=device).half().permute(2, 1, 0)
    for name, out in views.items():
        result = grouped_outer(x, y, routing, out)
        assert result.data_ptr() == out.data_ptr()
        assert not out[2].any()
        bound = FLOAT32 if out.dtype == torch.float32 else 1e-3
        assert relative(out, truth[:, : out.shape[1]]) <= bound, name
    assert (wide[..., 1::2] == 7).all(), "nothing is written between"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(
    ("experts", "rank", "height", "width"), [(5, 3, 12, 20), (1, 16, 4, 8), (7, 33, 40, 4), (2, 70, 8, 8)]
)
def test_factors_are_packed(experts: int, rank: int, height: int, width: int, implementation: Any, device: str) -> None:
    """In PEFT's A experts are one after the other; in B the expert is the fastest index."""
    torch.manual_seed(0)
    a, b = torch.randn(experts * rank, height, device=device), torch.randn(width, rank * experts, device=device)
    right_a = a.view(experts, rank, height)
    right_b = torch.stack([b[:, expert::experts] for expert in range(experts)])
    for given_a, given_b in ((a, b), (a.t().contiguous().t(), b.t().contiguous().t())):
        for_kernels = implementation == "triton"
        of_a, of_b = pack_factors(given_a, given_b, experts, torch.float16, for_kernels=for_kernels)
        assert of_a.is_contiguous()
        assert of_b.is_contiguous()
        assert torch.equal(of_a[:, :rank], right_a.half())
        assert torch.equal(of_b[..., :rank], right_b.half())
        assert not of_a[:, rank:].any()
        assert not of_b[..., rank:].any()
        assert of_a.shape[1] == of_b.shape[2] == (padded_rank(rank) if for_kernels else rank)


# --- gated units ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("width", [5, 1030])
@pytest.mark.parametrize("gate", GATES)
def test_gated_units(gate: str, width: int, implementation: Any, device: str) -> None:
    """Some values are exactly at the limit, where torch's clamp has a gradient up to 2.13. Other rows get zeros."""
    torch.manual_seed(0)
    kind, index = GATES[gate], drawn(4, 2, 4).to(device)
    routing = route(index, 3, implementation=implementation)
    real = int(routing.offsets[-1])
    assert real < 8
    inner = torch.randn(8, width * (1 if kind.columns == "plain" else 2), device=device)
    if kind.limit < 10:
        inner[0] = kind.limit
        inner[1] = -kind.limit
    weights, grad = torch.rand(4, 2, device=device), torch.randn(8, width, device=device)
    for tensor in (inner, grad):
        tensor[real:] = float("nan")
    slots = routing.order.long()

    wide = inner[:real].double().requires_grad_()
    truth = gated(wide, kind)
    by_row = weights.flatten().double()[slots[:real], None]
    (of_inner,) = torch.autograd.grad(truth, wide, grad[:real].double() * by_row)
    of_weights = torch.zeros(8, dtype=torch.float64, device=device)
    of_weights[slots[:real]] = (grad[:real].double() * truth.detach()).sum(1)

    a = gate_forward(inner, kind, routing)
    assert relative(a[:real], truth) <= FLOAT32
    for overwrite, keep in ((False, True), (True, False), (True, True)):
        given, result = inner.clone(), grad.clone()
        ours, ours_of_weights = gate_backward(result, given, weights, kind, routing, keep=keep, overwrite=overwrite)
        assert relative(ours[:real], of_inner) <= FLOAT32
        assert not ours[real:].any()
        assert relative(ours_of_weights.flatten(), of_weights) <= FLOAT32
        if keep:
            assert relative(result[:real], truth * by_row) <= FLOAT32, "each row's weight times a"
            assert not result[real:].any()
        if not overwrite:
            assert torch.equal(given[:real], inner[:real])


@pytest.mark.parametrize("device", DEVICES)
def test_a_value_at_its_limit_has_the_gradient_of_torchs_clamp(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("fastpack.ops.kernels.expert_gate")
    kind = Gate("silu", limit=1.0)
    routing = route(torch.tensor([[0]], device=device), 1, implementation="triton")
    grad, weights = torch.ones(1, 4, device=device), torch.ones(1, 1, device=device)
    inner = torch.full((1, 8), 1.0, device=device)

    def slopes() -> Tensor:
        return gate_backward(grad.clone(), inner.clone(), weights, kind, routing, keep=False, overwrite=False)[0]

    leaf = inner.clone().requires_grad_()
    (truth,) = torch.autograd.grad(gated(leaf, kind).sum(), leaf)
    assert relative(slopes(), truth) <= FLOAT32 if truth.any() else not slopes().any()
    assert bool(truth.all()) == clamp_passes_its_limits()
    monkeypatch.setattr(kernels, "clamp_passes_its_limits", lambda: not clamp_passes_its_limits())
    assert (slopes() - truth).abs().min() > 0.1, "the control"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("gate", GATES)
def test_what_is_not_a_number_stays_so(gate: str, implementation: Any, device: str) -> None:
    """Clamps hide no NaN: a model that diverges shows it."""
    kind = GATES[gate]
    routing = route(torch.zeros(2, 1, dtype=torch.int64, device=device), 1, implementation=implementation)
    inner = torch.ones(2, 4, device=device)
    inner[1] = float("nan")
    a = gate_forward(inner, kind, routing)
    assert a[0].isfinite().all()
    assert a[1].isnan().all()


def test_the_widths_of_gates() -> None:
    assert Gate("silu").width(12) == Gate("silu", "interleaved").width(12) == 6
    assert Gate("relu2", "plain").width(12) == 12
