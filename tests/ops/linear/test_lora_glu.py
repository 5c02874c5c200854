"""LoRA GLU: the kernel against the definition, through Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import relative
from torch import Tensor

from fastpack.ops.linear.gated_mlp import gated_mlp
from fastpack.ops.linear.lora_glu import Factors, lora_glu_backward, lora_glu_forward
from fastpack.ops.linear.operands import Lora, Norm, Projection
from fastpack.ops.row_count import RowCount

pytest.importorskip("triton")
from op_checks import count_calls

from fastpack.ops.kernels import lora_glu as kernels

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter only")), GPU]
TYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ACTIVATIONS: dict[Any, Any] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def low_rank_factors(tokens: int, width: int, rank: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return factors as a group has them: a slice of all low-rank factors side by side, and B transposed."""
    both = torch.randn(tokens, rank + 5, device=device).to(dtype)
    return both[:, 2 : 2 + rank], (torch.randn(width, rank, device=device) * 0.3).to(dtype).t()


def exact_update(update: Factors) -> Tensor | int:
    return 0 if update is None else update[0].double() @ update[1].double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tokens", "width", "rank", "which"),
    [(1, 8, 4, "gud"), (70, 200, 3, "gud"), (65, 129, 24, "g"), (3, 130, 16, "ud"), (0, 16, 4, "gu")],
)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_kernel_is_the_definition(kind: Any, tokens: int, width: int, rank: int, which: str, device: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    halves = torch.randn(tokens, 2 * width, device=device).to(dtype)
    gate, up = halves.chunk(2, -1)
    g, u, d = (
        low_rank_factors(tokens, width, rank, dtype, device) if letter in which else None for letter in ("g", "u", "d")
    )
    grad = torch.randn(tokens, width, device=device).to(dtype)

    wide_gate = (gate.double() + exact_update(g)).requires_grad_()
    wide_up = (up.double() + exact_update(u)).requires_grad_()
    truth = ACTIVATIONS[kind](wide_gate) * wide_up
    expected = torch.autograd.grad(truth, (wide_gate, wide_up), grad.double() + exact_update(d))

    def run(implementation: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        h = lora_glu_forward(gate, up, kind, g, u, implementation=implementation)
        out = (torch.full_like(gate, 9.0), torch.full_like(up, 9.0))
        again = lora_glu_backward(
            grad.clone(), gate, up, kind, g, u, d, out=out, recompute=True, implementation=implementation
        )
        return h, *out, again

    if not tokens:
        assert run("triton")[0].shape == (0, width)
        return
    plain, mine = run("torch"), run("triton")
    for ours, theirs, right in zip(mine, plain, (truth, *expected, truth), strict=True):
        assert ours is not None
        assert theirs is not None
        size = right.abs().max()
        error = (ours.double() - right).abs().max() / size
        allowed = 1e-5 if dtype == torch.float32 else 1.5 * (theirs.double() - right).abs().max() / size
        assert error <= allowed
    without = lora_glu_forward(gate, up, kind, None, None, implementation="torch")
    assert (without.double() - truth).abs().max() / truth.abs().max() > 1e-2, "the check can fail"


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_padding_are_left_out(device: str) -> None:
    """Those rows are not read, and their results are zeros."""
    torch.manual_seed(0)
    gate, up, grad = (torch.randn(150, 40, device=device) for _ in range(3))
    update = low_rank_factors(150, 40, 4, torch.float32, device)
    count = RowCount(torch.tensor([70], dtype=torch.int32, device=device), 150)

    def run(rows: int, count: RowCount | None) -> list[Tensor]:
        both = (update[0][:rows], update[1])
        parts = gate[:rows], up[:rows], "silu", both, both
        options: Any = {"row_count": count, "implementation": "triton"}
        h = lora_glu_forward(*parts, **options)  # type: ignore[arg-type]
        out = (torch.full_like(h, 9.0), torch.full_like(h, 9.0))
        again = lora_glu_backward(grad[:rows].clone(), *parts, both, out=out, recompute=True, **options)  # type: ignore[arg-type]
        assert again is not None
        return [h, *out, again]

    reference = run(70, None)
    for tensor in (gate, up, grad, update[0]):
        tensor[70:] = float("nan")
    for ours, right in zip(run(150, count), reference, strict=True):
        assert torch.equal(ours[:70], right)
        assert not ours[70:].any()
    assert all(t.isnan().any() for t in run(150, None)), "the check can fail"


@pytest.mark.parametrize("device", DEVICES)
def test_h_is_not_computed_if_it_is_not_needed(device: str) -> None:
    gate, up, grad = (torch.randn(5, 40, device=device) for _ in range(3))
    update = low_rank_factors(5, 40, 4, torch.float32, device)
    before = grad.clone()
    out = (torch.empty_like(gate), torch.empty_like(up))
    h = lora_glu_backward(grad, gate, up, "silu", update, None, None, out=out, recompute=False, implementation="triton")
    assert h is None
    assert torch.equal(grad, before)


@pytest.mark.parametrize("with_update", [False, True])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_over_gate_and_up(device: str, implementation: Any, with_update: bool) -> None:
    """A program has several tiles, and loads the next while it writes one."""
    gate, up = torch.randn(300, 2 * 136, device=device).chunk(2, -1)
    grad = torch.randn(300, 136, device=device)
    update = low_rank_factors(300, 136, 4, torch.float32, device) if with_update else None

    def run(out: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        args = (grad.clone(), gate, up, "silu", update, update, update)
        h = lora_glu_backward(*args, out=out, recompute=True, implementation=implementation)  # type: ignore[arg-type]
        assert h is not None
        return h, *out

    for elsewhere, over in zip(run((torch.empty_like(gate), torch.empty_like(up))), run((gate, up)), strict=True):
        if device == "cuda" and implementation == "triton":  # other distances of rows are another compilation
            assert relative(over, elsewhere) <= 1e-6
        else:
            assert torch.equal(over, elsewhere)


def test_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(kernels, "forward", lambda *_: calls.append("forward"))
    x, update = torch.randn(4, 16), low_rank_factors(4, 16, 4, torch.float32, "cpu")
    lora_glu_forward(x, x, "silu", update, None, implementation="triton")
    lora_glu_forward(x, x, "silu", update, None, implementation="torch")
    lora_glu_forward(x, x, "silu", low_rank_factors(4, 16, 200, torch.float32, "cpu"), None, implementation="triton")
    assert calls == ["forward"]


# --- in the whole MLP ---


def random_tensor(*shape: int, like: str, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=like).to(TYPES[like]).requires_grad_(grad)


T, H, INNER, RANK = 50, 24, 40, 3


def projection(out: int, size: int, device: str, lora_dtype: torch.dtype, **lora: Any) -> Projection:
    a, b = (random_tensor(*shape, like=device).to(lora_dtype).requires_grad_() for shape in ((RANK, size), (out, RANK)))
    return Projection(random_tensor(out, size, like=device), TYPES[device], None, Lora(a, b, 1.7, **lora))


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("retain", [False, True])
def test_the_mlp_s_gradients(form: str, retain: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They equal those of torch's matmuls, and the kernel runs."""
    torch.manual_seed(0)
    inner, down = FORMS[form](device)
    assert inner[0].lora is not None
    assert down.lora is not None
    frozen = {"B of gate is frozen": inner[0].lora.b, "A of down is frozen": down.lora.a}.get(form)
    if frozen is not None:
        frozen.requires_grad_(False)
    if form == "down's weight trains":
        down.weight.requires_grad_()
    x, norm = random_tensor(T, H, like=device, grad=True), Norm(random_tensor(H, like=device, grad=True), 1e-6)
    inputs = [x, norm.weight, *(t for p in (*inner, down) for t in (p.weight, p.lora.a, p.lora.b) if p.lora)]  # type: ignore[union-attr]
    inputs = [tensor for tensor in inputs if tensor.requires_grad]
    cotangent = random_tensor(T, H, like=device)
    calls = count_calls(monkeypatch, kernels, "backward")

    def gradients(implementation: Any, dtype: torch.dtype = TYPES[device]) -> list[Tensor]:
        torch.manual_seed(1)
        y = gated_mlp(x, inner, down, "silu", norm=norm, residual=True, implementation=implementation)
        actual = torch.autograd.grad(y, inputs, cotangent, retain_graph=retain)
        if retain:  # nothing that a second backward needs was overwritten
            again = torch.autograd.grad(y, inputs, cotangent)
            assert all(map(torch.equal, again, actual))
        return list(actual)

    mine = gradients("triton")
    theirs = gradients("torch")
    assert [call[8] for call in calls] == [form != "A of down is frozen"] * (1 + retain), "h again for down's gradients"
    for ours, right in zip(mine, theirs, strict=True):
        assert ours.dtype == right.dtype
        assert ours.is_contiguous()
        assert relative(ours, right) <= (1e-5 if device == "cpu" else 2e-2)
