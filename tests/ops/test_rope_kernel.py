"""RoPE's kernel against the definition, forward and backward: through Triton's interpreter, or natively on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from op_checks import DEVICES, relative
from rope_cases import DEVICE, IMPLEMENTATIONS, LAYOUTS, SHAPES, count_launches, error_of, on_gpu, random_tensor, tables
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.phi3 import modeling_phi3

from fastpack.ops.implementation import Implementation
from fastpack.ops.rope import Layout, apply_rope

T, D = 10, 16


@pytest.fixture(params=DEVICES)
def where() -> None:
    """Mark where a test runs: natively if its tensors are on a GPU."""


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("where")
def test_kernel_is_the_definition(
    shape: tuple[int, ...], layout: Layout, indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward take one launch each and no other operation; a wrong layout or position fails."""
    tokens, h, k_heads, d, rotary = shape
    cos, sin = tables(tokens + 3 if indexed else tokens, rotary, layout)
    positions = random_tensor(tokens).argsort() + 2 if indexed else None
    q, k = (random_tensor(tokens, n, d).requires_grad_() for n in (h, k_heads))
    cotangents = [random_tensor(*x.shape, seed=1) for x in (q, k)]

    def run(implementation: Implementation, **options: Any) -> tuple[Tensor, ...]:
        options = {"layout": layout, "positions": positions, **options}
        out = apply_rope(q, k, cos, sin, implementation=implementation, **options)
        return *out, *torch.autograd.grad(out, (q, k), cotangents)

    expected = run("torch")
    with count_launches(monkeypatch, "rope", "rotate_kernel") as (launches, others):
        actual = run("triton")
    assert launches.count == 2
    assert not others
    assert error_of(actual, expected) < 1e-6
    if tokens > 1:
        other: Layout = "half" if layout == "interleaved" else "interleaved"
        assert error_of(actual[:2], run("torch", layout=other)[:2]) > 0.1
        if positions is not None:
            assert error_of(actual, run("torch", positions=positions - 1)) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("where")
def test_kernel_takes_any_strides_of_tokens_and_heads(layout: Layout) -> None:
    """The cases are heads before tokens, an expanded gradient, and tables that are slices of wider ones."""
    cos, sin = (x[:, :6] for x in tables(5, 10, layout))
    wide = random_tensor(3, 5, 2 * D).requires_grad_()
    actual: list[tuple[Tensor, ...]] = []
    for implementation in IMPLEMENTATIONS:
        q, k = wide[..., :D].transpose(0, 1), wide[:2, :, D:].transpose(0, 1)
        out = apply_rope(q, k, cos, sin, layout=layout, implementation=implementation)
        actual.append((*out, *torch.autograd.grad(out[0].sum() + out[1].square().sum(), wide)))
    assert error_of(*actual) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("where")
def test_kernel_s_gradients_by_finite_differences(layout: Layout) -> None:
    cos, sin = tables(3, 4, layout, torch.float64)
    q, k = (random_tensor(3, n, 6, dtype=torch.float64).requires_grad_() for n in (2, 1))
    rope = functools.partial(apply_rope, cos=cos, sin=sin, layout=layout, implementation="triton")
    assert torch.autograd.gradcheck(rope, (q, k), fast_mode=True)
    assert torch.autograd.gradgradcheck(rope, (q, k), fast_mode=True)


def test_a_side_without_gradient_is_not_rotated_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cos, sin = tables(5, 8, "half")
    for needy in (0, 1):
        x = [random_tensor(5, n, 8) for n in (4, 2)]
        x[needy].requires_grad_()
        out = apply_rope(*x, cos, sin, implementation="triton")
        expected = apply_rope(*x, cos, sin, implementation="torch")
        with count_launches(monkeypatch, "rope", "rotate_kernel") as (launches, _):
            (grad,) = torch.autograd.grad(out[needy].square().sum(), x[needy])
        assert launches.count == 1
        assert launches.elements == grad.numel()
        (truth,) = torch.autograd.grad(expected[needy].square().sum(), x[needy])
        assert relative(grad, truth) < 1e-6


def test_unsupported_inputs_raise_if_the_kernel_is_named() -> None:
    q, k = random_tensor(T, 4, D), random_tensor(T, 2, D)
    cos, sin = tables(T, D, "half")
    strided = q.repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ValueError, match="kernel for RoPE got"):
        apply_rope(strided, k, cos, sin, implementation="triton")
    with pytest.raises(ValueError, match="kernel for RoPE got"):
        apply_rope(q, k, cos, sin, positions=torch.arange(T, device=DEVICE).double(), implementation="triton")
    actual, expected = (apply_rope(x, k, cos, sin)[0] for x in (strided, q))
    assert relative(actual, expected) < 1e-6, "auto takes the definition"


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def by_stock(stock: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, cotangents: list[Tensor]) -> list[Tensor]:
    """Return the stock function's results and gradients, each ``[T, heads, D]``."""
    q, k = (x.detach().requires_grad_() for x in (q, k))
    out = stock.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    out = [x[0].transpose(0, 1) for x in out]
    return [*out, *torch.autograd.grad(out, (q, k), cotangents)]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 333, 4099])
