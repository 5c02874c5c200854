"""Rotary embedding, gated units and normalisation against their written definitions, and the stock modules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3 import modeling_phi3

from fastpack.ops.glu import gated
from fastpack.ops.norm import layer_norm, rms_norm
from fastpack.ops.rope import Layout, apply_rope

HALF_DTYPES = (torch.bfloat16, torch.float16)


def relative(value: Tensor, truth: Tensor) -> float:
    assert value.shape == truth.shape
    error = float((value.double() - truth.double()).abs().max() / truth.double().abs().max())
    return math.inf if math.isnan(error) else error


# --- rotary embedding -------------------------------------------------------------------------------------------------

POSITIONS = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 1000, 0])
D = 16


def angles(rotary: int) -> Tensor:
    """``[T, R / 2]`` in float64."""
    return POSITIONS[:, None].double() * 10_000.0 ** (-torch.arange(0, rotary, 2).double() / rotary)


def tables(rotary: int, layout: Layout, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """cos and sin as transformers' modules write them: both halves, beside (Llama) or among each other (Cohere)."""
    theta = angles(rotary)
    theta = torch.cat((theta, theta), -1) if layout == "half" else theta.repeat_interleave(2, -1)
    return theta.cos().to(dtype), theta.sin().to(dtype)


def rotated(x: Tensor, rotary: int, layout: Layout) -> Tensor:
    """The definition: each pair of the first R elements is a complex number, turned by its angle."""
    turn = torch.polar(torch.ones(()).double(), angles(rotary))[:, None]
    half = rotary // 2
    out = x.double().clone()
    first = slice(0, half) if layout == "half" else slice(0, rotary, 2)
    second = slice(half, rotary) if layout == "half" else slice(1, rotary, 2)
    pairs = torch.complex(out[..., first].clone(), out[..., second].clone()) * turn
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def heads(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(len(POSITIONS), n, D, generator=generator, dtype=torch.float64) for n in (4, 2))
    return q.to(dtype), k.to(dtype)


LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")


@pytest.mark.parametrize("rotary", [2, 4, 12, D])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_is_the_definition(layout: Layout, rotary: int) -> None:
    q, k = heads()
    before = q.clone(), k.clone()
    out = apply_rope(q, k, *tables(rotary, layout), layout=layout)
    for x, turned in zip((q, k), out, strict=True):
        assert relative(turned, rotated(x, rotary, layout)) < 1e-14
        assert torch.equal(turned[..., rotary:], x[..., rotary:]), "what is not rotated passes as it is"
        assert torch.equal(turned[POSITIONS == 0], x[POSITIONS == 0])
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_the_layouts_differ() -> None:
    """The negative control of the test above."""
    q, _ = heads()
    assert relative(rotated(q, D, "half"), rotated(q, D, "interleaved")) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_depends_on_distance_alone(layout: Layout) -> None:
    """Query at m against key at n is a function of m - n."""
    x = torch.randn(1, 1, D, dtype=torch.float64).expand(len(POSITIONS), 1, D)
    q, k = apply_rope(x, x.flip(-1), *tables(D, layout), layout=layout)
    scores = q[:, 0] @ k[:, 0].T
    distance = POSITIONS[:, None] - POSITIONS
    for d in distance.unique():
        same = scores[distance == d]
        assert (same - same[0]).abs().max() < 1e-9


