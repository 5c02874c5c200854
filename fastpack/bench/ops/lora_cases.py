"""Projections with LoRA, over dense weights, and over 4-bit ones where bitsandbytes is installed, bound by matrix
products; and 4-bit weights made dense, bound by the memory that is read and written. Plain is PEFT's formula, on a GPU
over bitsandbytes' own."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.bench.ops.case import OURS, PLAIN, Case, Inputs, Maker, Run
from fastpack.ops.dequantize import definition, dequantize
from fastpack.ops.linear.gated_mlp import gated_mlp
from fastpack.ops.linear.parts import Lora, Projection
from fastpack.ops.linear.projections import project

LORA_SCALE = 2.0
BLOCK = 64
"""Weights that share a scale."""


def _four_bit_weight(make: Maker, *sizes: int) -> tuple[Tensor, Any]:
    """Return a random weight of these sizes as bitsandbytes holds it, and its state; its scales are quantised too."""
    from bitsandbytes.functional import quantize_4bit

    dense = make.tensor(*sizes, scale=sizes[-1] ** -0.5, grad=False)
    packed, state = quantize_4bit(dense, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    return packed, state


def _dequantize_runs(inputs: Inputs) -> dict[str, Run]:
    weight, state = inputs
    plain = functools.partial(dequantize, dtype=state.dtype, implementation="torch") if weight.is_cuda else definition
    return {PLAIN: plain, OURS: functools.partial(dequantize, dtype=state.dtype)}


def _dequantize_bytes(make: Maker) -> int:
    weights = make.tokens * make.sizes.hidden
    return weights // 2 + weights // BLOCK + weights * make.dtype.itemsize


def _lora_inputs(make: Maker, shapes: Sequence[tuple[int, int]], *, four_bit: bool) -> Inputs:
    """x, then of each projection the frozen weight, its state or None, A and B, float32 as PEFT keeps them."""
    wide = torch.promote_types(make.dtype, torch.float32)
    inputs: Inputs = [make.tensor(make.tokens, shapes[0][0])]
    for ins, outs in shapes:
        if four_bit:
            inputs += _four_bit_weight(make, outs, ins)
        else:
            inputs += [make.tensor(outs, ins, scale=ins**-0.5, grad=False), None]
        inputs.append(make.tensor(make.sizes.rank, ins, scale=ins**-0.5, dtype=wide))
        inputs.append(make.tensor(outs, make.sizes.rank, scale=0.1, dtype=wide))
    return inputs


def _by_projection(flat: Sequence[Any]) -> list[tuple[Tensor, Any, Tensor, Tensor]]:
    return [(flat[i], flat[i + 1], flat[i + 2], flat[i + 3]) for i in range(0, len(flat), 4)]


def _base_product(x: Tensor, weight: Tensor, state: Any) -> Tensor:
    if state is None:
        return F.linear(x, weight)
    if x.is_cuda and x.dtype == state.dtype:
        from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]

        product: Tensor = matmul_4bit(x, weight, quant_state=state)
        return product
    return F.linear(x, definition(weight, state).to(x.dtype))


def _peft(x: Tensor, weight: Tensor, state: Any, a: Tensor, b: Tensor) -> Tensor:
    """A LoRA layer of PEFT: the update in A's dtype, added to the base product and rounded."""
    base = _base_product(x, weight, state)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * LORA_SCALE).to(base.dtype)


def _plain_qkv(x: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    return tuple(_peft(x, *each) for each in _by_projection(flat))


def _plain_mlp(x: Tensor, *flat: Any) -> Tensor:
    gate, up, down = _by_projection(flat)
    return _peft(F.silu(_peft(x, *gate)) * _peft(x, *up), *down)


def _under_autocast(run: Run) -> Run:
    """A trainer's bf16: in half precision LoRA's products are, too."""

    def inside(x: Tensor, *flat: Any) -> Any:
        with torch.autocast(x.device.type, dtype=x.dtype, enabled=x.dtype.itemsize < 4):
            return run(x, *flat)

    return inside


def _projections(x: Tensor, flat: Sequence[Any]) -> list[Projection]:
    return [
        Projection(weight, x.dtype, lora=Lora(a, b, LORA_SCALE), quant_state=state)
        for weight, state, a, b in _by_projection(flat)
    ]


def _our_qkv(x: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    return project(x, _projections(x, flat))[0]


def _our_mlp(x: Tensor, *flat: Any) -> Tensor:
    gate, up, down = _projections(x, flat)
    return gated_mlp(x, [gate, up], down, "silu")


def _qkv_shapes(make: Maker) -> list[tuple[int, int]]:
    size = make.sizes
    return [(size.hidden, heads * size.head_dim) for heads in (size.heads, size.kv_heads, size.kv_heads)]


def _mlp_shapes(make: Maker) -> list[tuple[int, int]]:
    size = make.sizes
    return [(size.hidden, size.inner)] * 2 + [(size.inner, size.hidden)]


def _lora_flops(make: Maker, shapes: Sequence[tuple[int, int]]) -> int:
    """Base products and updates; backward again both, and the gradients of A and B."""
    base = sum(2 * make.tokens * ins * outs for ins, outs in shapes)
    low = sum(2 * make.tokens * make.sizes.rank * (ins + outs) for ins, outs in shapes)
    return 2 * base + 3 * low


def _case(name: str, what: str, *, mlp: bool, four_bit: bool) -> Case:
    shapes = _mlp_shapes if mlp else _qkv_shapes
    runs = {PLAIN: _under_autocast(_plain_mlp if mlp else _plain_qkv), OURS: _our_mlp if mlp else _our_qkv}
    return Case(
        name,
        what,
        lambda make: _lora_inputs(make, shapes(make), four_bit=four_bit),
        lambda _: runs,
        lambda make: _lora_flops(make, shapes(make)),
        "flops",
    )


CASES = [
    _case("lora_qkv", "q, k and v projections with LoRA, A and B in float32", mlp=False, four_bit=False),
    _case("lora_mlp", "a gated MLP with LoRA, A and B in float32", mlp=True, four_bit=False),
]
if importlib.util.find_spec("bitsandbytes") is not None:
    CASES += [
        Case(
            "dequantize",
            "an NF4 weight of T rows made dense, its scales quantised too",
            lambda make: [*_four_bit_weight(make, make.tokens, make.sizes.hidden)],
            _dequantize_runs,
            _dequantize_bytes,
        ),
        _case("lora_qkv_4bit", "q, k and v projections with LoRA over NF4", mlp=False, four_bit=True),
        _case("lora_mlp_4bit", "a gated MLP with LoRA over NF4", mlp=True, four_bit=True),
    ]