@pytest.mark.parametrize(
    ("h", "k_heads", "d", "rotary", "layout", "dtype"),
    [
        (32, 8, 128, 128, "half", torch.bfloat16),
        (14, 2, 64, 64, "half", torch.bfloat16),
        (8, 4, 256, 256, "half", torch.float16),
        (40, 8, 128, 96, "half", torch.bfloat16),
        (3, 1, 80, 80, "half", torch.bfloat16),
        (64, 8, 128, 128, "interleaved", torch.bfloat16),
        (5, 2, 48, 48, "interleaved", torch.float16),
    ],
)
def test_native_kernel_is_no_worse_than_the_stock_function(
    h: int, k_heads: int, d: int, rotary: int, layout: Layout, dtype: torch.dtype, tokens: int
) -> None:
    stock = modeling_phi3 if layout == "half" else modeling_cohere
    table = tables(4200, rotary, layout, dtype)
    positions = torch.randint(0, 4200, (tokens,), device=DEVICE)
    cos, sin = (x[positions] for x in table)
    qkv = random_tensor(tokens, h + 2 * k_heads, d, dtype=dtype).requires_grad_()
    cotangents = [random_tensor(tokens, n, d, dtype=dtype, seed=1) for n in (h, k_heads)]
    q, k = qkv[:, :h], qkv[:, h : h + k_heads]
    theirs = by_stock(stock, q, k, cos, sin, cotangents)
    truth = by_stock(stock, q.float(), k.float(), cos.float(), sin.float(), [x.float() for x in cotangents])
    for angles, rows in (((cos, sin), None), (table, positions)):
        fused = qkv * 1
        a, b = fused[:, :h], fused[:, h : h + k_heads]
        how: dict[str, Any] = {"layout": layout, "compute_in_float32": stock is modeling_cohere}
        out = apply_rope(a, b, *angles, positions=rows, **how)
        (grad,) = torch.autograd.grad(out, qkv, cotangents)
        mine = [*out, grad[:, :h], grad[:, h : h + k_heads]]
        for x, y, z in zip(mine, theirs, truth, strict=True):
            assert x.dtype == dtype
            assert relative(x, z) <= 1.5 * relative(y, z)


@pytest.mark.gpu
def test_native_kernel_reaches_past_two_to_the_31_elements() -> None:
    """Offsets are int64: the last token of a buffer of 4.3 GB begins after element 2^31."""
    tokens, wide = 16_500, 130_176
    qkv = torch.zeros(tokens, wide, device=DEVICE, dtype=torch.bfloat16)
    q, k = qkv[:, :256].unflatten(-1, (2, 128)), qkv[:, -128:].unflatten(-1, (1, 128))
    q[-1], k[-1] = 1.0, 1.0
    cos, sin = tables(tokens, 128, "half", torch.bfloat16)
    expected = [x.clone() for x in apply_rope(q[-1:], k[-1:], cos[-1:], sin[-1:], implementation="torch")]
    q, k = apply_rope(q, k, cos, sin)
    assert error_of((q[-1:], k[-1:]), expected) < 0.01
    assert not q[:-1].any()
    assert not k[:-1].any()


@pytest.mark.gpu
def test_a_new_number_of_tokens_compiles_nothing() -> None:
    from fastpack.ops.kernels.rope import rotate_kernel

    def run(tokens: int) -> int:
        cos, sin = tables(tokens, 128, "half", torch.bfloat16)
        q, k = (random_tensor(tokens, n, 128, dtype=torch.bfloat16).requires_grad_() for n in (4, 2))
        out = apply_rope(q, k, cos, sin)
        torch.autograd.grad(out, (q, k), out)
        return len(rotate_kernel.device_caches[torch.cuda.current_device()][0])

    compiled = run(37)
    assert {run(tokens) for tokens in (1, 2, 16, 100, 128, 4096, 5000)} == {compiled}


@pytest.mark.gpu
def test_native_kernel_in_a_cuda_graph_and_beside_nothing() -> None:
    """Forward and backward take one kernel each, without synchronisation, so they can be captured."""
    stream = torch.cuda.Stream()  # leaves made on the default stream would draw it into the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        cos, sin = tables(300, 64, "half", torch.bfloat16)
        positions = torch.arange(300, device=DEVICE).flip(0)
        q, k = (random_tensor(300, n, 64, dtype=torch.bfloat16).requires_grad_() for n in (14, 2))
        cotangents = [torch.ones_like(x) for x in (q, k)]

        def step() -> tuple[Tensor, ...]:
            out = apply_rope(q, k, cos, sin, positions=positions)
            return *out, *torch.autograd.grad(out, (q, k), cotangents)

        expected = step()
        assert len(on_gpu(step)) == 2
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
    stream.synchronize()
    with torch.no_grad():
        q.neg_()
    graph.replay()
    assert torch.equal(captured[0], -expected[0])
    assert torch.equal(captured[2], expected[2])
