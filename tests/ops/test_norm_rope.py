"""Normalised and rotated heads: the fused kernel against the two ops and the stock modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_checks import KERNEL_DTYPES, assert_no_worse, relative
from rope_cases import DEVICE, IMPLEMENTATIONS, LAYOUTS, SHAPES, count_launches, error_of, on_gpu, random_tensor, tables
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.qwen3 import modeling_qwen3

from fastpack.ops.implementation import Implementation
from fastpack.ops.kinds import Rounding
from fastpack.ops.rope import Layout, apply_rope, norm_rope

EPS = 1e-3  # large, so that it shows
KINDS: tuple[tuple[Rounding, bool], ...] = (("before", False), ("after", True))


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Return q, k and their weights, and cotangents."""
    tokens, h, k_heads, d, _ = shape
    leaves = [random_tensor(tokens, h, d, dtype=dtype), random_tensor(tokens, k_heads, d, dtype=dtype)]
    leaves += [random_tensor(d, dtype=dtype, seed=seed) for seed in (2, 3)]
    return [x.requires_grad_() for x in leaves], [random_tensor(*x.shape, dtype=dtype, seed=1) for x in leaves[:2]]


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the definition in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("rounding", "unit_offset"), KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_rope_is_its_two_definitions(
    layout: Layout, rounding: Rounding, unit_offset: bool, implementation: Implementation
) -> None:
    (q, k, q_weight, k_weight), _ = inputs((6, 4, 2, 12, 8))
    cos, sin = tables(6, 8, layout)
    options: dict[str, Any] = {"layout": layout, "rounding": rounding, "implementation": implementation}
    actual = norm_rope(q, k, q_weight, k_weight, EPS, cos, sin, unit_offset=unit_offset, **options)
    normalised = [by_hand(x, w + 1.0 if unit_offset else w) for x, w in ((q, q_weight), (k, k_weight))]
    expected = apply_rope(*normalised, cos.double(), sin.double(), layout=layout, implementation="torch")
    assert error_of(actual, expected) < 1e-6
    for wrong in (
        norm_rope(q, k, k_weight, q_weight, EPS, cos, sin, unit_offset=unit_offset, **options),
        norm_rope(q, k, q_weight, k_weight, EPS, cos, sin, unit_offset=not unit_offset, **options),
        norm_rope(q, k, q_weight, k_weight, 1.0, cos, sin, unit_offset=unit_offset, **options),
    ):
        assert error_of(wrong, expected) > 0.1


