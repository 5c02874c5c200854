"""Cases of blocks of experts: Qwen3-30B-A3B's frozen, trained and with LoRA, gpt-oss-20b's frozen and with LoRA.

The plain run is transformers' ``grouped_mm`` implementation; with LoRA it runs on PEFT's stacks, which have the update
added. The least work is the matmuls of the chosen experts, or each byte of weights and adapters once in each pass that
needs it, and each byte of the block's inputs and results once, if these take longer.

Shape suffixes: T tokens, K choices of a token, E experts, H hidden size, I size inside, r rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fastpack.bench.ops.case import LIGER, OURS, PLAIN, SMALL, Case, Inputs, Maker, Run, liger_run
from fastpack.bench.settings import LORA_RANK
from fastpack.bench.shapes import SHAPES
from fastpack.ops.expert_operands import Gate
from fastpack.ops.experts.experts import experts
from fastpack.ops.experts.layer import ExpertLinear
from fastpack.ops.linear.operands import Lora

LORA_SCALE = 2.0
PLAIN_IMPLEMENTATION = "grouped_mm"
Training = Literal["frozen", "trained", "lora"]
Layer = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""A stack, its biases ``[E, O]``, and LoRA's A ``[E r, I]`` and B ``[O, r E]``, in float32 as PEFT keeps them."""


@dataclass(frozen=True)
class Block:
    """A kind of block of experts.

    Attributes:
        shape: the shape of :mod:`fastpack.bench.shapes` whose experts these are.
        stock: transformers' class.
        gate: the gated unit.
        transposed: whether stacks are ``[E, I, O]``.
        biased: whether both layers have biases.
        liger: whether Liger has a kernel for it.
    """

    shape: str
    stock: type[nn.Module]
    gate: Gate
    transposed: bool = False
    biased: bool = False
    liger: bool = False

    def sizes(self, make: Maker) -> tuple[int, int, int, int]:
        """Return E, K, H and I; small ones on a CPU."""
        if make.sizes is SMALL:
            return 6, 2, 64, 48
        shape = SHAPES[self.shape]
        count = shape["num_experts" if "num_experts" in shape else "num_local_experts"]
        inside = shape["moe_intermediate_size" if "moe_intermediate_size" in shape else "intermediate_size"]
        return count, shape["num_experts_per_tok"], shape["hidden_size"], inside

    def widths(self, make: Maker) -> list[tuple[int, int]]:
        """Return inputs and outputs of both layers."""
        _, _, hidden, inside = self.sizes(make)
        return [(hidden, 2 * inside), (inside, hidden)]


QWEN = Block("qwen3-30b-a3b", Qwen3MoeExperts, Gate("silu"), liger=True)
GPT_OSS = Block(
    "gpt-oss-20b",
    GptOssExperts,
    Gate("silu", "interleaved", alpha=1.702, limit=7.0, offset=1.0),
    transposed=True,
    biased=True,
)


def _inputs(make: Maker, block: Block, training: Training) -> Inputs:
    """Return x, the chosen experts and their weights, and both layers."""
    count, chosen, hidden, _ = block.sizes(make)
    scores = make.tensor(make.tokens, count, grad=False, dtype=torch.float32)
    index = scores.topk(chosen, dim=-1).indices
    weights = scores.gather(1, index).softmax(-1).to(make.dtype).requires_grad_()
    layers = [_layer(make, block, training, *widths) for widths in block.widths(make)]
    return [make.tensor(make.tokens, hidden), index, weights, layers]


def _layer(make: Maker, block: Block, training: Training, ins: int, outs: int) -> Layer:
    count, wide = block.sizes(make)[0], torch.promote_types(make.dtype, torch.float32)
    shape = (count, ins, outs) if block.transposed else (count, outs, ins)
    weight = make.tensor(*shape, scale=ins**-0.5, grad=training == "trained")
    bias = make.tensor(count, outs, scale=0.1, grad=False) if block.biased else None
    if training != "lora":
        return weight, bias, None, None
    a = make.tensor(count * LORA_RANK, ins, scale=ins**-0.5, dtype=wide)
    return weight, bias, a, make.tensor(outs, LORA_RANK * count, scale=0.1, dtype=wide)


def _adapted(layer: Layer, *, transposed: bool) -> Tensor:
    """Return the stack with LoRA's update, as PEFT makes it."""
    weight, _, a, b = layer
    if a is None or b is None:
        return weight
    of_a = a.view(len(weight), -1, a.shape[1]).to(weight.dtype)
    of_b = b.view(len(b), -1, len(weight)).permute(2, 0, 1).to(weight.dtype)
    left, right = (of_a.mT, of_b.mT) if transposed else (of_b, of_a)
    return torch.baddbmm(weight, left, right, alpha=LORA_SCALE)


