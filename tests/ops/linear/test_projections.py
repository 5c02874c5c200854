"""Groups of projections and the gated MLP, against modules called one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastpack.ops.linear.gated_mlp import gated_mlp
from fastpack.ops.linear.lora import add_updates
from fastpack.ops.linear.lora_matmul import _stack_and_cast
from fastpack.ops.linear.operands import Lora, Norm, Projection
from fastpack.ops.linear.projections import project
from fastpack.ops.norm import rms_norm

T, H, INNER, R = 13, 24, 40, 3
BOUND = 1e-5


def leaf(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype).requires_grad_(grad)


def projection(
    out: int,
    size: int = H,
    *,
    bias: bool = False,
    lora: bool = True,
    trained: bool = False,
    scale: float = 1.7,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    lora_dtype: torch.dtype = torch.float32,
) -> Projection:
    update = Lora(leaf(R, size, dtype=lora_dtype), leaf(out, R, dtype=lora_dtype), scale, dropout) if lora else None
    weight = leaf(out, size, dtype=dtype, grad=trained)
    return Projection(weight, dtype, leaf(out, dtype=dtype, grad=trained) if bias else None, update)


def defined(n: Tensor, p: Projection, dropped: Tensor | None = None) -> Tensor:
    """Compute the definition with PEFT's casts: the update in A's dtype, the sum rounded to the matmul's dtype."""
    y = F.linear(n, p.weight, p.bias)
    if p.lora is None:
        return y
    x = (n if dropped is None else dropped).to(p.lora.a.dtype)
    return (y + F.linear(F.linear(x, p.lora.a), p.lora.b) * p.lora.scale).to(y.dtype)


def leaves(*owners: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for owner in owners:
        if isinstance(owner, Tensor):
            tensors.append(owner)
        elif isinstance(owner, Projection):
            tensors += [owner.weight, *([owner.bias] if owner.bias is not None else [])]
            tensors += [owner.lora.a, owner.lora.b] if owner.lora else []
    return [tensor for tensor in tensors if tensor.requires_grad]


def gradients(outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    total = sum((o * c).sum() for o, c in zip(outputs, cotangents, strict=True))
    return list(torch.autograd.grad(total, inputs))


def relative(value: Tensor, reference: Tensor) -> float:
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).abs().max() / reference.abs().max())


def agree(mine: list[Tensor], theirs: list[Tensor], bound: float = BOUND) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert relative(a, b) <= bound


GROUPS: dict[str, Callable[[], list[Projection]]] = {
    "q, k, v with LoRA": lambda: [projection(32), projection(16), projection(16)],
    "different scales and a bias": lambda: [projection(32, bias=True), projection(16, scale=0.3), projection(8)],
    "some without": lambda: [projection(32), projection(16, lora=False), projection(16)],
    "none with": lambda: [projection(32, lora=False), projection(16, lora=False, bias=True)],
    "trained weights": lambda: [projection(32, lora=False, trained=True, bias=True), projection(16, trained=True)],
    "one": lambda: [projection(H)],
}


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("name", GROUPS)
def test_group_is_its_definition(name: str, with_norm: bool) -> None:
    torch.manual_seed(0)
    group, x, weight = GROUPS[name](), leaf(T, H), leaf(H)
    residual = leaf(T, H) if name == "one" else None
    inputs = leaves(x, *group) + ([weight] if with_norm else []) + ([residual] if residual is not None else [])
    cotangents = [torch.randn(T, len(p.weight)) for p in group]
    along = torch.randn(T, H)

    n = rms_norm(x, weight, 1e-6) if with_norm else x
    theirs = [defined(n, p) + (0 if residual is None else residual) for p in group]
    expected = gradients([*theirs, x * 1], inputs, [*cotangents, along])
    norm = Norm(weight, 1e-6) if with_norm else None
    mine, passed = project(x, group, norm=norm, residual=residual)
    agree(list(mine), theirs)
    assert torch.equal(passed, x)
    agree(gradients([*mine, passed], inputs, [*cotangents, along]), expected)
    wrong, _ = project(x + 1e-3, group, norm=norm, residual=residual)
    assert relative(wrong[0], theirs[0]) > BOUND, "the check can fail"


