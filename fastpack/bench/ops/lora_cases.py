"""Projections with LoRA, over dense and over 4-bit weights: bound by matrix products."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.bench.ops.case import OURS, PLAIN, Case, FourBit, Maker, Run, Work
from fastpack.bench.ops.four_bit_cases import has_bitsandbytes, packed_weight
from fastpack.ops.dequantize import definition
from fastpack.ops.gated_mlp import gated_mlp
from fastpack.ops.projection_parts import Lora, Projection
from fastpack.ops.projections import project

LORA_SCALE = 2.0


def _lora_inputs(make: Maker, shapes: Sequence[tuple[int, int]], *, four_bit: bool) -> list[Any]:
    """x, then the frozen weight, A and B of each projection; A and B are float32, as PEFT keeps them."""
    wide = torch.promote_types(make.dtype, torch.float32)
    inputs: list[Any] = [make.tensor(make.tokens, shapes[0][0])]
    for ins, outs in shapes:
        dense = functools.partial(make.tensor, outs, ins, scale=ins**-0.5, grad=False)
        inputs.append(FourBit(*packed_weight(make, outs, ins)) if four_bit else dense())
        inputs.append(make.tensor(make.sizes.rank, ins, scale=ins**-0.5, dtype=wide))
        inputs.append(make.tensor(outs, make.sizes.rank, scale=0.1, dtype=wide))
    return inputs


def _base_product(x: Tensor, weight: Tensor | FourBit) -> Tensor:
    """Of a 4-bit weight bitsandbytes' own, on a GPU where it is installed."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight)
    if x.is_cuda and x.dtype == weight.state.dtype and has_bitsandbytes():
        from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]

        product: Tensor = matmul_4bit(x, weight.packed, quant_state=weight.state)
        return product
    return F.linear(x, definition(*weight).to(x.dtype))


def _peft(x: Tensor, weight: Tensor | FourBit, a: Tensor, b: Tensor) -> Tensor:
    """What a LoRA layer of PEFT computes: the update in A's dtype, added to the base product and rounded."""
    base = _base_product(x, weight)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * LORA_SCALE).to(base.dtype)


def _threes(flat: Sequence[Any]) -> list[tuple[Any, Tensor, Tensor]]:
    return [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]


def _projections(x: Tensor, flat: Sequence[Any]) -> list[Projection]:
    made: list[Projection] = []
    for weight, a, b in _threes(flat):
        packed, state = weight if isinstance(weight, FourBit) else (weight, None)
        made.append(Projection(packed, x.dtype, lora=Lora(a, b, LORA_SCALE), quant_state=state))
    return made


def _qkv_shapes(make: Maker) -> list[tuple[int, int]]:
    size = make.sizes
    return [(size.hidden, heads * size.head_dim) for heads in (size.heads, size.kv_heads, size.kv_heads)]


def _mlp_shapes(make: Maker) -> list[tuple[int, int]]:
    size = make.sizes
    return [(size.hidden, size.inner)] * 2 + [(size.inner, size.hidden)]


def _plain_group(x: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    return tuple(_peft(x, *three) for three in _threes(flat))


def _our_group(x: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    return project(x, _projections(x, flat))[0]


def _under_autocast(run: Run) -> Run:
    """A trainer's bf16: LoRA's products in half precision too."""

    def inside(x: Tensor, *flat: Any) -> Any:
        with torch.autocast(x.device.type, dtype=x.dtype):
            return run(x, *flat)

    return inside


def _plain_mlp(x: Tensor, *flat: Any) -> Tensor:
    gate, up, down = _threes(flat)
    return _peft(F.silu(_peft(x, *gate)) * _peft(x, *up), *down)


def _our_mlp(x: Tensor, *flat: Any) -> Tensor:
    gate, up, down = _projections(x, flat)
    return gated_mlp(x, [gate, up], down, "silu")


def _group_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    return _where_ours_can_run(inputs, {PLAIN: _plain_group, OURS: _our_group})


def _mlp_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    return _where_ours_can_run(inputs, {PLAIN: _plain_mlp, OURS: _our_mlp})


def _where_ours_can_run(inputs: Sequence[Any], runs: dict[str, Run]) -> dict[str, Run]:
    """4-bit weights are made dense by a kernel, or by bitsandbytes."""
    x, first, *_ = inputs
    return runs if x.is_cuda or not isinstance(first, FourBit) or has_bitsandbytes() else {PLAIN: runs[PLAIN]}


def _lora_work(make: Maker, shapes: Sequence[tuple[int, int]], *, backward: bool) -> Work:
    """Base products and updates; backward again both, and the gradients of A and B."""
    base = sum(2 * make.tokens * ins * outs for ins, outs in shapes)
    low = sum(2 * make.tokens * make.sizes.rank * (ins + outs) for ins, outs in shapes)
    return Work(flops=base + low * (2 if backward else 1))


def _case(name: str, of_weights: str, *, mlp: bool, four_bit: bool) -> Case:
    shapes, what = (_mlp_shapes, "a gated MLP") if mlp else (_qkv_shapes, "q, k and v projections")
    return Case(
        name,
        f"{what} with LoRA, {of_weights}",
        lambda make: _lora_inputs(make, shapes(make), four_bit=four_bit),
        _mlp_runs if mlp else _group_runs,
        lambda make: _lora_work(make, shapes(make), backward=False),
        lambda make: _lora_work(make, shapes(make), backward=True),
        plain_in_half=_under_autocast(_plain_mlp if mlp else _plain_group),
    )


CASES = [
    _case("lora_qkv", "A and B in float32", mlp=False, four_bit=False),
    _case("lora_mlp", "A and B in float32", mlp=True, four_bit=False),
    _case("lora_qkv_4bit", "over NF4", mlp=False, four_bit=True),
    _case("lora_mlp_4bit", "over NF4", mlp=True, four_bit=True),
]
