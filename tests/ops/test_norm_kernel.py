"""The normalisation kernels against the definition in torch, through Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import DEVICES, EPS, KERNEL_DTYPES, assert_no_worse, count_calls, defined, relative
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastpack.ops.norm import (
    MAX_WIDTH,
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_apply,
    rms_norm_backward,
    rms_norm_forward,
)
from fastpack.ops.products import RowCount

pytest.importorskip("triton")
from fastpack.ops.kernels import norm as kernels

Op = Callable[..., tuple[Tensor, Tensor]]

ADDS: dict[str, tuple[Op, bool, float]] = {
    # op, centred, what is added to the weight
    "rms, rounded before": (lambda *args, **how: add_rms_norm(*args, EPS, **how), False, 0.0),
    "rms, rounded after": (lambda *args, **how: add_rms_norm(*args, EPS, rounding="after", **how), False, 0.0),
    "rms, 1 + weight": (
        lambda *args, **how: add_rms_norm(*args, EPS, rounding="after", unit_offset=True, **how),
        False,
        1.0,
    ),
    "rms, 1 + weight, before": (lambda *args, **how: add_rms_norm(*args, EPS, unit_offset=True, **how), False, 1.0),
    "layer": (lambda *args, **how: add_layer_norm(*args, EPS, **how), True, 0.0),
}
SHAPES = [(1, 2), (5, 7), (3, 4, 130), (11, 1025)]


def drawn(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.3).to(device, dtype)


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor], cotangents: tuple[Tensor, ...]) -> list[Tensor]:
    cotangents = tuple(c.to(out.dtype) for c, out in zip(cotangents, outputs, strict=True))
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, inputs, cotangents)]


def add_defined(x: Tensor, residual: Tensor, weight: Tensor, *, centred: bool) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return defined(summed, weight, centred=centred), summed


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize("name", ADDS)
def test_kernel_is_the_definition(
    name: str, device: str, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result, sum, and gradients of x, residual and weight, both results having one of their own."""
    forward, backward = (count_calls(monkeypatch, kernels, call) for call in ("forward", "backward"))
    op, centred, offset = ADDS[name]
    inputs = [drawn(*shape, device=device, dtype=dtype, seed=seed).requires_grad_() for seed in range(2)]
    inputs.append(drawn(shape[-1], device=device, dtype=dtype, seed=2).requires_grad_())
    wide = [x.detach().double().requires_grad_() for x in inputs]
    cotangents = tuple(drawn(*shape, device=device, dtype=dtype, seed=seed) for seed in (3, 4))
    found = gradients(op(*inputs, implementation="triton"), inputs, cotangents)
    assert (len(forward), len(backward)) == (1, 1)
    plain = gradients(op(*inputs, implementation="torch"), inputs, cotangents)
    assert (len(forward), len(backward)) == (1, 1)
    truth = gradients(add_defined(*wide[:2], wide[2] + offset, centred=centred), wide, cotangents)
    for mine, theirs, right in zip(found, plain, truth, strict=True):
        assert_no_worse(mine, theirs, right)
    assert torch.equal(found[1], plain[1])
    # without the gradient of the sum, without the weight, with the wrong mean: each fails
    alone = gradients(add_defined(*wide[:2], wide[2] + offset, centred=centred)[:1], wide, cotangents[:1])
    unweighted = add_defined(*wide[:2], torch.ones_like(wide[2]), centred=centred)
    other = add_defined(*wide[:2], wide[2] + offset, centred=not centred)
    for wrong, index in ((alone[1], 2), (unweighted[0], 0), (other[0], 0)):
        with pytest.raises(AssertionError):
            assert_no_worse(wrong.detach().to(dtype), plain[index], truth[index])


@pytest.mark.parametrize(("device", "dtype"), [case for case in KERNEL_DTYPES if case.values[1] != torch.float32])
def test_kernel_rounds_where_the_family_does(device: str, dtype: torch.dtype) -> None:
    x, weight = drawn(9, 257, device=device, dtype=dtype), drawn(257, device=device, dtype=dtype, seed=1)
    found = {
        (rounding, implementation): rms_norm(x, weight, EPS, rounding=rounding, implementation=implementation)
        for rounding in ("before", "after")
        for implementation in ("torch", "triton")
    }
    for rounding in ("before", "after"):
        differ = found[rounding, "triton"] != found[rounding, "torch"]
        assert differ.double().mean() < 5e-3, "but where float32 fell on an edge"
    assert (found["before", "triton"] != found["after", "triton"]).double().mean() > 0.1


