"""The loss on a linear head, attention and LoRA: bound by matrix products."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpack.attention_dispatch import AttentionCall, attend, explain
from fastpack.bench.lengths import make_lengths
from fastpack.bench.ops.case import OURS, PLAIN, Case, Maker, Run, Work, with_liger
from fastpack.ops.gated_mlp import gated_mlp
from fastpack.ops.linear_cross_entropy import linear_cross_entropy
from fastpack.ops.projection_parts import Lora, Projection
from fastpack.ops.projections import project
from fastpack.packing import PackedSeqLens

LORA_SCALE = 2.0


def _loss_inputs(make: Maker, *, trained: bool) -> list[Any]:
    size = make.sizes
    hidden = make.tensor(make.tokens, size.hidden)
    weight = make.tensor(size.vocabulary, size.hidden, scale=size.hidden**-0.5, grad=trained)
    device = make.generator.device
    labels = torch.randint(size.vocabulary, (make.tokens,), generator=make.generator, device=device)
    return [hidden, weight, labels]


def _plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def _liger_loss() -> Run:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, labels: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)[0]


def _loss_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {PLAIN: _plain_loss, OURS: functools.partial(linear_cross_entropy, reduction="mean")}
    return with_liger(runs, inputs[0].device, _liger_loss)


def _loss_work(make: Maker, *, products: int) -> Work:
    return Work(flops=products * 2 * make.tokens * make.sizes.vocabulary * make.sizes.hidden)


def _logits(make: Maker) -> int:
    return make.tokens * make.sizes.vocabulary * make.dtype.itemsize


def _lengths(make: Maker) -> list[int]:
    """Lengths that fill T, the last one cut off."""
    lengths: list[int] = []
    for length in make_lengths(make.tokens, kind=make.lengths):
        left = make.tokens - sum(lengths)
        if left <= 0:
            break
        lengths.append(min(length, left))
    return lengths


def _attention_inputs(make: Maker) -> list[Any]:
    size = make.sizes
    heads = (size.heads, size.kv_heads, size.kv_heads)
    q, k, v = (make.tensor(make.tokens, count, size.head_dim) for count in heads)
    return [q, k, v, PackedSeqLens.from_lengths(_lengths(make), device=make.generator.device)]


def _attend(q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqLens, *, backend: str) -> Tensor:
    return attend(AttentionCall(q, k, v, packed, scale=q.shape[-1] ** -0.5), backend)


def _attention_runs(inputs: Sequence[Any]) -> dict[str, Run]:
    q, k, v, packed = inputs
    shape = AttentionCall(q, k, v, packed, scale=1.0).shape
    serving = [name for name, reason in explain(shape).items() if reason is None and name != "reference"]
    # torch's own attention, one run of equally long sequences after the other
    serving.sort(key=lambda name: name != "segments")
    return {PLAIN if name == "segments" else name: functools.partial(_attend, backend=name) for name in serving}


def _attention_work(make: Maker, *, products: int) -> Work:
    pairs = sum(length * (length + 1) // 2 for length in _lengths(make))
    return Work(flops=products * 2 * pairs * make.sizes.heads * make.sizes.head_dim)


def _lora_inputs(make: Maker, shapes: Sequence[tuple[int, int]]) -> list[Any]:
    """x, then the frozen weight, A and B of each projection; A and B are float32, as PEFT keeps them."""
    wide = torch.promote_types(make.dtype, torch.float32)
    inputs: list[Any] = [make.tensor(make.tokens, shapes[0][0])]
    for ins, outs in shapes:
        inputs.append(make.tensor(outs, ins, scale=ins**-0.5, grad=False))
        inputs.append(make.tensor(make.sizes.rank, ins, scale=ins**-0.5, dtype=wide))
        inputs.append(make.tensor(outs, make.sizes.rank, scale=0.1, dtype=wide))
    return inputs


def _peft(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What a LoRA layer of PEFT computes: the update in A's dtype, added to the base product and rounded."""
    base = F.linear(x, weight)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * LORA_SCALE).to(base.dtype)


