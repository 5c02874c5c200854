"""Gated normalisation: the definition against transformers' modules, and the kernels against the definition."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from op_checks import DEVICES, KERNEL_DTYPES, assert_no_worse, count_calls, relative
from torch import Tensor

from fastpack.families.lock import proved_spec
from fastpack.families.registry import FAMILIES
from fastpack.families.spec import Family, GatedNormSpec
from fastpack.layers.norm import gated_norm_forward
from fastpack.layers.runtime import Runtime
from fastpack.ops.gated_norm import gated_norm
from fastpack.ops.kinds import GatedNormKind
from fastpack.utils.replacement import Replacement

pytest.importorskip("triton")
from fastpack.ops.kernels import gated_norm as kernels

EPS = 1e-5
KINDS = [
    GatedNormKind(first, activation, before)
    for first in (False, True)
    for activation in ("silu", "sigmoid")
    for before in (True, False)
]
SHAPES = {
    "one row": ((1, 2), None),
    "heads": ((5, 3, 70), None),
    "groups": ((7, 4 * 34), 34),
    "wide": ((3, 2100), 1050),
}
MODULES = [
    (family, name)
    for family in FAMILIES.values()
    for name, spec in family.fast.items()
    if isinstance(spec, GatedNormSpec)
]


def random_tensors(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return x, a gate, a weight and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    sizes = (shape, shape, shape[-1:], shape)
    return [(torch.randn(*size, generator=generator) + 0.3).to(device, dtype) for size in sizes]


def defined(x: Tensor, gate: Tensor, weight: Tensor, kind: GatedNormKind, group: int | None) -> Tensor:
    """Compute the formula in float64."""
    active = torch.sigmoid(gate) if kind.activation == "sigmoid" else gate * torch.sigmoid(gate)
    y = (x * active if kind.gate_first else x).unflatten(-1, (-1, group or x.shape[-1]))
    n = (y / (y.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(-2) * weight
    return n if kind.gate_first else n * active


def results(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kernel_is_the_definition(
    kind: GatedNormKind, device: str, dtype: torch.dtype, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = (count_calls(monkeypatch, kernels, call) for call in ("forward", "backward"))
    shape, group = SHAPES[case]
    *inputs, grad = random_tensors(shape, device, dtype)
    wide = [x.double().requires_grad_() for x in inputs]
    for x in inputs:
        x.requires_grad_()
    how: dict[str, Any] = {"group": group}
    actual = results(gated_norm(*inputs, EPS, kind, **how, implementation="triton"), inputs, grad)
    assert (len(forward), len(backward)) == (1, 1)
    plain = results(gated_norm(*inputs, EPS, kind, **how, implementation="torch"), inputs, grad)
    assert (len(forward), len(backward)) == (1, 1)
    truth = results(defined(*wide, kind, group), wide, grad)
    check(actual, plain, truth)
    wrong_kinds = (
        (kind._replace(gate_first=not kind.gate_first), group),
        (kind._replace(activation="silu" if kind.activation == "sigmoid" else "sigmoid"), group),
        *([(kind, None)] if group else []),
    )
    for wrong, wrong_group in wrong_kinds:
        other = results(defined(*wide, wrong, wrong_group), wide, grad)
        with pytest.raises(AssertionError):
            check([x.to(dtype) for x in other], plain, truth)


def check(actual: list[Tensor], plain: list[Tensor], truth: list[Tensor]) -> None:
    for mine, theirs, right in zip(actual, plain, truth, strict=True):
        assert_no_worse(mine, theirs, right)


@pytest.mark.parametrize(("device", "dtype"), [case for case in KERNEL_DTYPES if case.values[1] != torch.float32])
def test_kernel_rounds_where_the_family_does(device: str, dtype: torch.dtype) -> None:
    x, gate, weight, _ = random_tensors((9, 256), device, dtype)
    for first in (False, True):
        kinds = [GatedNormKind(first, "silu", before) for before in (True, False)]
        plain, actual = (
            [gated_norm(x, gate, weight, EPS, kind, implementation=how) for kind in kinds]  # type: ignore[arg-type]
            for how in ("torch", "triton")
        )
        for mine, theirs in zip(actual, plain, strict=True):
            assert (mine != theirs).double().mean() < 5e-3, "but where float32 fell on an edge"
        assert (actual[0] != actual[1]).double().mean() > 0.1


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("device", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_mixed_dtypes(kind: GatedNormKind, device: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """A scan's result may be in float32 beside a gate in bf16; weights may be in float32."""
    x, gate, weight, grad = random_tensors((4, 70), device, dtype)
    inputs = [each.requires_grad_() for each in (x.float(), gate, weight.to(weight_dtype))]
    wide = [each.detach().double().requires_grad_() for each in inputs]
    plain, actual = (
        results(gated_norm(*inputs, EPS, kind, implementation=how), inputs, grad)  # type: ignore[arg-type]
        for how in ("torch", "triton")
    )
    truth = results(defined(*wide, kind, None), wide, grad)
    for mine, theirs, right in zip(actual, plain, truth, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative(mine, right) <= 1.5 * relative(theirs, right) + 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_slices_of_a_projection(device: str) -> None:
    """A gate is a slice of a wider projection; results are those of a copy. The weight is frozen."""
    base, x, weight, grad = random_tensors((6, 40), device, torch.float32)
    base = torch.cat([base, base.flip(0)], 1)
    kind = GatedNormKind(True, "silu", True)
    found = []
    for gate, how in ((base[:, 20:60], "triton"), (base[:, 20:60].contiguous(), "triton"), (base[:, 20:60], "torch")):
        inputs = [each.detach().requires_grad_() for each in (x, gate)]
        out = gated_norm(*inputs, weight[:40], EPS, kind, group=20, implementation=how)  # type: ignore[arg-type]
        found.append(results(out, inputs, grad))
    sliced, copied, plain = found
    assert all(torch.equal(a, b) for a, b in zip(sliced, copied, strict=True))
    assert all(relative(a, b) <= 1e-5 for a, b in zip(sliced, plain, strict=True))


@pytest.mark.parametrize(("family", "name"), MODULES, ids=[name for _, name in MODULES])
def test_definition_is_transformers(family: Family, name: str) -> None:
    """Bit for bit, in bfloat16 and in float32, in the installed release."""
    try:
        cls = getattr(importlib.import_module(family.module), name)
    except (ImportError, AttributeError):
        pytest.skip(f"NO {name} IN THIS TRANSFORMERS")
    spec = proved_spec(cls, family)
    assert isinstance(spec, GatedNormSpec)
    x, gate, weight, _ = random_tensors((6, 48), "cpu", torch.bfloat16)
    norm: Any = cls(48, **({} if spec.group is None else {"group_size": 16}))
    replacement: Replacement[Any, Any] = Replacement(
        norm, "forward", gated_norm_forward, spec, Runtime(kernels="torch")
    )
    for dtype in (torch.bfloat16, torch.float32):
        norm.weight.data = weight.to(dtype)
        expected = norm(x.to(dtype), gate.to(dtype))
        assert torch.equal(replacement(x.to(dtype), gate.to(dtype)), expected)
        if spec.gate_first:
            assert torch.equal(replacement(x.to(dtype)), norm(x.to(dtype))), "without a gate"


def test_groups_divide_a_row() -> None:
    x, gate, weight, _ = random_tensors((3, 10), "cpu", torch.float32)
    for how in ("torch", "triton"):
        with pytest.raises(ValueError, match="groups of 4"):
            gated_norm(x, gate, weight, EPS, KINDS[0], group=4, implementation=how)  # type: ignore[arg-type]


def test_what_the_kernel_refuses() -> None:
    x, gate, weight, _ = random_tensors((3, 8), "cpu", torch.float32)
    kind = KINDS[0]
    for tensors in ((x.double(), gate, weight), (x, gate[:, :4], weight), (x, gate, weight[:4])):
        with pytest.raises(ValueError, match="gated normalisation"):
            gated_norm(*tensors, EPS, kind, implementation="triton")