@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["rms, rounded before", "rms, rounded after", "layer"])
def test_mixed_dtypes(
    name: str, residual_dtype: torch.dtype, weight_dtype: torch.dtype, device: str, dtype: torch.dtype
) -> None:
    """Results and gradients have the dtypes that torch gives them, also under autocast, where the stream is float32."""
    op, centred, offset = ADDS[name]
    inputs = [
        drawn(3, 70, device=device, dtype=dtype).requires_grad_(),
        drawn(3, 70, device=device, dtype=residual_dtype, seed=1).requires_grad_(),
        drawn(70, device=device, dtype=weight_dtype, seed=2).requires_grad_(),
    ]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    cotangents = tuple(drawn(3, 70, device=device, dtype=torch.float32, seed=seed) for seed in (3, 4))
    with torch.autocast(device, torch.bfloat16):
        plain = gradients(op(*inputs, implementation="torch"), inputs, cotangents)
        found = gradients(op(*inputs, implementation="triton"), inputs, cotangents)
    truth = gradients(add_defined(*wide[:2], wide[2] + offset, centred=centred), wide, cotangents)
    for mine, theirs, right in zip(found, plain, truth, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative(mine, right) <= 1.5 * relative(theirs, right) + 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_of_any_strides(device: str) -> None:
    """Slices of a fused projection, transposed, a weight with a step, expanded gradients: as if contiguous."""
    base = drawn(6, 5, 3 * 40, device=device, dtype=torch.float32)
    weight = drawn(80, device=device, dtype=torch.float32)[::2]
    for x, grad in (
        (base[..., 40:80], base[..., :40]),
        (base[:, :, 1:41], base[..., 79:119]),
        (base[..., :40].transpose(0, 1), base[..., 3:43].transpose(0, 1)),
        (base.transpose(1, 2)[:, :40].transpose(1, 2)[..., :40], base.new_ones(()).expand(6, 5, 40)),
    ):
        how: dict[str, Any] = {"implementation": "triton"}
        pairs: list[tuple[Any, ...]] = []
        for tensors in ((x, grad, weight), [tensor.contiguous() for tensor in (x, grad, weight)]):
            normed, summed, rstd = rms_norm_forward(tensors[0], tensors[2], EPS, residual=tensors[1], **how)
            grads = rms_norm_backward(tensors[1], tensors[0], tensors[2], rstd, grad_summed=tensors[1], **how)
            pairs.append((normed, summed, rstd, *grads, rms_norm_apply(tensors[0], tensors[2], rstd, **how)))
        assert all(relative(a, b) < 1e-6 for a, b in zip(*pairs, strict=True))
        assert torch.equal(rms_norm_forward(x, weight, EPS, **how)[1], x)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(1, 40), (7, 40), (3, 2, 1100)], ids=str)
