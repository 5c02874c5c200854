"""How many floating-point operations of matrix products one training step needs, for the floor under its time.

From the config alone of a dense decoder with a gated MLP (Llama, Qwen 2, Qwen 3). The formulas are those of
:mod:`fastpack.flops`. Here the head is given the tokens that have a next one to predict, T - N. With frozen
weights nothing below the first layer needs a gradient, so the inputs of its q, k and v have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fastpack.flops import Attention, Layer, Load, Product, StepFlops, training_flops

Mode = Literal["full", "lora", "qlora"]


def step_flops(
    config: Any, lengths: Sequence[int], *, mode: Mode = "full", checkpointing: bool = False, rank: int = 16
) -> StepFlops:
    """What one step on sequences of these lengths needs.

    Args:
        config: of a dense decoder with a gated MLP.
        lengths: of the sequences of the batch, in tokens.
        mode: whether every weight trains, or LoRA on every linear layer but the head.
        checkpointing: whether layers are computed anew in the backward.
        rank: of LoRA.
    """
    full = mode == "full"
    size = head_dim(config)
    attention = Attention(config.num_attention_heads, size, size)
    layers = []
    for first in [True] + [False] * (config.num_hidden_layers - 1):
        products = []
        for name, (ins, outs) in layer_projections(config).items():
            input_grad = full or not (first and name in ("q", "k", "v"))
            last = name == "down"
            products.append(Product(ins, outs, weight_grad=full, input_grad=input_grad, recomputed=not last))
            if not full:
                products.append(Product(ins, rank, input_grad=input_grad, lora=True))
                products.append(Product(rank, outs, lora=True, recomputed=not last))
        layers.append(Layer(tuple(products), (attention,), checkpointing))
    head = Product(config.hidden_size, config.vocab_size, weight_grad=full)
    return training_flops(layers, [head], Load.of(lengths))


def layer_projections(config: Any) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear layer of one decoder layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * head_dim(config)
    keys = config.num_key_value_heads * head_dim(config)
    return {
        "q": (hidden, queries),
        "k": (hidden, keys),
        "v": (hidden, keys),
        "o": (queries, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "down": (inner, hidden),
    }


def head_dim(config: Any) -> int:
    """The size of an attention head."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size
