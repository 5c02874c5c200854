"""Gated linear units against their written definition: in torch, and by the kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_checks import DEVICES, KERNEL_DTYPES, assert_no_worse, count_calls, relative
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from fastpack.ops.glu import activation_kind, gated, gated_backward, gated_forward
from fastpack.ops.kinds import ActivationKind

pytest.importorskip("triton")
from fastpack.ops.kernels import glu as kernels

# the interpreter's numpy says so where exp(-x) of a very negative x is infinite, and the sigmoid zero
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

ACTIVATIONS: dict[ActivationKind, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
}
KINDS = tuple(ACTIVATIONS)
SHAPES = [(1, 1), (1, 130), (5, 257), (2, 3, 1024), (0, 16), (3, 0, 8)]


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        (nn.functional.silu, lambda x: x / (1 + (-x).exp())),
        (nn.functional.gelu, lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2),
        (torch.relu, lambda x: x * (x > 0)),
    ],
)
def test_gated(activation: Callable[[Tensor], Tensor], formula: Callable[[Tensor], Tensor]) -> None:
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = gated(gate, up, activation)
    assert relative(out.detach(), (formula(gate) * up).detach()) < 1e-14
    assert relative(out.detach(), (formula(up) * gate).detach()) > 0.1, "gate and up are not exchangeable"
    assert torch.autograd.gradcheck(lambda g, u: gated(g, u, activation), (gate, up))


# --- which kernels serve ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*ACT2FN} - {"xielu"}))
def test_activation_kind_of_every_upstream_class(name: str) -> None:
    """Every activation with a kind is that function; every other one is a different function."""
    activation = ACT2FN[name].double()
    x = torch.linspace(-20, 20, 401, dtype=torch.float64)
    same = {kind for kind, known in ACTIVATIONS.items() if relative(activation(x).detach(), known(x)) < 1e-9}
    kind = activation_kind(activation)
    assert same == (set() if kind is None else {kind})


def test_activation_kind_of_functions_and_modules() -> None:
    actual = [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), *ACTIVATIONS.values(), functools.partial(nn.functional.gelu)]
    assert [activation_kind(x) for x in actual] == ["silu", "gelu", "gelu_tanh", *KINDS, "gelu"]
    for other in (torch.relu, lambda x: nn.functional.silu(x), nn.ReLU(), type("SiLU", (nn.SiLU,), {})()):
        assert activation_kind(other) is None


def test_a_module_with_hooks_of_its_own_is_called() -> None:
    for hook in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        module = nn.SiLU()
        handle = getattr(module, hook)(lambda *_: None)
        assert activation_kind(module) is None
        handle.remove()
        assert activation_kind(module) == "silu"
    module.forward = torch.relu  # type: ignore[method-assign]
    assert activation_kind(module) is None


def test_unsupported_inputs_raise_if_the_kernel_is_named() -> None:
    gate, up = torch.randn(2, 3, 8)
    for call in (
        lambda: gated(gate, up, torch.relu, "triton"),
        lambda: gated(gate.double(), up, nn.functional.silu, "triton"),
        lambda: gated_forward(gate, up.double(), "silu", implementation="triton"),
        lambda: gated(gate, up[:1], nn.functional.silu, "triton"),
    ):
        with pytest.raises(ValueError, match="Pass implementation='auto' or 'torch'"):
            call()


# --- the kernel -------------------------------------------------------------------------------------------------------


def random_tensor(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    """Return random values large enough for sigmoids of 0 and 1."""
    generator = torch.Generator().manual_seed(len(shape))
    return (torch.randn(*shape, generator=generator) * 4).to(device, dtype)


def definition(gate: Tensor, up: Tensor, kind: ActivationKind, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result and the gradients of gate and up from torch's autograd, in the tensors' dtype."""
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    out = ACTIVATIONS[kind](gate) * up
    return out.detach(), *torch.autograd.grad(out, (gate, up), grad)


