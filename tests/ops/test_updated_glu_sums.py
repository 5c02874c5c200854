"""Gated units' backward with LoRA's gradients on the way: against sums in float64, and through the whole MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpack.ops.gated_mlp import gated_mlp
from fastpack.ops.products import RowCount
from fastpack.ops.projection_parts import Lora, Norm, Projection
from fastpack.ops.updated_glu import Factors, sums_on_the_way, updated_backward

pytest.importorskip("triton")
from fastpack.ops import updates
from fastpack.ops.kernels import row_sums, thin
from fastpack.ops.kernels import updated_glu as kernels
from tests.ops.common import DEVICES, assert_no_worse, count_calls, relative

TYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@pytest.fixture(autouse=True)
def _on_hopper(request: pytest.FixtureRequest) -> None:
    on_gpu = "cuda" in request.node.callspec.params.values()
    if on_gpu and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("NO HOPPER HERE: on other GPUs sums are not made on the way")


def drawn(*shape: int, like: str, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=like).to(TYPES[like]).requires_grad_(grad)


def second_gradients(dtype: torch.dtype, grad: Tensor, gate: Tensor, up: Tensor, *of: Tensor) -> Tensor:
    """The definition, gradients of gate and up and h rounded to ``dtype`` where they would be written."""
    gate_thin, gate_wide, up_thin, up_wide, grad_thin, grad_wide = (factor.to(torch.float64) for factor in of)
    g = (gate.double() + gate_thin @ gate_wide).requires_grad_()
    u = (up.double() + up_thin @ up_wide).requires_grad_()
    h = torch.nn.functional.silu(g) * u
    dg, du = torch.autograd.grad(h, (g, u), grad.double() + grad_thin @ grad_wide)
    pairs = [(dg.t(), gate_thin), (du.t(), up_thin), (grad_thin.t(), h.detach())]
    return torch.cat([(a.to(dtype).double() @ b.to(dtype).double()).flatten() for a, b in pairs])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tokens", "width", "ranks", "real"),
    [(1, 8, (4, 4, 4), 1), (70, 200, (3, 5, 2), 70), (300, 130, (16, 16, 16), 170), (100, 129, (24, 32, 8), 100)],
)
def test_sums_are_the_definition(
    tokens: int, width: int, ranks: tuple[int, int, int], real: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    made = count_calls(monkeypatch, kernels, "make_parts")
    both = drawn(tokens, 2 * width, like=device)
    gate, up = both.chunk(2, -1)
    grad = drawn(tokens, width, like=device)
    thins = [drawn(tokens, rank + 5, like=device)[:, 2 : 2 + rank] for rank in ranks]
    wides = [(drawn(width, rank, like=device) * 0.3).t() for rank in ranks[:2]] + [drawn(ranks[2], width, like=device)]
    of_gate, of_up, of_grad = zip(thins, wides, strict=True)
    short = [tensor[:real] for tensor in (grad, gate, up)]
    flat = [factor for thin, wide in zip(thins, wides, strict=True) for factor in (thin[:real], wide)]
    truth = second_gradients(torch.float64, *short, *flat)
    plain = second_gradients(TYPES[device], *short, *flat)
    for tensor in (both, grad, *thins):
        tensor[real:] = float("nan")
    assert sums_on_the_way("triton", gate, of_gate, of_up, of_grad)
    kwargs: dict[str, Any] = {"recompute": False, "implementation": "triton"}
    kwargs["row_count"] = RowCount(torch.tensor([real], dtype=torch.int32, device=device), len(grad))

    def run(of_gate: Factors, dtype: torch.dtype) -> Tensor:
        out = (torch.full_like(gate, 9.0), torch.full_like(up, 9.0))
        given = grad, gate, up, "silu", of_gate, of_up, of_grad
        wanted = [(rank * width, dtype) for rank in ranks]
        h, sums = updated_backward(*given, out=out, sums=wanted, **kwargs)  # type: ignore[arg-type]
        assert h is None
        assert not any(tensor[real:].any() for tensor in out)
        assert [(s.numel(), s.dtype) for s in sums] == wanted
        return torch.cat(sums)

    found = run(of_gate, torch.float32)
    assert len(made) == 1
    assert (len(kernels.make_parts(gate, of_gate, of_up, of_grad)) > 1) == (tokens > kernels.BLOCK_T), "several spans"
    assert torch.equal(run(of_gate, torch.float32), found), "in a fixed order"
    assert torch.equal(run(of_gate, torch.float16), found.half()), "rounded once"
    at = 0
    for rank in ranks:  # each sum by itself: they are of different sizes
        one = slice(at, at := at + rank * width)
        ours, theirs = found[one], plain[one].float()
        if device == "cuda":  # dgate, dup and h are rounded alike, but for elements that lie between two numbers
            ours, theirs = ours.bfloat16(), theirs.bfloat16()
        assert_no_worse(ours, theirs, truth[one])
    assert relative(run((thins[0].flip(1), wides[0]), torch.float32), truth) > 1e-2, "the check can fail"


@pytest.mark.parametrize(
    ("width", "tokens", "spans"),
    [
        (14336, 2944, 7),
        (14336, 40, 2),
        (18944, 2944, 8),
        (53248, 2944, 8),
        (4864, 2944, 10),
        (128, 16, 1),
        (14336, 1, 1),
    ],
)
def test_rounds_of_programs_are_full(width: int, tokens: int, spans: int) -> None:
    """On a device of 132 processors with room for three programs each."""
    blocks = -(-width // kernels.BLOCK_I)
    found = kernels.spans_of_sums(tokens, blocks, 48, 396)
    assert found == spans


@pytest.mark.parametrize("device", DEVICES)
def test_what_asks_for_more_is_left_to_others(device: str) -> None:
    gate = drawn(20, 40, like=device)

    def update(rank: int) -> Factors:
        return drawn(20, rank, like=device), drawn(rank, 40, like=device)

    assert sums_on_the_way("triton", gate, update(4), update(32), update(4))
    assert not sums_on_the_way("triton", gate, update(4), update(33), update(4)), "registers"
    assert not sums_on_the_way("triton", gate, update(4), None, update(4)), "an update is missing"
    assert not sums_on_the_way("triton", gate[:0], update(4), update(4), update(4))
    assert not sums_on_the_way("torch", gate, update(4), update(4), update(4))
    if device == "cuda":
        wide = [(thin.float(), wide.float()) for thin, wide in (update(4), update(4), update(4))]  # type: ignore[misc]
        assert not sums_on_the_way("triton", gate.float(), *wide), (
            "exact float32 products are not those of the matrix units"
        )


T, H, INNER, RANK = 50, 24, 40, 3


def projection(out: int, size: int, device: str, lora_dtype: torch.dtype, **lora: Any) -> Projection:
    a, b = (drawn(*shape, like=device).to(lora_dtype).requires_grad_() for shape in ((RANK, size), (out, RANK)))
    return Projection(drawn(out, size, like=device), TYPES[device], None, Lora(a, b, 1.7, **lora))


FORMS: dict[str, Callable[[str], tuple[list[Projection], Projection]]] = {
    "two": lambda d: (
        [projection(INNER, H, d, torch.float32) for _ in range(2)],
        projection(H, INNER, d, torch.float32),
    ),
    "one to both": lambda d: ([projection(2 * INNER, H, d, TYPES[d])], projection(H, INNER, d, TYPES[d])),
    "of different dtypes": lambda d: (
        [projection(INNER, H, d, torch.float32) for _ in range(2)],
        projection(H, INNER, d, torch.float16),
    ),
    "B of gate is frozen": lambda d: FORMS["two"](d),
    "A of down is frozen": lambda d: FORMS["two"](d),
    "down's weight trains": lambda d: FORMS["two"](d),
    "dropout before down": lambda d: (FORMS["two"](d)[0], projection(H, INNER, d, torch.float32, dropout=0.5)),
}
WITHOUT = {"B of gate is frozen", "A of down is frozen", "dropout before down"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("retain", [False, True])
def test_the_mlp_s_gradients(form: str, retain: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch's products, and the kernel sums where it can and has to."""
    torch.manual_seed(0)
    inner, down = FORMS[form](device)
    assert inner[0].lora is not None
    assert down.lora is not None
    frozen = {"B of gate is frozen": inner[0].lora.b, "A of down is frozen": down.lora.a}.get(form)
    if frozen is not None:
        frozen.requires_grad_(False)
    if form == "down's weight trains":
        down.weight.requires_grad_()
    x, norm = drawn(T, H, like=device, grad=True), Norm(drawn(H, like=device, grad=True), 1e-6)
    wanted = [x, norm.weight, *(t for p in (*inner, down) for t in (p.weight, p.lora.a, p.lora.b) if p.lora)]  # type: ignore[union-attr]
    wanted = [tensor for tensor in wanted if tensor.requires_grad]
    cotangent = drawn(T, H, like=device)
    made, recomputed = count_calls(monkeypatch, kernels, "make_parts"), count_calls(monkeypatch, kernels, "backward")
    rounded = count_calls(monkeypatch, row_sums, "sum_rows")
    elsewhere = count_calls(monkeypatch, updates, "_over_tokens"), count_calls(monkeypatch, thin, "reduce")

    def gradients(implementation: Any, dtype: torch.dtype = TYPES[device]) -> list[Tensor]:
        torch.manual_seed(1)
        y = gated_mlp(x, inner, down, "silu", norm=norm, residual=True, implementation=implementation)
        found = torch.autograd.grad(y, wanted, cotangent, retain_graph=retain)
        if retain:  # nothing that a second backward needs was overwritten
            again = torch.autograd.grad(y, wanted, cotangent)
            assert all(map(torch.equal, again, found))
        return list(found)

    mine = gradients("triton")
    if form not in WITHOUT:
        assert len(made) == 1 + retain
        dtypes = [p.lora.a.dtype for p in (*inner, down) if p.lora is not None]
        several = [call[1] for call in rounded if len(call[0]) > 1]  # the norm's weight has one
        assert several == [dtypes] * (1 + retain), "to what each is wanted in"
        assert [len(calls) for calls in elsewhere] == [2 * (1 + retain), 0], "A of gate and up, and B of down, alone"
    assert bool(made) == (form not in WITHOUT)
    theirs = gradients("torch")
    assert all(
        call[8] == (form == "down's weight trains" or form in WITHOUT - {"A of down is frozen"}) for call in recomputed
    )
    assert len(recomputed) == 1 + retain
    for ours, right in zip(mine, theirs, strict=True):
        assert ours.dtype == right.dtype
        assert ours.is_contiguous()
        assert relative(ours, right) <= (1e-5 if device == "cpu" else 2e-2)
