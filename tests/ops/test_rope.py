"""RoPE against its written definition and the stock functions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from op_checks import relative
from rope_cases import LAYOUTS
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from fastpack.ops.rope import Layout, apply_rope

HALF_DTYPES = (torch.bfloat16, torch.float16)


POSITIONS = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 1000, 0])
D = 16


def angles(rotary: int) -> Tensor:
    """Return the angles ``[T, R / 2]`` in float64."""
    return POSITIONS[:, None].double() * 10_000.0 ** (-torch.arange(0, rotary, 2).double() / rotary)


def tables(rotary: int, layout: Layout, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return cos and sin in the layouts of transformers: two halves (Llama) or interleaved (Cohere)."""
    theta = angles(rotary)
    theta = torch.cat((theta, theta), -1) if layout == "half" else theta.repeat_interleave(2, -1)
    return theta.cos().to(dtype), theta.sin().to(dtype)


def rotated(x: Tensor, rotary: int, layout: Layout) -> Tensor:
    """Rotate by definition: each pair of the first R elements is a complex number, rotated by its angle."""
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
    """Negative control of the test above."""
    q, _ = heads()
    assert relative(rotated(q, D, "half"), rotated(q, D, "interleaved")) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_depends_on_distance_alone(layout: Layout) -> None:
    """The product of a query at m and a key at n is a function of m - n."""
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
    actual = apply_rope(q, k, cos, sin, layout=layout)
    expected = apply_rope(q.contiguous(), k.contiguous(), cos, sin, layout=layout)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_float32_tables_with_half_precision_heads(dtype: torch.dtype) -> None:
    """Autocast gives float32 tables. They are not cast, and the heads keep their dtype."""
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
    """The op rounds a product and a sum together: its error against float64 is no larger than the stock function's."""
    q, k = heads(dtype)
    cos, sin = tables(rotary, layout, dtype)
    mine = apply_rope(q, k, cos, sin, layout=layout, compute_in_float32=wide)
    theirs = stock.apply_rotary_pos_emb(as_stock(q), as_stock(k), cos[None], sin[None])
    exact = apply_rope(q.double(), k.double(), cos.double(), sin.double(), layout=layout)
    for x, y, truth in zip(mine, theirs, exact, strict=True):
        assert x.dtype == y.dtype == dtype
        assert relative(as_stock(x), as_stock(truth)) <= 1.5 * relative(y, as_stock(truth))
        assert relative(as_stock(x), y) <= 2 * torch.finfo(dtype).eps


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_choose_rows_of_a_table(layout: Layout) -> None:
    q, k = heads()
    cos, sin = tables(12, layout)
    table, rows = torch.unique(POSITIONS, return_inverse=True)
    first = torch.stack([(position == POSITIONS).nonzero()[0, 0] for position in table])
    expected = apply_rope(q, k, cos, sin, layout=layout)
    for dtype in (torch.int64, torch.int32):
        actual = apply_rope(q, k, cos[first], sin[first], layout=layout, positions=rows.to(dtype))
        assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    shifted = apply_rope(q, k, cos[first], sin[first], layout=layout, positions=(rows + 1) % len(table))
    assert relative(shifted[0], expected[0]) > 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"k": torch.zeros(3, 2, D)},
        {"k": torch.zeros(len(POSITIONS), 2, D - 2)},
        {"cos": torch.zeros(len(POSITIONS), 5), "sin": torch.zeros(len(POSITIONS), 5)},
        {"cos": torch.zeros(len(POSITIONS), D + 2), "sin": torch.zeros(len(POSITIONS), D + 2)},
        {"sin": torch.zeros(len(POSITIONS), D - 2)},
        {"cos": torch.zeros(3, D), "sin": torch.zeros(3, D)},
        {"positions": POSITIONS[:-1]},
    ],
)
def test_shapes_that_do_not_fit_raise(change: dict[str, Tensor]) -> None:
    q, k = heads(torch.float32)
    cos, sin = tables(D, "half", torch.float32)
    with pytest.raises(ValueError, match="RoPE takes"):
        apply_rope(**{"q": q, "k": k, "cos": cos, "sin": sin, **change})


def test_a_traced_region_takes_the_definition() -> None:
    cos, sin = tables(12, "interleaved", torch.float32)
    q, k = (x.requires_grad_() for x in heads(torch.float32))
    rope = functools.partial(apply_rope, layout="interleaved", compute_in_float32=True)
    traced = torch.compile(lambda q, k: rope(q * 1, k * 1, cos, sin), fullgraph=True, backend="eager")
    actual, expected = traced(q, k), rope(q, k, cos, sin)
    cotangents = [torch.randn_like(x) for x in expected]
    actual += torch.autograd.grad(actual, (q, k), cotangents)
    expected += torch.autograd.grad(expected, (q, k), cotangents)
    assert all(relative(x, y) < 1e-6 for x, y in zip(actual, expected, strict=True))
