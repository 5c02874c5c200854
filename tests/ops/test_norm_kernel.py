"""The normalisation kernels against the definition in torch, through Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_checks import DEVICES, EPS, KERNEL_DTYPES, assert_no_worse, count_calls, defined, relative
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastpack.ops.norm import MAX_WIDTH, layer_norm, rms_norm, rms_norm_apply, rms_norm_backward, rms_norm_forward
from fastpack.ops.row_count import RowCount

pytest.importorskip("triton")
from fastpack.ops.kernels import norm as kernels

Op = Callable[..., Tensor]

NORMS: dict[str, tuple[Op, bool, float]] = {
    # op, centred, the number that is added to the weight
    "rms, rounded before": (lambda *args, **how: rms_norm(*args, EPS, **how), False, 0.0),
    "rms, rounded after": (lambda *args, **how: rms_norm(*args, EPS, rounding="after", **how), False, 0.0),
    "rms, 1 + weight": (
        lambda *args, **how: rms_norm(*args, EPS, rounding="after", unit_offset=True, **how),
        False,
        1.0,
    ),
    "rms, 1 + weight, before": (lambda *args, **how: rms_norm(*args, EPS, unit_offset=True, **how), False, 1.0),
    "layer": (lambda *args, **how: layer_norm(*args, EPS, **how), True, 0.0),
}
SHAPES = [(1, 2), (5, 7), (3, 4, 130), (11, 1025)]


def random_tensor(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.3).to(device, dtype)


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor], cotangents: tuple[Tensor, ...]) -> list[Tensor]:
    cotangents = tuple(c.to(out.dtype) for c, out in zip(cotangents, outputs, strict=True))
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, inputs, cotangents)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_kernel_is_the_definition(
    name: str, device: str, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result and the gradients are compared; x is used outside the norm, too."""
    forward, backward = (count_calls(monkeypatch, kernels, call) for call in ("forward", "backward"))
    op, centred, offset = NORMS[name]
    inputs = [random_tensor(*size, device=device, dtype=dtype, seed=len(size)) for size in (shape, shape[-1:])]
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    x, weight = (tensor.requires_grad_() for tensor in inputs)
    cotangents = tuple(random_tensor(*shape, device=device, dtype=dtype, seed=seed) for seed in (3, 4))
    actual = gradients((op(x, weight, implementation="triton"), x * 1), inputs, cotangents)
    assert (len(forward), len(backward)) == (1, 1)
    plain = gradients((op(x, weight, implementation="torch"), x * 1), inputs, cotangents)
    assert (len(forward), len(backward)) == (1, 1)
    true = defined(wide[0], wide[1] + offset, centred=centred)
    truth = gradients((true, wide[0] * 1), wide, cotangents)
    for mine, theirs, right in zip(actual, plain, truth, strict=True):
        assert_no_worse(mine, theirs, right)
    # without the gradient of the norm, with another weight, with the wrong mean: each fails
    alone = cotangents[1]
    unweighted = defined(wide[0], torch.ones_like(wide[1]), centred=centred)
    other = defined(wide[0], wide[1] + offset, centred=not centred)
    for wrong, index in ((alone, 2), (unweighted, 0), (other, 0)):
        if index == 2 and centred and shape[-1] == 2:
            continue  # a normalised row of two is always -1 and 1
        with pytest.raises(AssertionError):
            assert_no_worse(wrong.detach().to(dtype), plain[index], truth[index])


@pytest.mark.parametrize(("device", "dtype"), [case for case in KERNEL_DTYPES if case.values[1] != torch.float32])
def test_kernel_rounds_where_the_family_does(device: str, dtype: torch.dtype) -> None:
    x, weight = (
        random_tensor(9, 257, device=device, dtype=dtype),
        random_tensor(257, device=device, dtype=dtype, seed=1),
    )
    actual = {
        (rounding, implementation): rms_norm(x, weight, EPS, rounding=rounding, implementation=implementation)
        for rounding in ("before", "after")
        for implementation in ("torch", "triton")
    }
    for rounding in ("before", "after"):
        differ = actual[rounding, "triton"] != actual[rounding, "torch"]
        assert differ.double().mean() < 5e-3, "but where float32 fell on an edge"
    assert (actual["before", "triton"] != actual["after", "triton"]).double().mean() > 0.1