@pytest.mark.parametrize("rounding", ["before", "after"])
@pytest.mark.parametrize("device", DEVICES)
def test_building_blocks(device: str, rounding: Any, shape: tuple[int, ...], implementation: Any) -> None:
    """What the autograd Function returns, piece by piece, and the normalised tensor again to the bit."""
    x, residual, grad, direct = drawn(4, *shape, device=device, dtype=torch.float16).unbind()
    weight = drawn(shape[-1], device=device, dtype=torch.float16).requires_grad_()
    how: dict[str, Any] = {"rounding": rounding, "unit_offset": True, "implementation": implementation}
    with torch.no_grad():
        normed, summed, rstd = rms_norm_forward(x, weight, EPS, residual=residual, **how)
        assert torch.equal(summed, x + residual)
        assert rstd.shape == (summed[..., 0].numel(),)
        assert relative(rstd, (summed.double().pow(2).mean(-1) + EPS).rsqrt().flatten()) < 1e-6
        assert torch.equal(rms_norm_apply(summed, weight, rstd, **how), normed)
        alone, same, _ = rms_norm_forward(summed, weight, EPS, **how)
        assert torch.equal(alone, normed)
        assert same is summed
        dx, dweight = rms_norm_backward(grad, summed, weight, rstd, grad_summed=direct, **how)
        frozen, none = rms_norm_backward(grad, summed, weight, rstd, grad_summed=direct, need_weight=False, **how)
        assert relative(frozen, dx) <= torch.finfo(dx.dtype).eps
        assert none is None
        for need_weight in (True, False):  # the normalised tensor again on the way, over the gradient
            over = grad.clone()
            found = rms_norm_backward(
                over, summed, weight, rstd, grad_summed=direct, need_weight=need_weight, normed=over, **how
            )
            assert torch.equal(over, normed)
            assert torch.equal(found[0], dx if need_weight else frozen)
            assert found[1] is None if not need_weight else torch.equal(found[1], dweight)
        without, _ = rms_norm_backward(grad, summed, weight, rstd, **how)
        assert relative(without + direct, dx) <= 1.5 * torch.finfo(dx.dtype).eps, "each of three is rounded"
        assert relative(without, dx) > 0.1
    leaf = summed.clone().requires_grad_()
    outputs = rms_norm(leaf, weight, EPS, **{**how, "implementation": "torch"}), leaf * 1
    plain = gradients(outputs, [leaf, weight], (grad, direct))
    wide = [tensor.detach().double().requires_grad_() for tensor in (summed, weight)]
    truth = gradients((defined(wide[0], 1 + wide[1], centred=False), wide[0] * 1), wide, (grad, direct))
    assert dweight is not None
    for at, value in ((0, normed), (2, dx), (3, dweight)):
        assert_no_worse(value, plain[at], truth[at])