def _plain(x: Tensor, index: Tensor, weights: Tensor, layers: list[Layer], *, block: Block) -> Tensor:
    tensors: dict[str, Any] = {}
    for name, layer in zip(("gate_up_proj", "down_proj"), layers, strict=True):
        tensors[name] = _adapted(layer, transposed=block.transposed)
        if block.biased:
            tensors[f"{name}_bias"] = layer[1]
    wide = x.dtype.itemsize > torch.float32.itemsize  # the tests' reference, which grouped_mm does not compute
    module = _stock(block, len(layers[0][0]), "eager" if wide else PLAIN_IMPLEMENTATION)
    result: Tensor = torch.func.functional_call(module, tensors, (x, index, weights))
    return result


@functools.cache
def _stock(block: Block, count: int, implementation: str) -> nn.Module:
    """Return transformers' module without memory, which runs on the tensors that it is called with."""
    model_type = SHAPES[block.shape]["model_type"]
    names = {"num_experts": count, "num_local_experts": count}
    config = AutoConfig.for_model(model_type, **names, experts_implementation=implementation)
    with torch.device("meta"):
        return block.stock(config)


def _ours(x: Tensor, index: Tensor, weights: Tensor, layers: list[Layer], *, block: Block) -> Tensor:
    inner, down = (
        ExpertLinear(weight, bias, None if a is None or b is None else Lora(a, b, LORA_SCALE))
        for weight, bias, a, b in layers
    )
    return experts(x, index, weights, inner, down, block.gate, transposed=block.transposed).finish()


def _liger(x: Tensor, index: Tensor, weights: Tensor, layers: list[Layer]) -> Any:
    """Run Liger's fused experts, which compute the gradients of both stacks, frozen or not."""
    run = liger_run("fused_moe", "LigerFusedMoEFunction")
    return run(x, layers[0][0], layers[1][0], index.int(), weights)


def _runs(block: Block, training: Training) -> dict[str, Run]:
    runs: dict[str, Run] = {PLAIN: functools.partial(_plain, block=block), OURS: functools.partial(_ours, block=block)}
    return runs | ({LIGER: _liger} if block.liger and training != "lora" else {})


def _flops(make: Maker, block: Block, training: Training) -> int:
    """Count the matmuls of the chosen experts; the backward has them again, and the gradients of what trains."""
    rows = make.tokens * block.sizes(make)[1]
    base = sum(2 * rows * ins * outs for ins, outs in block.widths(make))
    low = sum(2 * rows * LORA_RANK * (ins + outs) for ins, outs in block.widths(make)) if training == "lora" else 0
    return (3 if training == "trained" else 2) * base + 3 * low


def _bytes(make: Maker, block: Block, training: Training) -> int:
    """Count the weights of the experts with tokens, read in both passes; gradients; x and the result and theirs."""
    count, chosen, hidden, _ = block.sizes(make)
    count = min(count, make.tokens * chosen)
    stacks = count * sum(ins * outs for ins, outs in block.widths(make)) * make.dtype.itemsize
    adapters = count * LORA_RANK * sum(ins + outs for ins, outs in block.widths(make)) * torch.float32.itemsize
    moved = stacks * (3 if training == "trained" else 2) + (3 * adapters if training == "lora" else 0)
    return moved + 4 * make.tokens * hidden * make.dtype.itemsize


def _case(name: str, what: str, block: Block, training: Training) -> Case:
    return Case(
        name,
        what,
        lambda make: _inputs(make, block, training),
        lambda _: _runs(block, training),
        lambda make: _flops(make, block, training),
        "flops",
        lambda make: _bytes(make, block, training),
    )


CASES = [
    _case("experts", "8 of 128 frozen experts a token, 2,048 x 768", QWEN, "frozen"),
    _case("experts_trained", "the same experts, which train", QWEN, "trained"),
    _case("experts_lora", "the same experts, frozen, with LoRA, A and B in float32", QWEN, "lora"),
    _case("experts_gpt_oss", "4 of 32 frozen experts a token, 2,880 x 2,880, with biases", GPT_OSS, "frozen"),
    _case("experts_gpt_oss_lora", "the same experts with LoRA, A and B in float32", GPT_OSS, "lora"),
]