@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["rms, rounded before", "rms, rounded after", "layer"])
def test_mixed_dtypes(name: str, weight_dtype: torch.dtype, device: str, dtype: torch.dtype) -> None:
    """Results and gradients have torch's dtypes, also under autocast, where the residual stream is float32."""
    op, centred, offset = NORMS[name]
    inputs = [
        random_tensor(3, 70, device=device, dtype=dtype).requires_grad_(),
        random_tensor(70, device=device, dtype=weight_dtype, seed=2).requires_grad_(),
    ]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    cotangent = (random_tensor(3, 70, device=device, dtype=torch.float32, seed=3),)
    with torch.autocast(device, torch.bfloat16):
        plain = gradients((op(*inputs, implementation="torch"),), inputs, cotangent)
        actual = gradients((op(*inputs, implementation="triton"),), inputs, cotangent)
    truth = gradients((defined(wide[0], wide[1] + offset, centred=centred),), wide, cotangent)
    for mine, theirs, right in zip(actual, plain, truth, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative(mine, right) <= 1.5 * relative(theirs, right) + 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_of_any_strides(device: str) -> None:
    """Slices of a fused projection, transposed tensors, a strided weight and expanded gradients are supported."""
    base = random_tensor(6, 5, 3 * 40, device=device, dtype=torch.float32)
    weight = random_tensor(80, device=device, dtype=torch.float32)[::2]
    for x, grad in (
        (base[..., 40:80], base[..., :40]),
        (base[:, :, 1:41], base[..., 79:119]),
        (base[..., :40].transpose(0, 1), base[..., 3:43].transpose(0, 1)),
        (base.transpose(1, 2)[:, :40].transpose(1, 2)[..., :40], base.new_ones(()).expand(6, 5, 40)),
    ):
        how: dict[str, Any] = {"implementation": "triton"}
        pairs: list[tuple[Any, ...]] = []
        for tensors in ((x, grad, weight), [tensor.contiguous() for tensor in (x, grad, weight)]):
            normed, rstd = rms_norm_forward(tensors[0], tensors[2], EPS, **how)
            grads = rms_norm_backward(tensors[1], tensors[0], tensors[2], rstd, grad_summed=tensors[1], **how)
            pairs.append((normed, rstd, *grads, rms_norm_apply(tensors[0], tensors[2], rstd, **how)))
        assert all(relative(a, b) < 1e-6 for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(1, 40), (7, 40), (3, 2, 1100)], ids=str)
@pytest.mark.parametrize("rounding", ["before", "after"])
@pytest.mark.parametrize("device", DEVICES)
def test_building_blocks(device: str, rounding: Any, shape: tuple[int, ...], implementation: Any) -> None:
    """The functions without a graph give the op's results, and recompute the normalised tensor bit for bit."""
    x, grad, direct = random_tensor(3, *shape, device=device, dtype=torch.float16).unbind()
    weight = random_tensor(shape[-1], device=device, dtype=torch.float16).requires_grad_()
    how: dict[str, Any] = {"rounding": rounding, "unit_offset": True, "implementation": implementation}
    with torch.no_grad():
        normed, rstd = rms_norm_forward(x, weight, EPS, **how)
        assert rstd.shape == (x[..., 0].numel(),)
        assert relative(rstd, (x.double().pow(2).mean(-1) + EPS).rsqrt().flatten()) < 1e-6
        assert torch.equal(rms_norm_apply(x, weight, rstd, **how), normed)
        dx, dweight = rms_norm_backward(grad, x, weight, rstd, grad_summed=direct, **how)
        frozen, none = rms_norm_backward(grad, x, weight, rstd, grad_summed=direct, need_weight=False, **how)
        assert relative(frozen, dx) <= torch.finfo(dx.dtype).eps
        assert none is None
        for need_weight in (True, False):  # the normalised tensor is computed again, in the gradient's memory
            over = grad.clone()
            actual = rms_norm_backward(
                over, x, weight, rstd, grad_summed=direct, need_weight=need_weight, normed=over, **how
            )
            assert torch.equal(over, normed)
            assert torch.equal(actual[0], dx if need_weight else frozen)
            assert actual[1] is None if not need_weight else torch.equal(actual[1], dweight)
        without, _ = rms_norm_backward(grad, x, weight, rstd, **how)
        assert relative(without + direct, dx) <= 1.5 * torch.finfo(dx.dtype).eps, "each of three is rounded"
        assert relative(without, dx) > 0.1
    leaf = x.clone().requires_grad_()
    outputs = rms_norm(leaf, weight, EPS, **{**how, "implementation": "torch"}), leaf * 1
    plain = gradients(outputs, [leaf, weight], (grad, direct))
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    truth = gradients((defined(wide[0], 1 + wide[1], centred=False), wide[0] * 1), wide, (grad, direct))
    assert dweight is not None
    for at, value in ((0, normed), (2, dx), (3, dweight)):
        assert_no_worse(value, plain[at], truth[at])