def backward(
    grad: Tensor, gate: Tensor, up: Tensor, kind: ActivationKind, implementation: Any = "triton"
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, in new memory."""
    out = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    gated_backward(grad, gate, up, kind, out=out, implementation=implementation)
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_is_the_definition(
    kind: ActivationKind, device: str, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = (count_calls(monkeypatch, kernels, name) for name in ("forward", "backward"))
    gate, up, grad = random_tensor(3, *shape, device=device, dtype=dtype).unbind()
    gate.requires_grad_(), up.requires_grad_()
    out = gated(gate, up, ACTIVATIONS[kind], "triton")
    actual = (out.detach(), *torch.autograd.grad(out, (gate, up), grad))
    assert (len(forward), len(backward)) == (1, 1)
    plain = definition(gate, up, kind, grad)
    truth = definition(gate.double(), up.double(), kind, grad.double())
    for mine, theirs, right in zip(actual, plain, truth, strict=True):
        assert mine.is_contiguous()
        if right.numel():
            assert_no_worse(mine, theirs, right)
        else:
            assert mine.shape == right.shape
    if right.numel() > 100:
        for other in KINDS:
            wrong = definition(gate.double(), up.double(), other, grad.double())
            for mine, theirs, right in zip(wrong, plain, truth, strict=True):
                if other != kind and {other, kind} != {"gelu", "gelu_tanh"}:
                    with pytest.raises(AssertionError):
                        assert_no_worse(mine.to(dtype), theirs, right)


@pytest.mark.parametrize("device", DEVICES)
def test_the_two_gelus_are_told_apart(device: str) -> None:
    gate = torch.linspace(-4, 4, 999, device=device)
    exact, tanh = (gated(gate, torch.ones_like(gate), ACTIVATIONS[kind], "triton") for kind in ("gelu", "gelu_tanh"))
    assert 1e-5 < relative(exact, tanh) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_extreme_gates(device: str, dtype: torch.dtype) -> None:
    """Nothing becomes NaN if exp overflows, and tiny results are not lost."""
    gate = torch.tensor([-60000.0, -300.0, -90.0, -12.0, -0.0, 0.0, 12.0, 90.0, 60000.0], device=device, dtype=dtype)
    one = torch.ones_like(gate)
    for kind in KINDS:
        actual = (
            gated_forward(gate, one, kind, implementation="triton"),
            *backward(one, gate, one, kind),
        )
        for mine, right in zip(actual, definition(gate.double(), one.double(), kind, one.double()), strict=True):
            assert (mine.double() - right).abs().max() <= 60000 * torch.finfo(dtype).eps
            assert mine.isfinite().all()


@pytest.mark.parametrize("width", [1, 37, 1024, 1500])
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
def test_halves_of_one_tensor_are_not_copied(
    device: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = count_calls(monkeypatch, kernels, "forward")
    gate_up = random_tensor(2, 3, 2 * width, device=device, dtype=dtype).requires_grad_()
    gate, up = gate_up.detach().chunk(2, -1)
    grad = random_tensor(3, 2, width, device=device, dtype=dtype).transpose(0, 1)
    actual = gated(*gate_up.chunk(2, -1), nn.functional.silu, "triton")
    (dgate_up,) = torch.autograd.grad(actual, gate_up, grad)
    assert [tensor.data_ptr() for tensor in forward[0][:2]] == [gate.data_ptr(), up.data_ptr()]
    apart = backward(grad, gate.contiguous(), up.contiguous(), "silu")
    assert torch.equal(actual, gated_forward(gate.contiguous(), up.contiguous(), "silu", implementation="triton"))
    assert torch.equal(dgate_up, torch.cat(apart, -1))
    over = torch.empty_like(dgate_up)
    gated_backward(grad, gate, up, "silu", out=over.chunk(2, -1), implementation="triton")
    assert torch.equal(over, dgate_up)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    """Odd row strides, transposed tensors and expanded gradients give the contiguous results."""
    base = random_tensor(7, 5, 40, device=device, dtype=torch.float32)
    for gate, up, grad in (
        (base[:, :, 1:18], base[:, :, 20:37], base[:, :, 3:20]),
        (base[:, :, :17], base.flatten()[: 7 * 5 * 30].view(7, 5, 30)[:, :, :17], base[:, :, :17].contiguous()),
        (base.transpose(0, 2), base.transpose(0, 2) + 1, base.transpose(0, 2)),
        (base[::2], base[1::2][:3].new_ones(4, 5, 40), base.new_ones(()).expand(4, 5, 40)),
    ):
        actual = (*backward(grad, gate, up, "gelu"), gated_forward(gate, up, "gelu", implementation="triton"))
        grad, gate, up = (tensor.contiguous() for tensor in (grad, gate, up))
        expected = (*backward(grad, gate, up, "gelu"), gated_forward(gate, up, "gelu", implementation="triton"))
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("device", DEVICES)
def test_recomputed_in_the_backward(device: str, implementation: Any) -> None:
    """The result equals the forward's bit for bit, in the gradient's memory, and the gradients are unchanged."""
    for width in (64, 70):
        buffer, gate, up, grad = random_tensor(4, 5, width, device=device, dtype=torch.float16).unbind()
        h = gated_forward(gate, up, "silu", implementation=implementation)
        plain = backward(grad, gate, up, "silu", implementation)
        assert not torch.equal(grad, h)
        out = buffer.new_empty(5, 2 * width).chunk(2, -1)
        gated_backward(grad, gate, up, "silu", recompute=True, out=out, implementation=implementation)
        assert all(torch.equal(a, b) for a, b in zip((*out, grad), (*plain, h), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_results_of_uneven_rows_are_refused(device: str) -> None:
    gate = torch.randn(2, 3, 8, device=device)
    uneven = torch.empty(3, 2, 8, device=device).transpose(0, 1)
    with pytest.raises(ValueError, match="evenly"):
        gated_backward(gate, gate, gate, "silu", out=(torch.empty_like(gate), uneven), implementation="triton")
    out = (torch.empty_like(gate), torch.empty_like(gate))
    with pytest.raises(ValueError, match="evenly"):
        gated_backward(uneven, gate, gate, "silu", out=out, recompute=True, implementation="triton")


@pytest.mark.parametrize("device", DEVICES)
def test_in_autograd(device: str) -> None:
    """Two backwards, both kinds of checkpointing, a frozen input, mixed dtypes and autocast all work."""
    gate, up, grad = random_tensor(3, 6, 50, device=device, dtype=torch.float32).unbind()
    gate.requires_grad_(), up.requires_grad_()
    run = functools.partial(gated, activation=nn.functional.silu, implementation="triton")
    expected = torch.autograd.grad(run(gate, up), (gate, up), grad)

    out = run(gate, up)
    for _ in range(2):
        actual = torch.autograd.grad(out, (gate, up), grad, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    for reentrant in (False, True):
        leaves = gate.detach().clone().requires_grad_(), up.detach().clone().requires_grad_()
        checkpoint(run, *leaves, use_reentrant=reentrant).backward(grad)
        assert all(torch.equal(leaf.grad, b) for leaf, b in zip(leaves, expected, strict=True))

    out = run(gate.detach(), up)
    assert torch.equal(torch.autograd.grad(out, up, grad)[0], expected[1])
    with torch.autocast(device, torch.bfloat16):
        wide = run(gate.half(), up)
    assert wide.dtype == torch.float32
    mixed = torch.autograd.grad(wide, (gate, up), grad)
    plain = torch.autograd.grad(nn.functional.silu(gate.half()) * up, (gate, up), grad)
    for mine, theirs, truth in zip(mixed, plain, expected, strict=True):
        assert 1e-5 < relative(mine, truth) <= 1.5 * relative(theirs, truth)


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    for halves in (False, True):
        width, tokens = 16384, 2**31 // 16384 + 3
        gate_up = torch.zeros(tokens, 2 * width, device="cuda", dtype=torch.bfloat16)
        gate, up = gate_up.chunk(2, -1)
        if not halves:
            gate, up = gate_up.view(2, tokens, width).unbind()
        gate[-1], up[-1] = 1.0, 2.0
        out = gated_forward(gate, up, "silu")
        assert out[-1].eq(out[-1, 0]).all()
        assert out[-1, 0] > 1.4
        assert not out[:-1].any()
        dgate, dup = torch.empty_like(out), torch.empty_like(out)
        gated_backward(out, gate, up, "silu", recompute=True, out=(dgate, dup))
        assert dgate[-1].all()
        assert dup[-1].all()
        assert not dgate[:-1].any()
        del out, dgate, dup


@pytest.mark.gpu
def test_on_a_gpu_auto_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, kernels, "forward")
    gate, up = torch.randn(2, 3, 8, device="cuda")
    gated(gate, up, nn.functional.silu)
    assert len(calls) == 1
    gated(gate, up, nn.functional.silu, "torch")
    gated(gate, up, torch.relu)
    gated(gate.double(), up.double(), nn.functional.silu)
    assert len(calls) == 1
