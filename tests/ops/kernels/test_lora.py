"""LoRA matmuls: the kernels against torch, through Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpack.ops.linear import lora_matmul as updates
from fastpack.ops.linear import projections as projections_module
from fastpack.ops.linear.operands import Lora, Projection
from fastpack.ops.linear.projections import project

pytest.importorskip("triton")
from fastpack.ops.kernels import lora

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter only")), GPU]
SIZES, RANKS = [200, 136, 1, 384], [4, 16, 3, 20]
"""Four projections: one more than a launch takes."""
TOKENS = [1, 70, 300]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    return str(request.param)


def drawn(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device).to(torch.float32 if device == "cpu" else torch.bfloat16)


def rows(tokens: int, size: int, device: str) -> Tensor:
    """Return a part of a wider tensor, like the output of a fused projection."""
    return drawn(tokens, size + 24, device=device)[:, 8 : 8 + size]


def side_by_side(tokens: int, device: str) -> list[Tensor]:
    return list(drawn(tokens, sum(RANKS), device=device).split(RANKS, 1))


def check(result: list[Tensor], theirs: Callable[[Any], Tensor], expected: list[Tensor]) -> None:
    """Check that the results are as close to the truth as torch's matmul, which adds in another order."""
    for i, (ours, right) in enumerate(zip(result, expected, strict=True)):
        size = right.abs().max()
        error, plain = ((x.double() - right).abs().max() / size for x in (ours, theirs(i)))
        assert error <= max(1.5 * plain, torch.finfo(torch.float32).eps * 16), (i, error, plain)
        assert size > 0


@pytest.mark.parametrize("tokens", TOKENS)
def test_shrink(tokens: int, device: str) -> None:
    xs = [rows(tokens, size, device) for size in SIZES]
    weights = [drawn(size, rank, device=device) for size, rank in zip(SIZES, RANKS, strict=True)]
    weights[1] = drawn(RANKS[1], SIZES[1], device=device).t()
    scales = [1.0, 2.0, 0.5, 3.0]
    outs = side_by_side(tokens, device)
    lora.shrink(xs, weights, scales, outs)
    truth = [s * (x.double() @ w.double()) for s, x, w in zip(scales, xs, weights, strict=True)]
    check(outs, lambda i: updates.scaled_mm(xs[i], weights[i], scales[i], torch.empty_like(outs[i])), truth)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_expand(tokens: int, in_place: bool, device: str) -> None:
    lows = side_by_side(tokens, device)
    factors = [drawn(size, rank, device=device).t() for size, rank in zip(SIZES, RANKS, strict=True)]
    bases = [rows(tokens, size, device) if i % 2 else None for i, size in enumerate(SIZES)]
    truth = [
        t.double() @ w.double() + (0 if b is None else b.double()) for t, w, b in zip(lows, factors, bases, strict=True)
    ]
    plain = [t @ w if b is None else torch.addmm(b, t, w) for t, w, b in zip(lows, factors, bases, strict=True)]
    outs = [b if in_place and b is not None else p.new_full(p.shape, 9.0) for b, p in zip(bases, plain, strict=True)]
    lora.expand(lows, factors, outs, bases)
    check(outs, plain.__getitem__, truth)


@pytest.mark.parametrize("tokens", TOKENS)
def test_reduce(tokens: int, device: str) -> None:
    xs, lows = [rows(tokens, size, device) for size in SIZES], side_by_side(tokens, device)
    outs = [torch.full((size, rank), 9.0, device=device) for size, rank in zip(SIZES, RANKS, strict=True)]
    outs[0] = torch.full((RANKS[0], SIZES[0]), 9.0, device=device).t()
    lora.reduce(xs, lows, outs)
    truth = [x.double().t() @ t.double() for x, t in zip(xs, lows, strict=True)]
    check(outs, lambda i: updates._mm_float32(xs[i].t(), lows[i]), truth)


def test_rows_that_do_not_count_are_left_out(device: str) -> None:
    """These rows are not read. The results of ``shrink`` are zeros there."""
    count = torch.tensor([70], dtype=torch.int32, device=device)
    xs, lows = [rows(150, size, device) for size in SIZES], side_by_side(150, device)
    weights = [drawn(size, rank, device=device) for size, rank in zip(SIZES, RANKS, strict=True)]
    outs = side_by_side(150, device)
    alone = [out[:70].clone() for out in outs]
    lora.shrink([x[:70] for x in xs], weights, [2.0] * 4, alone)
    result = [torch.full((size, rank), 9.0, device=device) for size, rank in zip(SIZES, RANKS, strict=True)]
    want = [torch.empty_like(out) for out in result]
    lora.reduce([x[:70] for x in xs], [t[:70] for t in lows], want)
    for tensor in (*xs, *lows):
        tensor[70:] = float("nan")
    lora.reduce(xs, lows, result, count)
    lora.shrink(xs, weights, [2.0] * 4, outs, count)
    assert all(torch.equal(out[:70], right) and not out[70:].any() for out, right in zip(outs, alone, strict=True))
    assert all(torch.equal(ours, right) for ours, right in zip(result, want, strict=True))


