"""Norms and gated units: bound by the memory that they read and write.

The plain formulas are those of transformers' own Llama, Gemma and Cohere. Bytes are counted in the activations' dtype;
norm weights, and one figure a row, are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.bench.ops.case import OURS, PLAIN, Case, Maker, Run, Work, with_liger
from fastpack.ops.glu import gated
from fastpack.ops.norm import add_rms_norm, layer_norm, rms_norm

EPS = 1e-6
"""Of all norms."""


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _plain_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return plain_norm(summed, weight), summed


def _plain_layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight.to(wide.dtype) * wide).to(x.dtype)


def _liger_layer_norm(bias: Tensor) -> Run:
    """It has no form without a bias."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, weight: LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _layer_norm_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {PLAIN: _plain_layer_norm, OURS: functools.partial(layer_norm, eps=EPS)}
    bias = torch.zeros_like(inputs[1], requires_grad=False)
    return with_liger(runs, inputs[0].device, functools.partial(_liger_layer_norm, bias))


def _liger_norm() -> Run:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", True)


def _liger_add_norm() -> Run:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", True)


def _norm_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {PLAIN: plain_norm, OURS: functools.partial(rms_norm, eps=EPS)}
    return with_liger(runs, inputs[0].device, _liger_norm)


def _add_norm_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {PLAIN: _plain_add_norm, OURS: functools.partial(add_rms_norm, eps=EPS)}
    return with_liger(runs, inputs[0].device, _liger_add_norm)


def norm_weight(make: Maker, size: int, *, grad: bool) -> Tensor:
    """Of a norm: near 1."""
    with torch.no_grad():
        weight = 1 + make.tensor(size, scale=0.1)
    return weight.requires_grad_(grad)


def _norm_inputs(make: Maker, *, tensors: int, grad: bool) -> list[Any]:
    rows = [make.tensor(make.tokens, make.sizes.hidden) for _ in range(tensors)]
    return [*rows, norm_weight(make, make.sizes.hidden, grad=grad)]


def _gated_runs(
    inputs: Sequence[Any], activation: Callable[[Tensor], Tensor], liger: Callable[[], Run]
) -> dict[str, Run]:
    runs: dict[str, Run] = {
        PLAIN: lambda gate, up: activation(gate) * up,
        OURS: lambda gate, up: gated(gate, up, activation),
    }
    return with_liger(runs, inputs[0].device, liger)


def _liger_swiglu() -> Run:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up)


def _liger_geglu() -> Run:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return lambda gate, up: LigerGELUMulFunction.apply(gate, up)


def _gated_inputs(make: Maker) -> list[Any]:
    return [make.tensor(make.tokens, make.sizes.inner) for _ in range(2)]


def _rows(count: int, *, inner: bool = False) -> Callable[[Maker], Work]:
    """Bytes of so many ``[T, H]`` or ``[T, I]`` tensors."""

    def work(make: Maker) -> Work:
        width = make.sizes.inner if inner else make.sizes.hidden
        return Work(count * make.tokens * width * make.dtype.itemsize)

    return work


GELU_TANH = functools.partial(F.gelu, approximate="tanh")

CASES = [
    Case(
        "rms_norm",
        "root-mean-square norm with a weight that trains",
        functools.partial(_norm_inputs, tensors=1, grad=True),
        _norm_runs,
        _rows(2),
        _rows(3),
    ),
    Case(
        "add_rms_norm",
        "the same of a sum with the residual stream, the weight frozen",
        functools.partial(_norm_inputs, tensors=2, grad=False),
        _add_norm_runs,
        _rows(4),
        _rows(4),
    ),
    Case(
        "add_rms_norm_trained",
        "the same of a sum with the residual stream, the weight trains",
        functools.partial(_norm_inputs, tensors=2, grad=True),
        _add_norm_runs,
        _rows(4),
        _rows(4),
    ),
    Case(
        "layer_norm",
        "layer norm without a bias, the weight trains",
        functools.partial(_norm_inputs, tensors=1, grad=True),
        _layer_norm_runs,
        _rows(2),
        _rows(3),
    ),
    Case(
        "swiglu",
        "silu(gate) * up",
        _gated_inputs,
        functools.partial(_gated_runs, activation=F.silu, liger=_liger_swiglu),
        _rows(3, inner=True),
        _rows(5, inner=True),
    ),
    Case(
        "geglu",
        "gelu(gate) * up, the tanh form",
        _gated_inputs,
        functools.partial(_gated_runs, activation=GELU_TANH, liger=_liger_geglu),
        _rows(3, inner=True),
        _rows(5, inner=True),
    ),
]