@pytest.mark.sample(16)
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(("rounding", "unit_offset"), KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_is_the_two_ops(
    shape: tuple[int, ...],
    layout: Layout,
    rounding: Rounding,
    unit_offset: bool,
    indexed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward take one launch each, and one sum of the partial gradients of the weights."""
    tokens, rotary = shape[0], shape[-1]
    cos, sin = tables(tokens + 3 if indexed else tokens, rotary, layout)
    positions = random_tensor(tokens).argsort() + 2 if indexed else None
    leaves, cotangents = inputs(shape)
    options: dict[str, Any] = {"layout": layout, "rounding": rounding, "unit_offset": unit_offset}

    def run(implementation: Implementation) -> tuple[Tensor, ...]:
        out = norm_rope(*leaves, EPS, cos, sin, positions=positions, implementation=implementation, **options)
        first = torch.autograd.grad(out, leaves, cotangents, retain_graph=True)
        second = torch.autograd.grad(out, leaves, cotangents)
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), "no saved tensor is overwritten"
        return *out, *first

    expected = run("torch")
    with (
        count_launches(monkeypatch, "norm_rope", "rotate_kernel") as (forward, _),
        count_launches(monkeypatch, "norm_rope", "_norm_rotate_backward_kernel") as (backward, _),
    ):
        actual = run("triton")
    assert (forward.count, backward.count) == (1, 2)
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    if tokens:
        assert error_of(actual, expected) < 2e-6
        return
    assert all(not x.any() for x in actual)


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("shape", "indexed"),
    [((7, 3, 1, 8, 8), False), ((1, 5, 2, 16, 6), True), ((67, 8, 2, 128, 96), True)],
    ids=["every dimension", "one token, a share", "heads of a model, a share"],
)
@pytest.mark.parametrize(("rounding", "unit_offset"), KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
def test_strided_heads_are_as_near_to_float64_as_the_two_ops(
    device: str,
    dtype: torch.dtype,
    layout: Layout,
    rounding: Rounding,
    unit_offset: bool,
    shape: tuple[int, ...],
    indexed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads are slices or transposed, gradients are too or are expanded, and tables are slices."""
    from fastpack.ops.kernels import norm_rope as kernels

    monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 4)  # so that each takes several blocks
    tokens, h, k_heads, d, rotary = shape
    q = random_tensor(tokens, h + 1, d + 4, dtype=dtype)[:, 1:, :d]
    k = random_tensor(k_heads, tokens, d, dtype=dtype).transpose(0, 1)
    weights = [random_tensor(d, dtype=dtype, seed=seed) for seed in (2, 3)]
    leaves = [x.to(device).requires_grad_() for x in (q, k, *weights)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    cotangents = [
        random_tensor(h, tokens, d, dtype=dtype, seed=1).transpose(0, 1),
        random_tensor(tokens, 1, d, dtype=dtype, seed=1).expand(tokens, k_heads, d),
    ]
    cos, sin = (x[3:, :rotary] for x in tables(tokens + 6, rotary + 4, layout, dtype))
    positions = torch.arange(tokens, device=device).flip(0) + 2 if indexed else None
    if positions is None:
        cos, sin = cos[:tokens], sin[:tokens]

    def gradients(out: tuple[Tensor, ...], of: list[Tensor]) -> list[Tensor]:
        return [*out, *torch.autograd.grad(out, of, [c.to(y.dtype) for c, y in zip(cotangents, out, strict=True)])]

    def run(*args: Tensor, implementation: Implementation = "torch", **changes: Any) -> list[Tensor]:
        options: dict[str, Any] = {"layout": layout, "rounding": rounding, "unit_offset": unit_offset, **changes}
        out = norm_rope(
            *args, EPS, cos, sin, positions=positions, implementation=implementation, **options  # type: ignore[misc]
        )  # fmt: skip
        return gradients(out, leaves)

    normalised = [by_hand(x, w + 1.0 if unit_offset else w) for x, w in zip(wide[:2], wide[2:], strict=True)]
    angles = [x.double() if positions is None else x[positions].double() for x in (cos, sin)]
    truth = gradients(apply_rope(*normalised, *angles, layout=layout, implementation="torch"), wide)
    actual, plain = run(*leaves, implementation="triton"), run(*leaves)
    for mine, theirs, right in zip(actual, plain, truth, strict=True):
        assert_no_worse(mine, theirs, right)
    q, k, q_weight, k_weight = leaves
    other: Layout = "half" if layout == "interleaved" else "interleaved"
    for wrong in (
        run(q, k, k_weight, q_weight),
        run(*leaves, layout=other),
        run(*leaves, unit_offset=not unit_offset),
    ):
        for i in (0, 1, 2, 3):
            with pytest.raises(AssertionError):
                assert_no_worse(wrong[i], plain[i], truth[i])


def test_forward_and_frozen_backward_are_one_launch_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, *weights), cotangents = inputs((5, 4, 2, 8, 8))
    cos, sin = tables(5, 8, "half")
    frozen = [w.detach() for w in weights]
    with count_launches(monkeypatch, "norm_rope", "rotate_kernel") as (launches, others):
        out = norm_rope(q, k, *frozen, EPS, cos, sin, implementation="triton")
    assert (launches.count, others) == (1, [])
    with count_launches(monkeypatch, "norm_rope", "_norm_rotate_backward_kernel") as (launches, others):
        torch.autograd.grad(out, (q, k), cotangents)
    assert (launches.count, others) == (1, [])


@pytest.mark.parametrize("target", [(0,), (1,), (2,), (3,), (0, 3), (2, 3)])
def test_only_needed_gradients_are_computed(target: tuple[int, ...]) -> None:
    leaves, cotangents = inputs((5, 4, 2, 8, 6))
    cos, sin = tables(5, 6, "half")
    some = [x if i in target else x.detach() for i, x in enumerate(leaves)]
    grads = []
    for implementation, args in (("torch", leaves), ("triton", some)):
        out = norm_rope(*args, EPS, cos, sin, implementation=implementation)  # type: ignore[arg-type]
        needy = [(y, c) for y, c in zip(out, cotangents, strict=True) if y.requires_grad]
        grads.append(torch.autograd.grad([y for y, _ in needy], [leaves[i] for i in target], [c for _, c in needy]))
    assert error_of(*grads) < 2e-6


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_s_gradients_by_finite_differences(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpack.ops.kernels import norm_rope as kernels

    monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 4)  # so that each takes several blocks, the last of them short
    leaves, _ = inputs((70, 40, 33, 6, 4), torch.float64)
    cos, sin = tables(70, 4, layout, torch.float64)
    probes = [random_tensor(*x.shape, dtype=torch.float64, seed=4) for x in leaves[:2]]

    def total(*args: Tensor) -> Tensor:
        out = norm_rope(*args, EPS, cos, sin, layout=layout, implementation="triton")  # type: ignore[misc]
        return sum((y * p).sum() for y, p in zip(out, probes, strict=True))

    grads = torch.autograd.grad(total(*leaves), leaves)
    for i, grad in enumerate(grads):
        direction = random_tensor(*grad.shape, dtype=torch.float64, seed=5)
        ends = [
            total(*(x.detach() + (step * direction if i == j else 0.0) for j, x in enumerate(leaves)))
            for step in (1e-6, -1e-6)
        ]
        slope = (ends[0] - ends[1]) / 2e-6
        assert abs(slope - (grad * direction).sum()) < 1e-6 * grad.norm() * direction.norm()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slices_of_a_fused_projection_under_checkpointing(implementation: Implementation) -> None:
    weights = inputs((5, 4, 2, 8, 8))[0][2:]
    cos, sin = tables(5, 8, "half")
    qkv = random_tensor(5, 8, 8).requires_grad_()
    before = qkv.detach().clone()

    def loss(qkv: Tensor) -> Tensor:
        q, k, v = qkv.split((4, 2, 2), 1)
        out = norm_rope(q, k, *weights, EPS, cos, sin, implementation=implementation)  # type: ignore[misc]
        return sum(x.sin().sum() for x in (*out, v))

    (expected,) = torch.autograd.grad(loss(qkv), qkv)
    for reentrant in (True, False):
        qkv.grad = None
        checkpoint(loss, qkv, use_reentrant=reentrant).backward()
        assert torch.equal(qkv.grad, expected)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("rounding", "unit_offset"), KINDS)