@pytest.mark.parametrize("shape", [(700, 40), (33, 1100)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_recomputed_over_the_gradient(device: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs walk over rows and read the next rows before they overwrite these."""
    monkeypatch.setattr(kernels, "processors", lambda _: 1)
    x, grad, direct = random_tensor(3, *shape, device=device, dtype=torch.float16).unbind()
    weight = random_tensor(shape[1], device=device, dtype=torch.float16)
    normed, rstd = rms_norm_forward(x, weight, EPS, implementation="triton")
    reference = rms_norm_backward(grad, x, weight, rstd, grad_summed=direct, implementation="triton")
    over = grad.clone()
    actual = rms_norm_backward(over, x, weight, rstd, grad_summed=direct, normed=over, implementation="triton")
    assert torch.equal(over, normed)
    for ours, right in zip(actual, reference, strict=True):
        assert ours is not None
        assert right is not None
        assert relative(ours, right) <= torch.finfo(torch.float16).eps


@pytest.mark.parametrize("counted", [0, 1, 5, 9])
@pytest.mark.parametrize(("width", "eps"), [(40, EPS), (40, 0.0), (1100, EPS)])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_padding(device: str, width: int, eps: float, counted: int) -> None:
    """Padding rows are not read, and their results are zeros. Other rows get the same bits as without padding."""
    x, grad, direct = random_tensor(3, 9, width, device=device, dtype=torch.float32).unbind()
    weight = random_tensor(width, device=device, dtype=torch.float32)
    short = [tensor[:counted].clone() for tensor in (x, grad, direct)]
    for tensor in (x, grad, direct):
        tensor[counted:] = float("nan")
    count = RowCount(torch.tensor([counted], dtype=torch.int32, device=device), len(x))

    def run(x: Tensor, grad: Tensor, direct: Tensor, row_count: RowCount | None) -> list[Tensor]:
        how: dict[str, Any] = {"row_count": row_count, "implementation": "triton"}
        normed, rstd = rms_norm_forward(x, weight, eps, **how)
        again = rms_norm_apply(x, weight, rstd, **how)
        dx, dweight = rms_norm_backward(grad, x, weight, rstd, grad_summed=direct, **how)
        over = grad.clone()
        alone, _ = rms_norm_backward(over, x, weight, rstd, need_weight=False, normed=over, **how)
        assert dweight is not None
        return [dweight, normed, again, dx, alone, over]

    of_weight, *ours = run(x, grad, direct, count)
    if not counted:
        assert not of_weight.any()
    else:
        of_weight_alone, *reference = run(*short, None)
        assert relative(of_weight, of_weight_alone) <= 1e-6
        assert all(torch.equal(a[:counted], b) for a, b in zip(ours, reference, strict=True))
    assert not any(tensor[counted:].any() for tensor in ours)


@pytest.mark.parametrize("device", DEVICES)
def test_unneeded_gradients_are_not_computed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, kernels, "backward")
    tensors = [random_tensor(*size, device=device, dtype=torch.float32, seed=len(size)) for size in ((3, 8), (8,))]
    full: list[Tensor] = []
    for mask in ((True, True), (True, False), (False, True)):
        leaves = [tensor.clone().requires_grad_(needed) for tensor, needed in zip(tensors, mask, strict=True)]
        layer_norm(*leaves, EPS, implementation="triton").square().sum().backward()
        assert calls[-1][7] == mask
        if not full:
            full = [leaf.grad for leaf in leaves if leaf.grad is not None]
        for leaf, right, needed in zip(leaves, full, mask, strict=True):
            assert (leaf.grad is not None) == needed
            assert leaf.grad is None or relative(leaf.grad, right) <= 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_kernel_with_a_weight_for_each_head(device: str) -> None:
    """Cohere's q and k norms have weights ``[heads, D]``."""
    for shape, own in (((5, 3, 10), (3, 10)), ((2, 4, 3, 130), (3, 130)), ((5, 3, 10), (10,)), ((1, 1), (1,))):
        x, grad = (random_tensor(*shape, device=device, dtype=torch.float32, seed=seed) for seed in range(2))
        weight = random_tensor(*own, device=device, dtype=torch.float32, seed=2)
        inputs = [tensor.requires_grad_() for tensor in (x, weight)]
        wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
        actual, theirs = (
            gradients((layer_norm(x, weight, EPS, implementation=which),), inputs, (grad,))
            for which in ("triton", "torch")
        )
        truth = gradients((defined(wide[0], wide[1], centred=True),), wide, (grad,))
        for value, torch_s, right in zip(actual, theirs, truth, strict=True):
            if right.any():
                assert_no_worse(value, torch_s, right)
            else:
                # in a row of one, terms of about 200 cancel: the gradient is their rounding in float32
                assert value.abs().max() <= 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_and_rows_of_any_size(device: str) -> None:
    for rows, width in ((0, 8), (1, 1), (2, 3000), (40, 3)):
        x = random_tensor(rows, width, device=device, dtype=torch.float32).requires_grad_()
        weight = random_tensor(width, device=device, dtype=torch.float32, seed=1).requires_grad_()
        actual, expected = (
            gradients((rms_norm(x, weight, EPS, implementation=which),), [x, weight], (x.detach() + 1,))
            for which in ("triton", "torch")
        )
        rstd = (x.detach().square().mean(-1, keepdim=True) + EPS).rsqrt()
        # the gradient of a row of one is the rest of terms that cancel, so it is measured against these terms
        terms = (x.detach() + 1) * weight.detach() * rstd if width == 1 else actual[1]
        for mine, theirs, size in zip(actual, expected, (actual[0], terms, actual[2]), strict=True):
            assert mine.shape == theirs.shape
            assert rows == 0 or (mine - theirs).abs().max() <= 1e-5 * size.abs().max()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("device", DEVICES)
def test_in_autograd(device: str, implementation: Any) -> None:
    """Two backwards give the same bits, and both kinds of checkpointing work."""
    x, weight = (random_tensor(*size, device=device, dtype=torch.float32, seed=len(size)) for size in ((37, 50), (50,)))
    leaves: list[Tensor] = []

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, EPS, implementation=implementation).square() + x

    for how in ("plain", "reentrant", "not reentrant"):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        if how == "plain":
            out = run(*inputs)
            first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
            again = torch.autograd.grad(out.sum(), inputs)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            leaves = list(first)
            continue
        checkpoint(run, *inputs, use_reentrant=how == "reentrant").sum().backward()
        assert all(torch.equal(leaf.grad, b) for leaf, b in zip(inputs, leaves, strict=True))


def test_unsupported_inputs_raise_if_the_kernel_is_named() -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)
    wide = torch.randn(1, MAX_WIDTH + 1)
    for call in (
        lambda: rms_norm(x.double(), weight.double(), EPS, implementation="triton"),
        lambda: rms_norm(wide, wide[0], EPS, implementation="triton"),
        lambda: layer_norm(x, torch.randn(2, 4), EPS, implementation="triton"),
        lambda: rms_norm(x, weight.double(), EPS, implementation="triton"),
        lambda: rms_norm_forward(x, weight[:4], EPS, implementation="triton"),
    ):
        with pytest.raises(ValueError, match="Pass implementation='auto' or 'torch'"):
            call()


def test_compiled_whole() -> None:
    """The compiler traces the definition and its gradients."""
    x, weight = torch.randn(4, 16).requires_grad_(), torch.randn(16).requires_grad_()

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return layer_norm(rms_norm(x, weight, EPS), weight, EPS) + rms_norm(
            x, weight, EPS, rounding="after", unit_offset=True
        )

    actual = [
        gradients((function(x, weight),), [x, weight], (torch.ones(4, 16),))
        for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager"))
    ]
    for mine, theirs in zip(*actual, strict=True):
        assert relative(mine, theirs) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 896, 2304, 4096, 5120, 8192, 16384, 18432])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widths_of_real_models(dtype: torch.dtype, width: int) -> None:
    """Each block size compiles, and none needs more shared memory or registers than there are."""
    x, weight = (random_tensor(*size, device="cuda", dtype=dtype, seed=len(size)) for size in ((301, width), (width,)))
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    cotangent = (random_tensor(301, width, device="cuda", dtype=dtype, seed=3),)
    actual, again, plain = (
        gradients((rms_norm(x, weight, EPS, implementation=which),), inputs, cotangent)
        for which in ("triton", "triton", "torch")
    )
    truth = gradients((defined(wide[0], wide[1], centred=False),), wide, cotangent)
    for mine, same, theirs, right in zip(actual, again, plain, truth, strict=True):
        assert torch.equal(mine, same)
        assert_no_worse(mine, theirs, right)


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    width, rows = 16384, 2**31 // 16384 + 3
    x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.arange(width, device="cuda")
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    normed, rstd = rms_norm_forward(x, weight, EPS)
    assert relative(normed[-1:], rms_norm(x[-1:], weight, EPS, implementation="torch")) < 5e-3
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
