"""Cases of a block of experts: its operands, a loop over tokens as the oracle, and plain matmuls for each expert.

Shape suffixes: T tokens, K choices of a token, E experts, H hidden size, I size inside, r rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastpack.ops.expert_operands import Gate
from fastpack.ops.experts.experts import experts
from fastpack.ops.experts.layer import ExpertLinear
from fastpack.ops.implementation import Implementation
from fastpack.ops.linear.operands import Lora

SCALES = {"inner": 0.7, "down": 1.9}

GATES = {  # limits that every dtype can hold
    "silu": Gate("silu"),
    "steep silu, clamped, interleaved": Gate("silu", "interleaved", alpha=1.702, limit=0.75, offset=1.0),
    "gelu, interleaved": Gate("gelu", "interleaved"),
    "silu, clamped": Gate("silu", limit=0.5),
    "tanh gelu, clamped afterwards": Gate("gelu_tanh", limit=0.375, clamps_after=True),
    "steep silu, clamped, with an offset": Gate("silu", alpha=1.3, limit=0.625, offset=0.5),
    "squared relu": Gate("relu2", "plain"),
    "plain silu": Gate("silu", "plain"),
}
RANKS = {"no LoRA": (0, 0), "rank 3 inside": (3, 0), "rank 5 behind": (0, 5), "ranks 4 and 20": (4, 20)}
LAYOUTS = {
    "": (False, False),
    "transposed": (True, False),
    "with bias": (False, True),
    "transposed, with bias": (True, True),
}
ROUTINGS = ("distinct", "few", "one", "elsewhere", "twice", "nowhere")
SIZES = ((13, 2, 5, 20, 12), (1, 1, 3, 8, 4), (9, 3, 7, 12, 20), (40, 1, 1, 4, 8))
"""Tokens, choices, experts, hidden size, size inside; kernels load float32 rows of multiples of 4 elements."""
ODD_SIZES = ((11, 2, 5, 7, 3), (1, 3, 13, 1, 5), (6, 4, 4, 9, 1))
"""The same, for torch's matmuls alone."""


@dataclass(frozen=True)
class Case:
    """A block of experts.

    Attributes:
        gate: the gated unit.
        ranks: the ranks of LoRA on both layers; 0 for none.
        transposed: whether stacks are ``[E, I, O]``.
        bias: whether layers have biases.
        routing: one of :data:`ROUTINGS`.
        sizes: T, K, E, H and I.
        index_dtype: the dtype of the choices.
        weights_dtype: the dtype of the routing weights, or None for that of x.
        lora_dtype: the dtype of A and B, or None for that of x.
    """

    gate: Gate = GATES["silu"]
    ranks: tuple[int, int] = (3, 5)
    transposed: bool = False
    bias: bool = False
    routing: str = "distinct"
    sizes: tuple[int, int, int, int, int] = SIZES[0]
    index_dtype: torch.dtype = torch.int64
    weights_dtype: torch.dtype | None = None
    lora_dtype: torch.dtype | None = None

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of an operand if x has this one."""
        if name == "weights":
            return self.weights_dtype or dtype
        return (self.lora_dtype or dtype) if name.endswith((".a", ".b")) else dtype


EVERYTHING = Case(GATES["steep silu, clamped, interleaved"], (3, 5), bias=True, sizes=(6, 2, 4, 12, 8))
"""All ten operands."""


def cases(gate: str, ranks: str, layout: str, sizes: Collection[Any] = SIZES) -> Case:
    """Return the case of these names; routing, sizes and the dtype of indices take turns."""
    names = list(GATES).index(gate), list(RANKS).index(ranks), list(LAYOUTS).index(layout)
    turn = names[0] + 2 * names[1] + 3 * names[2]
    transposed, bias = LAYOUTS[layout]
    return Case(
        GATES[gate],
        RANKS[ranks],
        transposed,
        bias,
        ROUTINGS[turn % len(ROUTINGS)],
        [*sizes][(turn + names[2]) % len(sizes)],
        (torch.int64, torch.int32)[(turn + names[1]) % 2],
    )


def choices(case: Case, seed: int = 0) -> Tensor:
    """Return the experts that each token chooses, ``[T, K]``."""
    tokens, count, experts, *_ = case.sizes
    generator = torch.Generator().manual_seed(seed)
    most = {"distinct": experts, "few": max(count, experts // 2), "elsewhere": 2 * max(experts, count)}

    def draw() -> Tensor:
        if case.routing in most:
            return torch.randperm(max(count, most[case.routing]), generator=generator)[:count]
        if case.routing == "nowhere":
            return experts + torch.randperm(count, generator=generator)
        chosen = experts // 2 if case.routing == "one" else int(torch.randint(experts, (1,), generator=generator))
        return torch.full((count,), chosen)

    return torch.stack([draw() for _ in range(tokens)]).to(case.index_dtype)


def operands(case: Case, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return the operands by name in float64, with values that ``dtype`` can hold."""
    tokens, count, experts, hidden, inside = case.sizes
    columns = inside if case.gate.columns == "plain" else 2 * inside
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    result = {"x": random(tokens, hidden), "weights": random(tokens, count).abs()}
    layers = ("inner", hidden, columns, case.ranks[0]), ("down", inside, hidden, case.ranks[1])
    for name, height, width, rank in layers:
        weight = random(experts, width, height) / math.sqrt(height)
        result[f"{name}.weight"] = weight.transpose(1, 2).contiguous() if case.transposed else weight
        if case.bias:
            result[f"{name}.bias"] = random(experts, width) / 2
        if rank:
            result[f"{name}.a"] = random(experts * rank, height) / math.sqrt(height)
            result[f"{name}.b"] = random(width, rank * experts) / math.sqrt(rank) / 2
    return {name: value.to(dtype).double() for name, value in result.items()}


