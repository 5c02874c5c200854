"""Norms, gated units and RoPE: bound by the memory that they read and write.

The plain formulas are those of transformers' own Llama, Gemma and Qwen 3, and torch's own layer norm. Bytes are counted
in the activations' dtype; norm weights, and one number a row, are left out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fastpack.bench.ops.case import LIGER, OURS, PLAIN, Case, Inputs, Maker, liger_run
from fastpack.ops.glu import gated
from fastpack.ops.norm import layer_norm, rms_norm
from fastpack.ops.rope import apply_rope, norm_rope

EPS = 1e-6
"""The epsilon of all norms."""
GELU_TANH = functools.partial(F.gelu, approximate="tanh")


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalise as Llama does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _norm_inputs(make: Maker) -> Inputs:
    return [make.tensor(make.tokens, make.sizes.hidden_size), make.tensor(make.sizes.hidden_size, mean=1.0, scale=0.1)]


def _gated_inputs(make: Maker) -> Inputs:
    return [make.tensor(make.tokens, make.sizes.intermediate_size) for _ in range(2)]


def _rope_inputs(make: Maker) -> Inputs:
    """Return q and k, cos and sin."""
    size, device = make.sizes, make.generator.device
    frequencies = 10_000.0 ** (-torch.arange(0, size.head_dim, 2, device=device) / size.head_dim)
    angles = torch.arange(make.tokens, device=device)[:, None] * frequencies
    return [
        *(
            make.tensor(make.tokens, heads, size.head_dim)
            for heads in (size.num_attention_heads, size.num_key_value_heads)
        ),
        *(table.repeat(1, 2).to(make.dtype) for table in (angles.cos(), angles.sin())),
    ]


def _norm_rope_inputs(make: Maker) -> Inputs:
    """Return q and k, the weights of their norms, cos and sin."""
    q, k, cos, sin = _rope_inputs(make)
    return [q, k, *(make.tensor(make.sizes.head_dim, mean=1.0, scale=0.1) for _ in range(2)), cos, sin]


def _liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Rotate heads first, as transformers hands them over; Liger works on the memory below, in place."""
    run = liger_run("rope", "LigerRopeFunction")
    rotated = run(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    return tuple(heads[0].transpose(0, 1) for heads in rotated)


def _plain_norm_rope(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return apply_rotary_pos_emb(_plain_norm(q, q_weight), _plain_norm(k, k_weight), cos, sin)


def _our_norm_rope(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return norm_rope(q, k, q_weight, k_weight, EPS, cos, sin)


def _rope_bytes(make: Maker, passes: int) -> int:
    """Count the bytes of ``passes`` over q and k, and of one pass in each direction over half of each table."""
    heads = make.sizes.num_attention_heads + make.sizes.num_key_value_heads
    return make.tokens * (passes * heads + 2) * make.sizes.head_dim * make.dtype.itemsize


CASES = [
    Case(
        "rope",
        "rotary embedding of q and k",
        _rope_inputs,
        lambda _: {PLAIN: apply_rotary_pos_emb, OURS: apply_rope, LIGER: _liger_rope},
        lambda make: _rope_bytes(make, 4),
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
        lambda _: {
            PLAIN: _plain_norm,
            OURS: functools.partial(rms_norm, eps=EPS),
            LIGER: liger_run("rms_norm", "LigerRMSNormFunction", EPS, 0.0, "llama", True),
        },
        lambda make: 5 * make.tokens * make.sizes.hidden_size * make.dtype.itemsize,
    ),
    Case(
        "layer_norm",
        "layer norm without a bias, the weight trains",
        _norm_inputs,
        lambda _: {
            PLAIN: lambda x, weight: F.layer_norm(x, weight.shape, weight, eps=EPS),
            OURS: functools.partial(layer_norm, eps=EPS),
        },
        lambda make: 5 * make.tokens * make.sizes.hidden_size * make.dtype.itemsize,
    ),
    Case(
        "swiglu",
        "silu(gate) * up",
        _gated_inputs,
        lambda _: {
            PLAIN: lambda gate, up: F.silu(gate) * up,
            OURS: functools.partial(gated, activation=F.silu),
            LIGER: liger_run("swiglu", "LigerSiLUMulFunction"),
        },
        lambda make: 8 * make.tokens * make.sizes.intermediate_size * make.dtype.itemsize,
    ),
    Case(
        "geglu",
        "gelu(gate) * up, the tanh form",
        _gated_inputs,
        lambda _: {
            PLAIN: lambda gate, up: GELU_TANH(gate) * up,
            OURS: functools.partial(gated, activation=GELU_TANH),
            LIGER: liger_run("geglu", "LigerGELUMulFunction"),
        },
        lambda make: 8 * make.tokens * make.sizes.intermediate_size * make.dtype.itemsize,
    ),
]