def test_float32_weights_of_half_precision_heads(rounding: Rounding, unit_offset: bool, autocast: bool) -> None:
    """This happens in a quantised model or under autocast. Dtypes equal the two ops', and the error is no larger."""
    leaves, cotangents = inputs((6, 4, 2, 16, 12))
    half = [x.detach().to(torch.float16 if i < 2 else torch.float32).requires_grad_() for i, x in enumerate(leaves)]
    wide = [x.detach().double().requires_grad_() for x in half]
    cos, sin = tables(6, 12, "half")
    results = []
    for implementation, args in (("torch", wide), ("torch", half), ("triton", half)):
        # in float64 the definition is one of float32 but for rounding="before"
        how: Rounding = "before" if args is wide and not unit_offset else rounding
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast and args is half):
            out = norm_rope(
                *args,
                EPS,
                *((cos.double(), sin.double()) if args is wide else (cos, sin)),
                rounding=how,
                unit_offset=unit_offset,
                implementation=implementation,  # type: ignore[arg-type]
            )
        grads = torch.autograd.grad(out, args, [c.to(y.dtype) for c, y in zip(cotangents, out, strict=True)])
        results.append((*out, *grads))
    truth, plain, mine = results
    for x, y, z in zip(mine, plain, truth, strict=True):
        assert x.dtype == y.dtype
        assert relative(x, z) <= 1.5 * relative(y, z) + 1e-6