def test_an_unused_result_needs_no_gradient() -> None:
    group, x = GROUPS["q, k, v with LoRA"](), leaf(T, H)
    (q, _, _), _ = project(x, group)
    q.sum().backward()
    assert group[0].lora is not None
    assert group[1].lora is not None
    assert group[0].lora.a.grad is not None
    assert group[1].lora.b.grad is None
    (r, _, _), _ = project(x.detach(), group)
    r.sum().backward()


def test_dropout_is_each_projection_s_own() -> None:
    group = [projection(32, dropout=0.5), projection(16, dropout=0.25), projection(8)]
    x = leaf(T, H)
    cotangents = [torch.randn(T, len(p.weight)) for p in group]
    torch.manual_seed(7)
    theirs = [defined(x, p, F.dropout(x, p.lora.dropout) if p.lora and p.lora.dropout else x) for p in group]
    expected = gradients(theirs, leaves(x, *group), cotangents)
    torch.manual_seed(7)
    mine, _ = project(x, group)
    agree(list(mine), theirs)
    agree(gradients(list(mine), leaves(x, *group), cotangents), expected)
    other, _ = project(x, group)
    assert relative(other[0], theirs[0]) > 1e-2, "another draw"
    agree([other[2]], [theirs[2]])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("form", ["two", "one to both", "trained", "down alone has LoRA", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_norm", [False, True])
def test_gated_mlp_is_its_definition(with_norm: bool, activation: Any, form: str) -> None:
    torch.manual_seed(1)
    trained = form == "trained"
    settings = {"lora": form != "down alone has LoRA", "trained": trained, "bias": form == "bias"}
    widths = [2 * INNER] if form == "one to both" else [INNER, INNER]
    inner = [projection(width, **settings) for width in widths]
    down = projection(H, INNER, trained=trained, bias=form == "bias")
    x, weight, cotangent = leaf(T, H), leaf(H), torch.randn(T, H)
    inputs = leaves(x, *inner, down) + ([weight] if with_norm else [])

    n = rms_norm(x, weight, 1e-6) if with_norm else x
    outputs = [defined(n, p) for p in inner]
    gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
    theirs = defined(ACTIVATIONS[activation](gate) * up, down) + (x if with_norm else 0)
    expected = gradients([theirs], inputs, [cotangent])
    norm = Norm(weight, 1e-6) if with_norm else None
    mine = gated_mlp(x, inner, down, activation, norm=norm, residual=with_norm)
    agree([mine], [theirs])
    agree(gradients([mine], inputs, [cotangent]), expected)
    other = next(name for name in ACTIVATIONS if name != activation)
    assert relative(gated_mlp(x, inner, down, other, norm=norm), theirs) > BOUND  # type: ignore[arg-type]


def test_mlp_whose_input_needs_no_gradient() -> None:
    """This is the first layer over frozen embeddings, with LoRA on ``down`` only."""
    inner, down = [projection(INNER, lora=False), projection(INNER, lora=False)], projection(H, INNER)
    x = leaf(T, H, grad=False)
    theirs = defined(F.silu(defined(x, inner[0])) * defined(x, inner[1]), down)
    expected = gradients([theirs], leaves(down), [torch.ones(T, H)])
    agree(gradients([gated_mlp(x, inner, down, "silu")], leaves(down), [torch.ones(T, H)]), expected)


def test_updates_alone() -> None:
    """The base outputs come from other code."""
    group = [projection(32), projection(16, lora=False), projection(16)]
    x = leaf(T, H)
    cotangents = [torch.randn(T, len(p.weight)) for p in group]
    inputs = [x, *(t for p in group if p.lora for t in (p.lora.a, p.lora.b))]
    theirs = [defined(x, p) for p in group]
    expected = gradients(theirs, inputs, cotangents)
    mine = add_updates(x, [F.linear(x, p.weight) for p in group], [p.lora for p in group])
    agree(mine, theirs)
    agree(gradients(mine, inputs, cotangents), expected)


def test_updates_of_wider_bases_under_autocast() -> None:
    """Updates are computed in autocast's dtype, as in PEFT, and added to LLM.int8's wider outputs."""
    torch.manual_seed(3)
    group = [projection(64, 64), projection(64, 64)]
    x = leaf(256, 64)
    cotangents = [torch.randn(256, 64) for _ in group]
    inputs = [x, *(t for p in group if p.lora for t in (p.lora.a, p.lora.b))]
    bases = [torch.randn(256, 64) for _ in group]

    def updated() -> list[Tensor]:
        return [
            base + F.linear(F.linear(x, p.lora.a), p.lora.b) * p.lora.scale
            for base, p in zip(bases, group, strict=True)
            if p.lora
        ]

    truth = updated()
    exact = gradients(truth, inputs, cotangents)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, mine = updated(), add_updates(x, bases, [p.lora for p in group])
    stock = [*theirs, *gradients(theirs, inputs, cotangents)]
    for ours, other, right in zip([*mine, *gradients(mine, inputs, cotangents)], stock, [*truth, *exact], strict=True):
        assert ours.dtype == other.dtype == torch.float32
        allowed = 1.5 * relative(other, right) + 2 * torch.finfo(torch.bfloat16).eps
        assert 1e-4 < relative(ours, right) <= allowed, "in half precision, and no worse"
    narrow = bases[1].bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        one, other = add_updates(x, [bases[0], narrow], [p.lora for p in group])
    assert (one.dtype, other.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(one, mine[0])
    (of_base,) = torch.autograd.grad(other, narrow, cotangents[1].bfloat16())  # nothing used the first
    assert torch.equal(of_base, cotangents[1].bfloat16())
    alone = add_updates(x, bases, [p.lora for p in group])
    assert relative(alone[0], truth[0]) <= BOUND, "outside autocast in the bases' own: the check can fail"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lora_dtype", [torch.float32, "same"])
def test_half_precision_is_as_good_as_the_modules(dtype: torch.dtype, lora_dtype: Any) -> None:
    """The error against float64 is at most 1.5 times PEFT's, forward and backward."""
    torch.manual_seed(2)
    lora_dtype = dtype if lora_dtype == "same" else lora_dtype
    group = [projection(64, 64, dtype=dtype, lora_dtype=lora_dtype) for _ in range(3)]
    x = leaf(256, 64, dtype=dtype)
    cotangents = [torch.randn(256, 64).to(dtype) for _ in group]
    theirs = [defined(x, p) for p in group]
    mine, _ = project(x, group)
    assert all(y.dtype == dtype for y in mine)
    wide = [wider(p) for p in group]
    x64 = x.detach().double().requires_grad_()
    truth = [defined(x64, p) for p in wide]
    exact = gradients(truth, leaves(x64, *wide), [c.double() for c in cotangents])
    for ours, stock, right in zip(
        [*mine, *gradients(list(mine), leaves(x, *group), cotangents)],
        [*theirs, *gradients(theirs, leaves(x, *group), cotangents)],
        [*truth, *exact],
        strict=True,
    ):
        assert ours.dtype == stock.dtype
        allowed = 1.5 * relative(stock, right) + 2 * torch.finfo(dtype).eps
        assert relative(ours, right) <= allowed


def wider(p: Projection) -> Projection:
    double = lambda t: t.detach().double().requires_grad_(t.requires_grad)  # noqa: E731
    assert p.lora is not None
    return Projection(double(p.weight), torch.float64, None, Lora(double(p.lora.a), double(p.lora.b), p.lora.scale))


def test_float32_weights_under_autocast() -> None:
    group, x = GROUPS["q, k, v with LoRA"](), leaf(T, H)
    half = [Projection(p.weight, torch.bfloat16, p.bias, p.lora) for p in group]
    with torch.autocast("cpu", torch.bfloat16):
        theirs = [defined(x, p) for p in group]
        mine, _ = project(x, half)
        assert all(y.dtype == torch.bfloat16 for y in mine)
        sum(y.float().sum() for y in mine).backward()
    for ours, stock, p in zip(mine, theirs, group, strict=True):
        wide = defined(x, p)
        assert 1e-4 < relative(ours, wide) <= 1.5 * relative(stock, wide)
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in leaves(x, *group))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_a_second_backward(reentrant: bool) -> None:
    inner, down = [projection(INNER), projection(INNER)], projection(H, INNER)
    x, weight = leaf(T, H), leaf(H)
    inputs = leaves(x, *inner, down, weight)

    def block(x: Tensor) -> Tensor:
        return gated_mlp(x, inner, down, "silu", norm=Norm(weight, 1e-6), residual=True)

    expected = gradients([block(x)], inputs, [torch.ones(T, H)])
    plain = block(x)
    plain.sum().backward(retain_graph=True)
    plain.sum().backward()
    agree([t.grad for t in inputs if t.grad is not None], [2 * g for g in expected])
    for tensor in inputs:
        tensor.grad = None
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    agree([t.grad for t in inputs if t.grad is not None], expected)


def test_what_is_saved_for_the_backward() -> None:
    """The MLP saves x, gate and up, but neither the normalised input nor the product of the GLU."""
    saved: list[Tensor] = []
    inner, down = [projection(INNER), projection(INNER)], projection(H, INNER)
    x, weight = leaf(512, H), leaf(H)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        gated_mlp(x, inner, down, "silu", norm=Norm(weight, 1e-6), residual=True)
    big = sorted(t.shape[1] for t in saved if t.ndim == 2 and len(t) == 512)
    assert big == sorted([H, INNER, INNER, 2 * R, R])


@pytest.mark.parametrize("retain", [False, True])
def test_gradients_overwrite_saved_tensors_that_are_not_read_again(retain: bool) -> None:
    saved: list[Tensor] = []
    inner, down = [projection(INNER), projection(INNER)], projection(H, INNER)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        out = gated_mlp(leaf(T, H), inner, down, "silu")
    gate_and_up = [t for t in saved if t.shape == (T, INNER)]
    before = [t.clone() for t in gate_and_up]
    out.sum().backward(retain_graph=retain)
    assert [torch.equal(*pair) for pair in zip(gate_and_up, before, strict=True)] == [retain, retain]


def test_no_copy_of_the_activations_in_float32() -> None:
    copies: list[torch.Size] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.float32 and out.ndim == 2 and out.shape[0] == 512:
                copies.append(out.shape)
            return out

    group = [projection(32, dtype=torch.bfloat16) for _ in range(3)]
    x = leaf(512, H, dtype=torch.bfloat16)
    with Watch():
        outputs, _ = project(x, group)
        torch.autograd.grad(sum(y.sum() for y in outputs), leaves(x, *group))
    assert not copies
    with Watch():
        defined(x, group[0])
    assert copies, "PEFT's own way makes them: the check can fail"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_and_b_are_each_rounded_once(dtype: torch.dtype) -> None:
    """A and B may have any dtypes and strides."""
    all_a = [torch.randn(R, H), torch.randn(H, R).t(), torch.randn(R + 2, H, dtype=torch.bfloat16)]
    all_b = [torch.randn(32, R), torch.randn(R, 16).t().half(), torch.randn(7, R + 2, dtype=torch.float64)]
    stacked, wide = _stack_and_cast(all_a, all_b, dtype)
    assert torch.equal(stacked, torch.cat([a.to(dtype) for a in all_a]))
    assert all(torch.equal(b, other.to(dtype)) for b, other in zip(wide, all_b, strict=True))
    assert not torch.equal(wide[0], all_b[0].flip(0).to(dtype))