def test_no_tokens(device: str) -> None:
    xs, lows = [rows(0, size, device) for size in SIZES], side_by_side(0, device)
    outs = [torch.full((size, rank), 9.0, device=device) for size, rank in zip(SIZES, RANKS, strict=True)]
    lora.reduce(xs, lows, outs)
    assert not any(out.any() for out in outs)
    lora.expand(lows, [out.t() for out in outs], xs, [None] * len(xs))
    lora.shrink(xs, outs, [1.0] * len(xs), lows)


def test_a_wrong_scale_is_seen(device: str) -> None:
    """Negative control of ``check``."""
    x, weight, out = rows(70, 64, device), drawn(64, 8, device=device), drawn(70, 8, device=device)
    lora.shrink([x], [weight], [1.01], [out])
    with pytest.raises(AssertionError):
        check([out], lambda _: x @ weight, [x.double() @ weight.double()])


def group(device: str, rank: int, ready: torch.dtype) -> tuple[Tensor, list[Projection]]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(ready).requires_grad_()

    built = [
        Projection(leaf(size, 64).detach(), ready, lora=Lora(leaf(rank, 64), leaf(size, rank), 2.0))
        for size in (64, 32, 32)
    ]
    return leaf(70, 64), built


def gradients(x: Tensor, projections: list[Projection], residual: Tensor | None, implementation: Any) -> list[Tensor]:
    outs, _ = project(x, projections, residual=residual, implementation=implementation)
    expected = [x, *(t for p in projections if p.lora is not None for t in (p.lora.a, p.lora.b))]
    result = torch.autograd.grad(outs, expected, [torch.ones_like(out) for out in outs])
    return [*outs, *result]


@pytest.mark.parametrize(("rank", "names"), [(8, ["expand", "shrink", "reduce"]), (200, [])])
def test_a_group_runs_them(rank: int, names: list[str], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, projections = group(device, rank, torch.float32)
    expected = gradients(x, projections, None, "torch")
    calls: list[str] = []
    monkeypatch.setattr(lora, "processors", lambda _: 2)  # small sums are torch's where more would idle
    for name in ("expand", "shrink", "reduce"):
        stock = getattr(lora, name)
        monkeypatch.setattr(lora, name, lambda *a, stock=stock, name=name, **k: (calls.append(name), stock(*a, **k)))
    result = gradients(x, projections, None, "triton")
    assert calls == names
    for ours, right in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)


def test_who_is_served(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels reject ranks that don't fit registers, sums in too few programs, and mixed dtypes."""
    xs, lows = [rows(300, 384, device)], [drawn(300, 16, device=device)]
    monkeypatch.setattr(lora, "processors", lambda _: 12)
    assert all(lora.serves(name, xs, lows) for name in ("expand", "shrink", "reduce"))
    assert not any(lora.serves(name, xs, [drawn(300, 144, device=device)]) for name in ("expand", "shrink", "reduce"))
    monkeypatch.setattr(lora, "processors", lambda _: 20)
    assert [lora.serves(name, xs, lows) for name in ("expand", "shrink", "reduce")] == [True, False, False]
    assert updates.lora_kernels_allowed("triton", xs, lows)
    assert not updates.lora_kernels_allowed("triton", [xs[0].to(torch.float16)], lows)
    assert not updates.lora_kernels_allowed("triton", [xs[0].double()], [lows[0].double()])
    assert not updates.lora_kernels_allowed("triton", [xs[0].t()], lows)


def test_a_residual_is_added_and_left_as_it_was(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, projections = group(device, 8, torch.float32)
    residual = torch.randn(70, 64, device=device)
    before = residual.clone()
    expected = gradients(x, projections[:1], residual, "torch")
    calls: list[int] = []
    stock = lora.expand
    monkeypatch.setattr(lora, "expand", lambda *a: (calls.append(len(a[0])), stock(*a)))
    result = gradients(x, projections[:1], residual, "triton")
    assert calls == [1]
    assert torch.equal(residual, before)
    for ours, right in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("same", [True, False])
def test_gradients_have_the_dtype_of_parameters(
    same: bool, implementation: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all A and B have one dtype, their gradients are rounded to it once; else they stay in float32."""
    x, projections = group(device, 8, torch.bfloat16)
    if not same:
        first = projections[0].lora
        assert first is not None
        changed = Lora(first.a.detach().float().requires_grad_(), first.b, first.scale)
        projections[0] = replace(projections[0], lora=changed)
    inputs: list[list[Tensor | None]] = []
    stock = projections_module.update_gradients

    def update_gradients(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        inputs.append(args[6])

    monkeypatch.setattr(projections_module, "update_gradients", update_gradients)
    monkeypatch.setattr(lora, "processors", lambda _: 2)
    result = gradients(x, projections, None, implementation)
    (built,) = inputs
    dtypes = {gradient.dtype for gradient in built if gradient is not None}
    assert dtypes == {torch.bfloat16 if same else torch.float32}
    leaves = [t for p in projections if p.lora is not None for t in (p.lora.a, p.lora.b)]
    for ours, leaf in zip(result[len(projections) + 1 :], leaves, strict=True):
        assert ours.dtype == leaf.dtype
        assert ours.abs().max() > 0