@pytest.mark.parametrize("shape", [(4, 8), (32,), (1,)])
def test_weights_of_other_norms_are_refused(shape: tuple[int, ...]) -> None:
    (q, k, _, k_weight), _ = inputs((5, 4, 2, 8, 8))
    for implementation in IMPLEMENTATIONS:
        with pytest.raises(ValueError, match="one weight of"):
            norm_rope(q, k, torch.ones(shape), k_weight, EPS, *tables(5, 8, "half"), implementation=implementation)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def by_stock(
    family: Any, norm: Any, leaves: list[Tensor], angles: tuple[Tensor, ...], cotangents: list[Tensor]
) -> list[Tensor]:
    """Return the stock modules' results and gradients."""
    q, k, *weights = (x.detach().requires_grad_() for x in leaves)
    modules = [norm(q.shape[-1], eps=EPS).to(q.device, q.dtype) for _ in weights]
    for module, weight in zip(modules, weights, strict=True):
        del module.weight
        module.weight = weight
    normalised = [module(x).transpose(0, 1)[None] for module, x in zip(modules, (q, k), strict=True)]
    out = family.apply_rotary_pos_emb(*normalised, *(x[None] for x in angles))
    out = [x[0].transpose(0, 1) for x in out]
    return [*out, *torch.autograd.grad(out, (q, k, *weights), cotangents)]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 333, 4099])
@pytest.mark.parametrize(
    ("family", "norm", "rounding", "unit_offset", "h", "k_heads", "d"),
    [
        (modeling_qwen3, modeling_qwen3.Qwen3RMSNorm, "before", False, 32, 8, 128),
        (modeling_qwen3, modeling_qwen3.Qwen3RMSNorm, "before", False, 5, 1, 80),
        (modeling_gemma3, modeling_gemma3.Gemma3RMSNorm, "after", True, 4, 1, 256),
    ],
)
def test_native_kernel_is_no_worse_than_the_stock_modules(
    family: Any, norm: Any, rounding: Rounding, unit_offset: bool, h: int, k_heads: int, d: int, tokens: int
) -> None:
    leaves, cotangents = inputs((tokens, h, k_heads, d, d), torch.bfloat16)
    angles = tables(tokens, d, "half", torch.bfloat16)
    theirs = by_stock(family, norm, leaves, angles, cotangents)
    wide = [[x.float() for x in some] for some in (leaves, angles, cotangents)]
    truth = by_stock(family, norm, wide[0], tuple(wide[1]), wide[2])
    out = norm_rope(*leaves, EPS, *angles, rounding=rounding, unit_offset=unit_offset)  # type: ignore[misc]
    mine = [*out, *torch.autograd.grad(out, leaves, cotangents)]
    for x, y, z in zip(mine, theirs, truth, strict=True):
        assert x.dtype == torch.bfloat16
        assert relative(x, z) <= 1.5 * relative(y, z)


@pytest.mark.gpu
def test_native_backward_is_deterministic_and_few_launches() -> None:
    leaves, cotangents = inputs((5000, 8, 2, 128, 128), torch.bfloat16)
    cos, sin = tables(5000, 128, "half", torch.bfloat16)
    out = norm_rope(*leaves, EPS, cos, sin)  # type: ignore[misc]

    def backward(of: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, of, cotangents, retain_graph=True)

    first = backward(leaves)
    assert all(torch.equal(x, y) for _ in range(3) for x, y in zip(backward(leaves), first, strict=True))
    assert len(on_gpu(lambda: backward(leaves))) <= 6, "the kernel, and for each weight a sum and a cast"
    frozen = norm_rope(*leaves[:2], *(w.detach() for w in leaves[2:4]), EPS, cos, sin)  # type: ignore[call-arg]
    assert len(on_gpu(lambda: torch.autograd.grad(frozen, leaves[:2], cotangents, retain_graph=True))) == 1