@pytest.mark.parametrize("rotary", [4, D])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_gradient(layout: Layout, rotary: int) -> None:
    q, k = (x.requires_grad_() for x in heads())
    written, drawn = tables(rotary, layout), tuple(torch.randn(2, len(POSITIONS), rotary, dtype=torch.float64))
    for cos, sin in (written, drawn):  # the transpose holds for tables that are no rotation, too
        rope = functools.partial(apply_rope, cos=cos, sin=sin, layout=layout)
        assert torch.autograd.gradcheck(rope, (q, k), fast_mode=True)
        assert torch.autograd.gradgradcheck(rope, (q, k), fast_mode=True)


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_in_float32_rounds_once(layout: Layout, dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    q, k = heads(dtype)
    cos, sin = tables(D, layout, table_dtype)
    wide = apply_rope(q.float(), k.float(), cos.float(), sin.float(), layout=layout)
    narrow = apply_rope(q, k, cos, sin, layout=layout, compute_in_float32=True)
    for x, y in zip(narrow, wide, strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, y.to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_of_views(layout: Layout) -> None:
    """Heads are often slices of a fused projection, or transposed: strides must not matter."""
    x = torch.randn(len(POSITIONS), 4, 3 * D)
    cos, sin = tables(12, layout, torch.float32)
    q, k = x[..., D : 2 * D], x[..., :D].transpose(0, 1).contiguous().transpose(0, 1)
    found = apply_rope(q, k, cos, sin, layout=layout)
    expected = apply_rope(q.contiguous(), k.contiguous(), cos, sin, layout=layout)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_float32_tables_serve_half_precision_heads(dtype: torch.dtype) -> None:
    """As under autocast: used as they are, and the heads keep their dtype."""
    q, k = heads(dtype)
    cos, sin = tables(12, "half", torch.float32)
    for x, turned in zip((q, k), apply_rope(q, k, cos, sin), strict=True):
        assert turned.dtype == dtype
        assert torch.equal(turned, apply_rope(x.float(), k.float(), cos, sin)[0].to(dtype))


def as_stock(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
@pytest.mark.parametrize(
    ("stock", "layout", "rotary", "wide"),
    [
        (modeling_llama, "half", D, False),
        (modeling_phi3, "half", 12, False),
        (modeling_cohere, "interleaved", D, True),
    ],
)
def test_rope_is_the_stock_function_but_for_rounding(
    stock: Any, layout: Layout, rotary: int, wide: bool, dtype: torch.dtype
) -> None:
    """A product and a sum are rounded together here: not farther from the same function in float64 than the stock."""
    q, k = heads(dtype)
    cos, sin = tables(rotary, layout, dtype)
    mine = apply_rope(q, k, cos, sin, layout=layout, compute_in_float32=wide)
    theirs = stock.apply_rotary_pos_emb(as_stock(q), as_stock(k), cos[None], sin[None])
    exact = apply_rope(q.double(), k.double(), cos.double(), sin.double(), layout=layout)
    for x, y, truth in zip(mine, theirs, exact, strict=True):
        assert x.dtype == y.dtype == dtype
        assert relative(as_stock(x), as_stock(truth)) <= 1.5 * relative(y, as_stock(truth))
        assert relative(as_stock(x), y) <= 2 * torch.finfo(dtype).eps


# --- gated units ------------------------------------------------------------------------------------------------------


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


# --- normalisation ----------------------------------------------------------------------------------------------------

EPS = 1e-5
WIDTHS = (1, 7, 64, 257, 1024)


def defined(x: Tensor, weight: Tensor, *, centred: bool) -> Tensor:
    """The definitions in float64: mean square or variance, and w."""
    x = x.double()
    if centred:
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight.double()


def stretched(width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows of very different size: eps decides the first, fp16 squares of the last overflow."""
    x = torch.randn(6, 3, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return ((x + 0.3) * torch.tensor([0.0, 1e-4, 1e-2, 1.0, 30.0, 1000.0]).double()[:, None, None]).to(dtype)


def drawn_weight(width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (1 + 0.5 * torch.randn(width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).to(dtype)


NORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool, float]] = {
    # op, centred, what is added to the weight
    "rms, rounded before": (lambda x, w: rms_norm(x, w, EPS), False, 0.0),
    "rms, rounded after": (lambda x, w: rms_norm(x, w, EPS, rounding="after"), False, 0.0),
    "rms, 1 + weight": (lambda x, w: rms_norm(x, w, EPS, rounding="after", unit_offset=True), False, 1.0),
    "layer": (lambda x, w: layer_norm(x, w, EPS), True, 0.0),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NORMS)
def test_norm_is_the_definition(name: str, width: int) -> None:
    """In float32; rows are compared one by one, since they differ by seven orders of magnitude."""
    op, centred, offset = NORMS[name]
    x, weight = stretched(width, torch.float32), drawn_weight(width, torch.float32)
    out, truth = op(x, weight), defined(x, weight + offset, centred=centred)
    if centred and width == 1:
        assert torch.equal(out, torch.zeros_like(out))
        return
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    for row in range(1, len(x)):
        assert relative(out[row], truth[row]) < 2e-6, row


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_norm_of_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    """One rounding for rounding "after", two for "before": no overflow of squares, no loss in the mean."""
    op, centred, offset = NORMS[name]
    x, weight = stretched(257, dtype), drawn_weight(257, dtype)
    out = op(x, weight)
    assert out.dtype == dtype
    assert out.isfinite().all()
    truth = defined(x, weight.double() + offset, centred=centred)
    roundings = 1 if "before" not in name else 2
    allowed = truth.abs() * (roundings * torch.finfo(dtype).eps / 2 * 1.01) + torch.finfo(dtype).smallest_normal
    assert ((out.double() - truth).abs() <= allowed).all()


def test_layer_norm_takes_a_weight_for_each_head() -> None:
    """Cohere's q and k norms: ``[heads, D]``."""
    x, weight = torch.randn(5, 4, 8), torch.randn(4, 8)
    out = layer_norm(x, weight, EPS)
    for head in range(4):
        assert torch.equal(out[:, head], layer_norm(x[:, head], weight[head], EPS))


@pytest.mark.parametrize("name", NORMS)
def test_norm_gradient_is_the_definition(name: str) -> None:
    op, centred, offset = NORMS[name]
    grads: list[tuple[Tensor, ...]] = []
    cotangent = torch.randn(6, 3, 65)
    for dtype in (torch.float32, torch.float64):
        x = stretched(65).float().to(dtype).requires_grad_()
        weight = drawn_weight(65).float().to(dtype).requires_grad_()
        out = op(x, weight) if dtype == torch.float32 else defined(x, weight + offset, centred=centred)
        grads.append(torch.autograd.grad(out, (x, weight), cotangent.to(dtype)))
    (x32, w32), (x64, w64) = grads
    assert relative(w32, w64) < 1e-5
    for row in range(len(x32)):
        assert relative(x32[row], x64[row]) < 1e-5, row


class Stock:
    """A stock module with a drawn weight, and the op with the arguments that its family gives it."""

    def __init__(self, name: str, width: int, dtype: torch.dtype) -> None:
        cls, self.op = {
            "llama": (modeling_llama.LlamaRMSNorm, rms_norm),
            "olmo2": (Olmo2RMSNorm, lambda x, w, eps: rms_norm(x, w, eps, rounding="after")),
            "gemma": (GemmaRMSNorm, lambda x, w, eps: rms_norm(x, w, eps, rounding="after", unit_offset=True)),
            "cohere": (modeling_cohere.CohereLayerNorm, layer_norm),
        }[name]
        self.module = cls(width, eps=EPS).to(dtype)
        with torch.no_grad():
            self.module.weight.copy_(drawn_weight(width))

    def mine(self, x: Tensor) -> Tensor:
        return self.op(x, self.module.weight, EPS)


RMS = ("llama", "olmo2", "gemma")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
@pytest.mark.parametrize("name", RMS)
def test_rms_norm_is_the_stock_module_to_the_bit(name: str, dtype: torch.dtype, width: int) -> None:
    stock = Stock(name, width, dtype)
    x = stretched(width, dtype)
    theirs, mine = stock.module(x), stock.mine(x)
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, mine = stock.module(x), stock.mine(x)
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("name", [*RMS, "cohere"])
def test_float32_weight_of_a_half_precision_model(name: str, dtype: torch.dtype) -> None:
    """What ``prepare_model_for_kbit_training`` leaves: the result has the dtype that the stock module gives it."""
    stock = Stock(name, 64, torch.float32)
    x = stretched(64, dtype)
    theirs, mine = stock.module(x), stock.mine(x)
    assert mine.dtype == theirs.dtype
    assert relative(mine.detach(), theirs.detach()) <= torch.finfo(theirs.dtype).eps


@pytest.mark.parametrize("width", WIDTHS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
def test_layer_norm_is_the_stock_module_but_for_rounding(dtype: torch.dtype, width: int) -> None:
    """Torch's kernel sums in another order than Cohere's module: no worse than it, and equal once rounded to bf16
    wherever float32 did not fall on an edge."""
    stock = Stock("cohere", width, dtype)
    x = stretched(width, dtype)[2:]
    theirs, mine = stock.module(x).detach(), stock.mine(x).detach()
    assert mine.dtype == theirs.dtype == dtype
    truth = defined(x, stock.module.weight.detach(), centred=True)
    for row in range(len(x)):
        own = relative(theirs[row], truth[row])
        assert relative(mine[row], truth[row]) <= 1.5 * own + torch.finfo(torch.float32).eps, row
    if dtype != torch.float32:
        assert (mine != theirs).double().mean() < 2e-3
    assert relative(mine, theirs) <= 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", [*RMS, "cohere"])
def test_norm_gradients_are_the_stock_module_s(name: str) -> None:
    stock = Stock(name, 64, torch.float32)
    cotangent = torch.randn(4, 3, 64)
    found: list[tuple[Tensor, ...]] = []
    for run in (stock.module, stock.mine):
        x = stretched(64, torch.float32)[2:].requires_grad_()
        found.append(torch.autograd.grad(run(x), (x, stock.module.weight), cotangent))
    for theirs, mine in zip(*found, strict=True):
        assert relative(mine, theirs) < 1e-5
        if theirs.ndim == 3:
            assert all(relative(mine[row], theirs[row]) < 1e-5 for row in range(len(theirs)))