def _threes(flat: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]


def _projections(x: Tensor, flat: Sequence[Tensor]) -> list[Projection]:
    return [Projection(weight, x.dtype, lora=Lora(a, b, LORA_SCALE)) for weight, a, b in _threes(flat)]


def _qkv_shapes(make: Maker) -> list[tuple[int, int]]:
    size = make.sizes
    return [(size.hidden, heads * size.head_dim) for heads in (size.heads, size.kv_heads, size.kv_heads)]


def _mlp_shapes(make: Maker) -> list[tuple[int, int]]:
    size = make.sizes
    return [(size.hidden, size.inner)] * 2 + [(size.inner, size.hidden)]


def _plain_group(x: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
    return tuple(_peft(x, *three) for three in _threes(flat))


def _our_group(x: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
    return project(x, _projections(x, flat))[0]


def _under_autocast(run: Run) -> Run:
    """A trainer's bf16: LoRA's products in half precision too."""

    def inside(x: Tensor, *flat: Tensor) -> Any:
        with torch.autocast(x.device.type, dtype=x.dtype):
            return run(x, *flat)

    return inside


def _plain_mlp(x: Tensor, *flat: Tensor) -> Tensor:
    gate, up, down = _threes(flat)
    return _peft(F.silu(_peft(x, *gate)) * _peft(x, *up), *down)


def _our_mlp(x: Tensor, *flat: Tensor) -> Tensor:
    gate, up, down = _projections(x, flat)
    return gated_mlp(x, [gate, up], down, "silu")


def _lora_work(make: Maker, shapes: Sequence[tuple[int, int]], *, backward: bool) -> Work:
    """Base products and updates; backward again both, and the gradients of A and B."""
    base = sum(2 * make.tokens * ins * outs for ins, outs in shapes)
    low = sum(2 * make.tokens * make.sizes.rank * (ins + outs) for ins, outs in shapes)
    return Work(flops=base + low * (2 if backward else 1))


CASES = [
    Case(
        "linear_cross_entropy",
        "the loss on a frozen head",
        functools.partial(_loss_inputs, trained=False),
        _loss_runs,
        functools.partial(_loss_work, products=1),
        functools.partial(_loss_work, products=1),
        avoided=_logits,
    ),
    Case(
        "linear_cross_entropy_trained",
        "the loss on a head that trains",
        functools.partial(_loss_inputs, trained=True),
        _loss_runs,
        functools.partial(_loss_work, products=1),
        functools.partial(_loss_work, products=2),
        avoided=_logits,
    ),
    Case(
        "attention",
        "causal attention over packed sequences",
        _attention_inputs,
        _attention_runs,
        functools.partial(_attention_work, products=2),
        functools.partial(_attention_work, products=5),
        functools.partial(_attend, backend="reference"),
    ),
    Case(
        "lora_qkv",
        "q, k and v projections with LoRA, A and B in float32",
        lambda make: _lora_inputs(make, _qkv_shapes(make)),
        lambda inputs: {PLAIN: _plain_group, OURS: _our_group},
        lambda make: _lora_work(make, _qkv_shapes(make), backward=False),
        lambda make: _lora_work(make, _qkv_shapes(make), backward=True),
        plain_in_half=_under_autocast(_plain_group),
    ),
    Case(
        "lora_mlp",
        "a gated MLP with LoRA on its three projections, A and B in float32",
        lambda make: _lora_inputs(make, _mlp_shapes(make)),
        lambda inputs: {PLAIN: _plain_mlp, OURS: _our_mlp},
        lambda make: _lora_work(make, _mlp_shapes(make), backward=False),
        lambda make: _lora_work(make, _mlp_shapes(make), backward=True),
        plain_in_half=_under_autocast(_plain_mlp),
    ),
]
