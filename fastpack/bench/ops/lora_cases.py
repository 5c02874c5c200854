"""Cases of projections with LoRA, and of the dequantisation of 4-bit weights.

The projections have dense weights, or 4-bit ones if bitsandbytes is installed, and are bound by matmuls. Making 4-bit
weights dense is bound by memory. The plain run is PEFT's formula, with bitsandbytes' own functions on a GPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.bench.ops.case import OURS, PLAIN, Case, Inputs, Maker
from fastpack.bench.settings import LORA_RANK
from fastpack.ops.dequantize import definition, dequantize
from fastpack.ops.linear.gated_mlp import gated_mlp
from fastpack.ops.linear.operands import Lora, Projection
from fastpack.ops.linear.projections import project

LORA_SCALE = 2.0
BLOCK = 64
"""The number of weights that share a scale."""

Adapted = tuple[Tensor, Any, Tensor, Tensor]
"""A projection: its frozen weight, the state of a 4-bit one or None, and LoRA's A and B."""


def _four_bit(dense: Tensor) -> tuple[Tensor, Any]:
    """Return a weight quantised by bitsandbytes, and its state; its scales are quantised too."""
    from bitsandbytes.functional import quantize_4bit

    return quantize_4bit(dense, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")


def _dequantize_bytes(make: Maker) -> int:
    weights = make.tokens * make.sizes.hidden_size
    return weights // 2 + weights // BLOCK + weights * make.dtype.itemsize


def _lora_inputs(make: Maker, shapes: list[tuple[int, int]], *, four_bit: bool) -> Inputs:
    """Return x and the projections; A and B are float32, as PEFT keeps them."""
    wide = torch.promote_types(make.dtype, torch.float32)
    projections: list[Adapted] = []
    for ins, outs in shapes:
        dense = make.tensor(outs, ins, scale=ins**-0.5, grad=False)
        a = make.tensor(LORA_RANK, ins, scale=ins**-0.5, dtype=wide)
        b = make.tensor(outs, LORA_RANK, scale=0.1, dtype=wide)
        projections.append((*(_four_bit(dense) if four_bit else (dense, None)), a, b))
    return [make.tensor(make.tokens, shapes[0][0]), projections]


def _base_matmul(x: Tensor, weight: Tensor, state: Any) -> Any:
    if state is not None and x.is_cuda and x.dtype == state.dtype:
        from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]

        return matmul_4bit(x, weight, quant_state=state)
    return F.linear(x, weight if state is None else definition(weight, state).to(x.dtype))


def _peft(x: Tensor, weight: Tensor, state: Any, a: Tensor, b: Tensor) -> Tensor:
    """Compute a LoRA layer of PEFT: the update in A's dtype, added to the base matmul and rounded."""
    base: Tensor = _base_matmul(x, weight, state)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * LORA_SCALE).to(base.dtype)


def _mixed(x: Tensor) -> torch.autocast:
    """Return the autocast context of a trainer's bf16: LoRA's matmuls use half precision, too."""
    return torch.autocast(x.device.type, dtype=x.dtype, enabled=x.dtype.itemsize < 4)


def _plain_qkv(x: Tensor, projections: list[Adapted]) -> tuple[Tensor, ...]:
    with _mixed(x):
        return tuple(_peft(x, *each) for each in projections)


def _plain_mlp(x: Tensor, projections: list[Adapted]) -> Tensor:
    gate, up, down = projections
    with _mixed(x):
        return _peft(F.silu(_peft(x, *gate)) * _peft(x, *up), *down)


def _ours(x: Tensor, projections: list[Adapted]) -> list[Projection]:
    return [Projection(weight, x.dtype, lora=Lora(a, b, LORA_SCALE), quant_state=q) for weight, q, a, b in projections]


def _our_qkv(x: Tensor, projections: list[Adapted]) -> tuple[Tensor, ...]:
    return project(x, _ours(x, projections))[0]


def _our_mlp(x: Tensor, projections: list[Adapted]) -> Tensor:
    gate, up, down = _ours(x, projections)
    return gated_mlp(x, [gate, up], down, "silu")


def _shapes(size: Any, *, mlp: bool) -> list[tuple[int, int]]:
    """Return inputs and outputs of gate, up and down, or of q, k and v."""
    if mlp:
        return [(size.hidden_size, size.intermediate_size)] * 2 + [(size.intermediate_size, size.hidden_size)]
    keys = size.num_key_value_heads
    return [(size.hidden_size, heads * size.head_dim) for heads in (size.num_attention_heads, keys, keys)]


def _lora_flops(make: Maker, shapes: list[tuple[int, int]]) -> int:
    """Count base matmuls and updates; the backward has both again, and the gradients of A and B."""
    base = sum(2 * make.tokens * ins * outs for ins, outs in shapes)
    low = sum(2 * make.tokens * LORA_RANK * (ins + outs) for ins, outs in shapes)
    return 2 * base + 3 * low


def _lora_case(name: str, what: str, *, mlp: bool, four_bit: bool) -> Case:
    plain, ours = (_plain_mlp, _our_mlp) if mlp else (_plain_qkv, _our_qkv)
    return Case(
        name,
        what,
        lambda make: _lora_inputs(make, _shapes(make.sizes, mlp=mlp), four_bit=four_bit),
        lambda _: {PLAIN: plain, OURS: ours},
        lambda make: _lora_flops(make, _shapes(make.sizes, mlp=mlp)),
        "flops",
    )


CASES = [
    _lora_case("lora_qkv", "q, k and v projections with LoRA, A and B in float32", mlp=False, four_bit=False),
    _lora_case("lora_mlp", "a gated MLP with LoRA, A and B in float32", mlp=True, four_bit=False),
]
if importlib.util.find_spec("bitsandbytes") is not None:
    CASES += [
        Case(
            "dequantize",
            "an NF4 weight of T rows made dense, its scales quantised too",
            lambda make: [*_four_bit(make.tensor(make.tokens, make.sizes.hidden_size, scale=0.02, grad=False))],
            lambda _: {
                PLAIN: lambda weight, state: dequantize(weight, state, state.dtype, "torch"),
                OURS: lambda weight, state: dequantize(weight, state, state.dtype),
            },
            _dequantize_bytes,
        ),
        _lora_case("lora_qkv_4bit", "q, k and v projections with LoRA over NF4", mlp=False, four_bit=True),
        _lora_case("lora_mlp_4bit", "a gated MLP with LoRA over NF4", mlp=True, four_bit=True),
    ]