@pytest.mark.parametrize("shape", [(700, 40), (33, 1100)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_normalised_again_over_the_gradient(
    device: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where programs walk over rows and have read the next ones before they write over these."""
    monkeypatch.setattr(kernels, "processors", lambda _: 1)
    x, grad, direct = drawn(3, *shape, device=device, dtype=torch.float16).unbind()
    weight = drawn(shape[1], device=device, dtype=torch.float16)
    normed, _, rstd = rms_norm_forward(x, weight, EPS, implementation="triton")
    want = rms_norm_backward(grad, x, weight, rstd, grad_summed=direct, implementation="triton")
    over = grad.clone()
    found = rms_norm_backward(over, x, weight, rstd, grad_summed=direct, normed=over, implementation="triton")
    assert torch.equal(over, normed)
    for ours, right in zip(found, want, strict=True):
        assert ours is not None
        assert right is not None
        assert relative(ours, right) <= torch.finfo(torch.float16).eps


@pytest.mark.parametrize("counted", [0, 1, 5, 9])
@pytest.mark.parametrize(("width", "eps"), [(40, EPS), (40, 0.0), (1100, EPS)])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_do_not_count(device: str, width: int, eps: float, counted: int) -> None:
    """They are not read, zeros are written there, and the others are what they are alone, to the bit."""
    x, residual, grad, direct = drawn(4, 9, width, device=device, dtype=torch.float32).unbind()
    weight = drawn(width, device=device, dtype=torch.float32)
    short = [tensor[:counted].clone() for tensor in (x, residual, grad, direct)]
    for tensor in (x, residual, grad, direct):
        tensor[counted:] = float("nan")
    count = RowCount(torch.tensor([counted], dtype=torch.int32, device=device), len(x))

    def run(x: Tensor, residual: Tensor, grad: Tensor, direct: Tensor, row_count: RowCount | None) -> list[Tensor]:
        how: dict[str, Any] = {"row_count": row_count, "implementation": "triton"}
        normed, summed, rstd = rms_norm_forward(x, weight, eps, residual=residual, **how)
        again = rms_norm_apply(summed, weight, rstd, **how)
        dx, dweight = rms_norm_backward(grad, summed, weight, rstd, grad_summed=direct, **how)
        over = grad.clone()
        alone, _ = rms_norm_backward(over, summed, weight, rstd, need_weight=False, normed=over, **how)
        assert dweight is not None
        return [dweight, normed, summed, again, dx, alone, over]

    of_weight, *ours = run(x, residual, grad, direct, count)
    if not counted:
        assert not of_weight.any()
    else:
        of_weight_alone, *want = run(*short, None)
        assert relative(of_weight, of_weight_alone) <= 1e-6
        assert all(torch.equal(a[:counted], b) for a, b in zip(ours, want, strict=True))
    assert not any(tensor[counted:].any() for tensor in ours)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_nobody_needs_are_not_computed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, kernels, "backward")
    tensors = [drawn(3, 8, device=device, dtype=torch.float32, seed=seed) for seed in range(2)]
    tensors += [drawn(8, device=device, dtype=torch.float32, seed=seed) for seed in (2, 3)]
    full: list[Tensor] = []
    for mask in ((1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 1, 0)):
        x, residual, weight, bias = (
            tensor.clone().requires_grad_(bool(needed)) for tensor, needed in zip(tensors, mask, strict=True)
        )
        normed, summed = add_layer_norm(x, residual, weight, EPS, bias=bias, implementation="triton")
        ((normed.square().sum()) + (summed.sum() if mask[0] or mask[1] else 0)).backward()
        assert calls[-1][7] == (bool(mask[0] or mask[1]), bool(mask[2]), bool(mask[3]))
        grads = [tensor.grad for tensor in (x, residual, weight, bias)]
        if not full:
            full = [grad for grad in grads if grad is not None]
        for grad, right, needed in zip(grads, full, mask, strict=True):
            assert (grad is not None) == bool(needed)
            assert grad is None or relative(grad, right) <= 1e-6
    _, summed = add_layer_norm(*(t.clone().requires_grad_() for t in tensors[:3]), EPS, implementation="triton")
    before = len(calls)
    summed.sum().backward()
    assert len(calls) == before, "only the sum was used"


@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_kernel_with_bias_and_a_weight_for_each_head(device: str) -> None:
    """Cohere's q and k norms, ``[heads, D]``, and a bias; gradients too."""
    for shape, own in (((5, 3, 10), (3, 10)), ((2, 4, 3, 130), (3, 130)), ((5, 3, 10), (10,)), ((1, 1), (1,))):
        x, grad = (drawn(*shape, device=device, dtype=torch.float32, seed=seed) for seed in range(2))
        weight, bias = (drawn(*own, device=device, dtype=torch.float32, seed=seed) for seed in (2, 3))
        inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
        wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
        out = layer_norm(x, weight, EPS, bias=bias, implementation="triton")
        plain = layer_norm(x, weight, EPS, bias=bias, implementation="torch")
        found = gradients((out,), inputs, (grad,))
        theirs = gradients((plain,), inputs, (grad,))
        truth = gradients((defined(wide[0], wide[1], centred=True) + wide[2],), wide, (grad,))
        for value, torch_s, right in zip(found, theirs, truth, strict=True):
            if right.any():
                assert_no_worse(value, torch_s, right)
            else:
                # a row of one: the gradient is what float32 leaves of terms of about 200 that cancel
                assert value.abs().max() <= 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_and_rows_of_any_size(device: str) -> None:
    for rows, width in ((0, 8), (1, 1), (2, 3000), (40, 3)):
        x = drawn(rows, width, device=device, dtype=torch.float32).requires_grad_()
        weight = drawn(width, device=device, dtype=torch.float32, seed=1).requires_grad_()
        found, expected = (
            gradients((rms_norm(x, weight, EPS, implementation=which),), [x, weight], (x.detach() + 1,))
            for which in ("triton", "torch")
        )
        rstd = (x.detach().square().mean(-1, keepdim=True) + EPS).rsqrt()
        # the gradient of a row of one is what is left of terms that cancel: it is measured by those
        terms = (x.detach() + 1) * weight.detach() * rstd if width == 1 else found[1]
        for mine, theirs, size in zip(found, expected, (found[0], terms, found[2]), strict=True):
            assert mine.shape == theirs.shape
            assert rows == 0 or (mine - theirs).abs().max() <= 1e-5 * size.abs().max()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("device", DEVICES)
def test_in_autograd(device: str, implementation: Any) -> None:
    """Twice through one graph, the same bits each time, and both kinds of checkpointing."""
    x, residual = (drawn(37, 50, device=device, dtype=torch.float32, seed=seed) for seed in range(2))
    weight, leaves = drawn(50, device=device, dtype=torch.float32, seed=2), []

    def run(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        normed, summed = add_rms_norm(x, residual, weight, EPS, implementation=implementation)
        return normed.square() + summed

    for how in ("plain", "reentrant", "not reentrant"):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, residual, weight)]
        if how == "plain":
            out = run(*inputs)
            first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
            again = torch.autograd.grad(out.sum(), inputs)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            leaves = list(first)
            continue
        checkpoint(run, *inputs, use_reentrant=how == "reentrant").sum().backward()
        assert all(torch.equal(leaf.grad, b) for leaf, b in zip(inputs, leaves, strict=True))


def test_what_the_kernel_does_not_serve_is_refused_by_name() -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)
    wide = torch.randn(1, MAX_WIDTH + 1)
    for call in (
        lambda: rms_norm(x.double(), weight.double(), EPS, implementation="triton"),
        lambda: rms_norm(wide, wide[0], EPS, implementation="triton"),
        lambda: layer_norm(x, torch.randn(2, 4), EPS, implementation="triton"),
        lambda: layer_norm(x, weight, EPS, bias=weight[:1], implementation="triton"),
        lambda: add_rms_norm(x, x.double(), weight, EPS, implementation="triton"),
        lambda: rms_norm_forward(x, weight[:4], EPS, implementation="triton"),
    ):
        with pytest.raises(ValueError, match="Pass implementation='auto' or 'torch'"):
            call()


def test_compiled_whole() -> None:
    """The definition is what the compiler sees, gradients too."""
    x, weight = torch.randn(4, 16).requires_grad_(), torch.randn(16).requires_grad_()

    def run(x: Tensor, weight: Tensor) -> Tensor:
        normed, summed = add_rms_norm(x, x, weight, EPS)
        return layer_norm(normed, weight, EPS) + rms_norm(summed, weight, EPS, rounding="after", unit_offset=True)

    found = [
        gradients((function(x, weight),), [x, weight], (torch.ones(4, 16),))
        for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager"))
    ]
    for mine, theirs in zip(*found, strict=True):
        assert relative(mine, theirs) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 896, 2304, 4096, 5120, 8192, 16384, 18432])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widths_of_real_models(dtype: torch.dtype, width: int) -> None:
    """Each size of block compiles, and none asks for more shared memory or registers than there are."""
    inputs = [drawn(301, width, device="cuda", dtype=dtype, seed=seed).requires_grad_() for seed in range(2)]
    inputs.append(drawn(width, device="cuda", dtype=dtype, seed=2).requires_grad_())
    wide = [x.detach().double().requires_grad_() for x in inputs]
    cotangents = tuple(drawn(301, width, device="cuda", dtype=dtype, seed=seed) for seed in (3, 4))
    found, again, plain = (
        gradients(add_rms_norm(*inputs, EPS, implementation=which), inputs, cotangents)
        for which in ("triton", "triton", "torch")
    )
    truth = gradients(add_defined(*wide, centred=False), wide, cotangents)
    for mine, same, theirs, right in zip(found, again, plain, truth, strict=True):
        assert torch.equal(mine, same)
        assert_no_worse(mine, theirs, right)


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    width, rows = 16384, 2**31 // 16384 + 3
    x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.arange(width, device="cuda")
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    normed, summed, rstd = rms_norm_forward(x, weight, EPS, residual=x)
    assert torch.equal(summed[-1], x[-1] * 2)
    assert relative(normed[-1:], rms_norm(summed[-1:], weight, EPS, implementation="torch")) < 5e-3
    assert not normed[:-1].any()
    dx, dweight = rms_norm_backward(normed, x, weight, rstd, grad_summed=x)
    assert dx[-1, -1] > 10000
    assert not dx[:-1].any()
    assert dweight is not None
    assert dweight.any()


@pytest.mark.gpu
def test_on_a_gpu_auto_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, kernels, "forward")
    x, weight = torch.randn(3, 8, device="cuda"), torch.randn(8, device="cuda")
    rms_norm(x, weight, EPS)
    layer_norm(x, weight, EPS)
    assert len(calls) == 2
    rms_norm(x, weight, EPS, implementation="torch")
    rms_norm(x.double(), weight.double(), EPS)
    layer_norm(x, weight[:1], EPS)
    assert len(calls) == 2