Block = Callable[[Case, dict[str, Tensor], Tensor], Tensor]
"""A function of case, operands and choices, which returns ``[T, H]``."""


def run(
    block: Block,
    case: Case,
    values: dict[str, Tensor],
    index: Tensor,
    dtype: torch.dtype = torch.float64,
    *,
    trained: Collection[str] | None = None,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Return the result, ``out``, and the gradients of the operands that are trained (all by default), by name."""
    leaves = {name: value.to(device, case.dtype_of(name, dtype), copy=True) for name, value in values.items()}
    for name in leaves if trained is None else trained:
        leaves[name].requires_grad_()
    out = block(case, leaves, index.to(device))
    assert out.dtype == dtype
    out.backward(cotangent(out))
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for name, gradient in gradients.items():
        assert (gradient.dtype, gradient.shape) == (leaves[name].dtype, leaves[name].shape)
    return {"out": out.detach(), **gradients}


def cotangent(out: Tensor) -> Tensor:
    """Return a gradient of the result that bfloat16 can hold."""
    generator = torch.Generator().manual_seed(99)
    return torch.randn(out.shape, generator=generator).to(torch.bfloat16).to(out.device, out.dtype)


def layers(case: Case, leaves: dict[str, Tensor]) -> tuple[ExpertLinear, ExpertLinear]:
    """Return both layers as the op takes them."""

    def layer(name: str) -> ExpertLinear:
        a = leaves.get(f"{name}.a")
        lora = None if a is None else Lora(a, leaves[f"{name}.b"], SCALES[name])
        return ExpertLinear(leaves[f"{name}.weight"], leaves.get(f"{name}.bias"), lora)

    return layer("inner"), layer("down")


def op(implementation: Implementation, **settings: Any) -> Block:
    """Return the op in one of its implementations."""

    def block(case: Case, leaves: dict[str, Tensor], index: Tensor) -> Tensor:
        inner, down = layers(case, leaves)
        shared: dict[str, Any] = {"transposed": case.transposed, "implementation": implementation, **settings}
        return experts(leaves["x"], index, leaves["weights"], inner, down, case.gate, **shared).finish()

    return block


def by_token(case: Case, leaves: dict[str, Tensor], index: Tensor) -> Tensor:
    """Compute the definition, token by token and choice by choice; every operand gets a gradient."""
    inner, down = (_dense(case, leaves, name) for name in SCALES)
    rows, nothing = [], sum(leaf.sum() for leaf in leaves.values()) * 0
    for token, chosen in enumerate(index.tolist()):
        total = torch.zeros_like(leaves["x"][token])
        for choice, expert in enumerate(chosen):
            if expert < case.sizes[2]:
                between = _apply(inner, expert, leaves["x"][token])
                result = _apply(down, expert, gated(between, case.gate))
                total = total + leaves["weights"][token, choice] * result
        rows.append(total)
    return torch.stack(rows) + nothing


def by_expert(case: Case, leaves: dict[str, Tensor], index: Tensor) -> Tensor:
    """Compute the same as models do: each expert's rows at once, with a dense update of the stacks."""
    inner, down = (_dense(case, leaves, name) for name in SCALES)
    x, weights = leaves["x"], leaves["weights"]
    total = torch.zeros_like(x)
    for expert in range(case.sizes[2]):
        tokens, chosen = torch.where(index == expert)
        result = _apply(down, expert, gated(_apply(inner, expert, x[tokens]), case.gate))
        total = total.index_add(0, tokens, (result * weights[tokens, chosen, None]).to(x.dtype))
    return total


def _dense(case: Case, leaves: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor | None]:
    """Return the weights with the update as PEFT lays it out, ``[E, O, I]``, and the bias."""
    weight, count = leaves[f"{name}.weight"], case.sizes[2]
    weight = weight.transpose(1, 2) if case.transposed else weight
    if f"{name}.a" in leaves:
        a, b = leaves[f"{name}.a"], leaves[f"{name}.b"]
        a_by_expert, b_by_expert = a.reshape(count, -1, a.shape[1]), b.reshape(len(b), -1, count)
        update = torch.einsum("ore,eri->eoi", b_by_expert, a_by_expert) * SCALES[name]
        weight = (weight + update).to(weight.dtype)
    return weight, leaves.get(f"{name}.bias")


def _apply(layer: tuple[Tensor, Tensor | None], expert: int, x: Tensor) -> Tensor:
    weight, bias = layer
    return F.linear(x, weight[expert], None if bias is None else bias[expert])


def gated(x: Tensor, gate: Gate) -> Tensor:
    """Compute a gated unit as defined."""
    act = {
        "silu": lambda g: g * (gate.alpha * g).sigmoid(),
        "gelu": lambda g: g * (1 + (g / math.sqrt(2)).erf()) / 2,
        "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
        "relu2": lambda g: g.clamp(min=0) ** 2,
    }[gate.kind]
    if gate.columns == "plain":
        return act(x)
    half = x.shape[-1] // 2
    g, u = (x[..., :half], x[..., half:]) if gate.columns == "halves" else (x[..., 0::2], x[..., 1::2])
    u = u.clamp(-gate.limit, gate.limit) + gate.offset
    return (act(g).clamp(max=gate.limit) if gate.clamps_after else act(g.clamp(max=gate.limit))) * u


def worst(actual: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Return the largest relative error of all tensors; a truth of zero must be met exactly."""
    assert actual.keys() == truth.keys()
    return max(_relative(actual[name], right) for name, right in truth.items())


def _relative(actual: Tensor, truth: Tensor) -> float:
    assert actual.shape == truth.shape
    if not truth.numel():
        return 0.0
    error = (actual.to(truth.device).double() - truth.double()).abs().max()
    result = float(error / truth.abs().max()) if truth.any() else float(error)
    return math.inf if math.isnan(result) else result


def subsets(names: Collection[str], count: int, seed: int = 0) -> Iterator[list[str]]:
    """Yield each name alone, all but each name, and ``count`` random subsets of names, none of them empty."""
    for name in names:
        yield [name]
        yield [other for other in names if other != name]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        drawn = [*itertools.compress(names, (torch.rand(len(names), generator=generator) < 0.5).tolist())]
        if drawn:
            yield drawn


def other_lora(values: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Return the operands with the adapters of the first two experts swapped."""
    swapped, count = {**values}, case.sizes[2]
    order = [1, 0, *range(2, count)]
    for name in values:
        if name.endswith(".a"):
            swapped[name] = values[name].view(count, -1, values[name].shape[1])[order].reshape(values[name].shape)
        elif name.endswith(".b"):
            swapped[name] = values[name].view(len(values[name]), -1, count)[..., order].reshape(values[name].shape)
    return swapped
