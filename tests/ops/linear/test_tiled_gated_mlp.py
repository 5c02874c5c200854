"""A gated MLP in tiles of tokens: the same result and gradients as in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastpack.ops.linear import gated_mlp as module
from fastpack.ops.linear.gated_mlp import gated_mlp, tile_rows
from fastpack.ops.linear.operands import Lora, Norm, Projection

T, H, SIZE = 700, 8, 12
TILE_BYTES = 4 * 200 * SIZE * 8
"""Of 200 tokens in float64: tiles have 256 tokens, and the last one has 188."""
TOLERANCE = 1e-12


class Case:
    """The operands of an MLP in float64, and the sizes of the tiles that ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, lora: bool, fused: bool, norm: bool, frozen: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, trained: bool = True) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(trained)

        def projection(out: int, size: int) -> Projection:
            update = Lora(draw(3, size), draw(out, 3), 0.5) if lora else None
            bias = draw(out, trained=not frozen) if not lora else None
            return Projection(draw(out, size, trained=not (lora or frozen)), torch.float64, bias, update)

        self.inner = [projection(2 * SIZE, H)] if fused else [projection(SIZE, H), projection(SIZE, H)]
        self.down, self.x = projection(H, SIZE), draw(T, H)
        self.norm = Norm(draw(H, trained=not frozen), 1e-6) if norm else None
        self.grad = draw(T, H, trained=False)
        self.sizes: list[int] = []
        forward = module.normalise
        monkeypatch.setattr(module, "normalise", lambda x, *args: self.sizes.append(len(x)) or forward(x, *args))

    @property
    def leaves(self) -> list[Tensor]:
        found: list[Any] = [self.x, None if self.norm is None else self.norm.weight]
        for each in (*self.inner, self.down):
            found += [each.weight, each.bias, *(() if each.lora is None else (each.lora.a, each.lora.b))]
        return [tensor for tensor in found if tensor is not None and tensor.requires_grad]

    def run(self, tile_bytes: int | None, **further: Any) -> list[Tensor]:
        """Return the result and all gradients."""
        self.sizes.clear()
        settings = {"norm": self.norm, "residual": True, **further}
        y = gated_mlp(self.x, self.inner, self.down, "silu", tile_bytes=tile_bytes, **settings)
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.grad)]


def errors(ours: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, want, strict=True)]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("fused", [False, True], ids=["two", "fused"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_the_same(lora: bool, fused: bool, norm: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, lora=lora, fused=fused, norm=norm, frozen=frozen)
    for residual in (True, False):
        want = case.run(None, residual=residual)
        assert case.sizes == [T]
        ours = case.run(TILE_BYTES, residual=residual)
        assert case.sizes == [256, 256, 188] * 2, "in the forward, and again in the backward"
        assert max(errors(ours, want)) <= TOLERANCE


def test_the_backwards_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a recomputation, nothing runs before the backward."""
    case = Case(monkeypatch, lora=True, fused=False, norm=True, frozen=False)
    want = case.run(None)
    ours = case.run(TILE_BYTES, need_output=False)
    assert case.sizes == [256, 256, 188]
    assert max(errors(ours[1:], want[1:])) <= TOLERANCE


def test_a_lost_tile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the last tile's gradient is zero."""
    case = Case(monkeypatch, lora=False, fused=False, norm=True, frozen=False)
    want = case.run(None)
    case.grad = case.grad.clone()
    case.grad[512:] = 0
    assert min(errors(case.run(TILE_BYTES), want)[1:]) > 100 * TOLERANCE


def test_hooks_of_parameters_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, lora=False, fused=False, norm=False, frozen=False)
    seen: list[Tensor] = []
    case.down.weight.register_hook(seen.append)
    want = case.run(None)
    ours = case.run(TILE_BYTES)
    assert len(seen) == 2
    assert max(errors(ours, want)) <= TOLERANCE


def test_retained_and_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, lora=False, fused=False, norm=True, frozen=False)
    y = gated_mlp(case.x, case.inner, case.down, "silu", norm=case.norm, tile_bytes=TILE_BYTES)
    first, second = (torch.autograd.grad(y, case.leaves, case.grad, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    (dx,) = torch.autograd.grad(y.sum(), [case.x], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        dx.square().sum().backward()


def test_dropout_is_not_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, lora=True, fused=False, norm=False, frozen=False)
    lora = case.down.lora
    assert lora is not None
    case.down = Projection(case.down.weight, torch.float64, lora=Lora(lora.a, lora.b, 0.5, dropout=0.3))
    case.run(TILE_BYTES)
    assert case.sizes == [T]


def test_tile_rows() -> None:
    gib = 2**30
    assert tile_rows(3_000, 14_336, torch.bfloat16, gib // 2) == 3_000
    assert tile_rows(9_362, 14_336, torch.bfloat16, gib // 2) == 9_362, "twice the bytes are not worth it"
    assert tile_rows(9_363, 14_336, torch.bfloat16, gib // 2) == 3_200
    for tokens in (30_000, 100_003, 450_000):
        rows = tile_rows(tokens, 14_336, torch.bfloat16, gib // 2)
        assert rows % 128 == 0
        assert 0.9 <= 4 * rows * 14_336 * 2 / (gib // 2) <= 1.1
