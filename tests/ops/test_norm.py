"""Norms against their written definitions and the stock modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_checks import EPS, defined, relative
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from fastpack.ops.norm import layer_norm, rms_norm

HALF_DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (1, 7, 64, 257, 1024)


def stretched(width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return rows of very different size: eps dominates the first; the squares of the last overflow in fp16."""
    x = torch.randn(6, 3, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return ((x + 0.3) * torch.tensor([0.0, 1e-4, 1e-2, 1.0, 30.0, 1000.0]).double()[:, None, None]).to(dtype)


def random_weight(width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (1 + 0.5 * torch.randn(width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).to(dtype)


NORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool, float]] = {
    # op, centred, the number that is added to the weight
    "rms, rounded before": (lambda x, w: rms_norm(x, w, EPS), False, 0.0),
    "rms, rounded after": (lambda x, w: rms_norm(x, w, EPS, rounding="after"), False, 0.0),
    "rms, 1 + weight": (lambda x, w: rms_norm(x, w, EPS, rounding="after", unit_offset=True), False, 1.0),
    "layer": (lambda x, w: layer_norm(x, w, EPS), True, 0.0),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NORMS)
def test_norm_is_the_definition(name: str, width: int) -> None:
    """Rows are compared one by one, since they differ by seven orders of magnitude."""
    op, centred, offset = NORMS[name]
    x, weight = stretched(width, torch.float32), random_weight(width, torch.float32)
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
    """Rounding "after" rounds once, "before" twice. No square overflows, and the mean loses nothing."""
    op, centred, offset = NORMS[name]
    x, weight = stretched(257, dtype), random_weight(257, dtype)
    out = op(x, weight)
    assert out.dtype == dtype
    assert out.isfinite().all()
    truth = defined(x, weight.double() + offset, centred=centred)
    roundings = 1 if "before" not in name else 2
    allowed = truth.abs() * (roundings * torch.finfo(dtype).eps / 2 * 1.01) + torch.finfo(dtype).smallest_normal
    assert ((out.double() - truth).abs() <= allowed).all()


def test_layer_norm_takes_a_weight_for_each_head() -> None:
    """The weight ``[heads, D]`` is that of Cohere's q and k norms."""
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
        weight = random_weight(65).float().to(dtype).requires_grad_()
        out = op(x, weight) if dtype == torch.float32 else defined(x, weight + offset, centred=centred)
        grads.append(torch.autograd.grad(out, (x, weight), cotangent.to(dtype)))
    (x32, w32), (x64, w64) = grads
    assert relative(w32, w64) < 1e-5
    for row in range(len(x32)):
        assert relative(x32[row], x64[row]) < 1e-5, row


class Stock:
    """A stock module with a random weight, and the op with the arguments of the module's family."""

    def __init__(self, name: str, width: int, dtype: torch.dtype) -> None:
        cls, self.op = {
            "llama": (modeling_llama.LlamaRMSNorm, rms_norm),
            "olmo2": (Olmo2RMSNorm, lambda x, w, eps: rms_norm(x, w, eps, rounding="after")),
            "gemma": (GemmaRMSNorm, lambda x, w, eps: rms_norm(x, w, eps, rounding="after", unit_offset=True)),
            "cohere": (modeling_cohere.CohereLayerNorm, layer_norm),
        }[name]
        self.module = cls(width, eps=EPS).to(dtype)
        with torch.no_grad():
            self.module.weight.copy_(random_weight(width))

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
    """``prepare_model_for_kbit_training`` leaves such weights: the result has the stock module's dtype."""
    stock = Stock(name, 64, torch.float32)
    x = stretched(64, dtype)
    theirs, mine = stock.module(x), stock.mine(x)
    assert mine.dtype == theirs.dtype
    assert relative(mine.detach(), theirs.detach()) <= torch.finfo(theirs.dtype).eps


@pytest.mark.parametrize("width", WIDTHS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
def test_layer_norm_is_the_stock_module_but_for_rounding(dtype: torch.dtype, width: int) -> None:
    """Torch's kernel is no less exact than Cohere's module, which adds in another order.

    Their results are equal once rounded to bf16, unless a float32 value lies at a rounding boundary.
    """
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
    actual: list[tuple[Tensor, ...]] = []
    for run in (stock.module, stock.mine):
        x = stretched(64, torch.float32)[2:].requires_grad_()
        actual.append(torch.autograd.grad(run(x), (x, stock.module.weight), cotangent))
    for theirs, mine in zip(*actual, strict=True):
        assert relative(mine, theirs) < 1e-5
        if theirs.ndim == 3:
            assert all(relative(mine[row], theirs[row]) < 1e-5 for row in range(len(theirs)))


def test_weight_gradient_is_float32_s_under_autocast() -> None:
    """This holds if the backward runs inside the autocast region."""
    x, weight = torch.randn(300, 16).requires_grad_(), torch.randn(16).requires_grad_()
    actual = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            actual.append(torch.autograd.grad(rms_norm(x, weight, EPS).square().sum(), weight)[0])
    assert torch.equal(*actual)
