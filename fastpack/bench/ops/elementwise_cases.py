"""Norms, gated units and RoPE: bound by the memory that they read and write.

The plain formulas are those of transformers' own Llama, Gemma, Cohere and Qwen 3. Bytes are counted in the
activations' dtype; norm weights, and one figure a row, are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.bench.ops.case import OURS, PLAIN, Case, Inputs, Maker, Run
from fastpack.ops.glu import gated
from fastpack.ops.norm import layer_norm, rms_norm
from fastpack.ops.rope import apply_rope, norm_rope

EPS = 1e-6
"""Of all norms."""
GELU_TANH = functools.partial(F.gelu, approximate="tanh")


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _liger_norm(_: Inputs) -> Run:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", True)


def _plain_layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight.to(wide.dtype) * wide).to(x.dtype)


def _liger_layer_norm(inputs: Inputs) -> Run:
    """It has no form without a bias."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    bias = torch.zeros_like(inputs[1], requires_grad=False)
    return lambda x, weight: LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _norm_inputs(make: Maker) -> Inputs:
    return [make.tensor(make.tokens, make.sizes.hidden), make.norm_weight(make.sizes.hidden)]


def _gated_runs(activation: Callable[[Tensor], Tensor]) -> dict[str, Run]:
    return {
        PLAIN: lambda gate, up: activation(gate) * up,
        OURS: lambda gate, up: gated(gate, up, activation),
    }


def _liger_swiglu(_: Inputs) -> Run:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up)


def _liger_geglu(_: Inputs) -> Run:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return lambda gate, up: LigerGELUMulFunction.apply(gate, up)


def _gated_inputs(make: Maker) -> Inputs:
    return [make.tensor(make.tokens, make.sizes.inner) for _ in range(2)]


def _heads(make: Maker) -> list[Tensor]:
    """q and k."""
    size = make.sizes
    return [make.tensor(make.tokens, count, size.head_dim) for count in (size.heads, size.kv_heads)]


def _tables(make: Maker) -> list[Tensor]:
    """cos and sin."""
    size, device = make.sizes.head_dim, make.generator.device
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angles = torch.arange(make.tokens, device=device)[:, None] * frequencies
    return [table.repeat(1, 2).to(make.dtype) for table in (angles.cos(), angles.sin())]


def _plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return rotate(q), rotate(k)


def _liger_rope(_: Inputs) -> Run:
    from liger_kernel.ops.rope import LigerRopeFunction

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # heads first, as transformers hands them over; it works on the memory below, in place
        q, k = LigerRopeFunction.apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        return q[0].transpose(0, 1), k[0].transpose(0, 1)

    return run


def _plain_norm_rope(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return _plain_rope(_plain_norm(q, q_weight), _plain_norm(k, k_weight), cos, sin)


def _our_norm_rope(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return norm_rope(q, k, q_weight, k_weight, EPS, cos, sin)


def _norm_rope_inputs(make: Maker) -> Inputs:
    return [*_heads(make), *(make.norm_weight(make.sizes.head_dim) for _ in range(2)), *_tables(make)]


def _rope_bytes(make: Maker, passes: int) -> int:
    """So many passes over q and k, and one in each direction over the tables, half of which holds all of each."""
    size = make.sizes
    elements = passes * (size.heads + size.kv_heads) * size.head_dim + 2 * size.head_dim
    return make.tokens * elements * make.dtype.itemsize


CASES = [
    Case(
        "rope",
        "rotary embedding of q and k",
        lambda make: [*_heads(make), *_tables(make)],
        lambda _: {PLAIN: _plain_rope, OURS: apply_rope},
        lambda make: _rope_bytes(make, 4),
        liger=_liger_rope,
    ),
    Case(
        "norm_rope",
        "rotary embedding of q and k behind a norm of each head, whose weights train",
        _norm_rope_inputs,
        lambda _: {PLAIN: _plain_norm_rope, OURS: _our_norm_rope},
        lambda make: _rope_bytes(make, 5),
    ),
    Case(
        "rms_norm",
        "root-mean-square norm with a weight that trains",
        _norm_inputs,
        lambda _: {PLAIN: _plain_norm, OURS: functools.partial(rms_norm, eps=EPS)},
        lambda make: 5 * make.tokens * make.sizes.hidden * make.dtype.itemsize,
        liger=_liger_norm,
    ),
    Case(
        "layer_norm",
        "layer norm without a bias, the weight trains",
        _norm_inputs,
        lambda _: {PLAIN: _plain_layer_norm, OURS: functools.partial(layer_norm, eps=EPS)},
        lambda make: 5 * make.tokens * make.sizes.hidden * make.dtype.itemsize,
        liger=_liger_layer_norm,
    ),
    Case(
        "swiglu",
        "silu(gate) * up",
        _gated_inputs,
        lambda _: _gated_runs(F.silu),
        lambda make: 8 * make.tokens * make.sizes.inner * make.dtype.itemsize,
        liger=_liger_swiglu,
    ),
    Case(
        "geglu",
        "gelu(gate) * up, the tanh form",
        _gated_inputs,
        lambda _: _gated_runs(GELU_TANH),
        lambda make: 8 * make.tokens * make.sizes.inner * make.dtype.itemsize,
        liger=_liger_geglu,
    ),
]
