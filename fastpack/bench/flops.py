"""How many floating-point operations of matrix products one training step needs, for the floor under its time.

Counted exactly from the config of a dense decoder with a gated MLP (Llama, Qwen 2, Qwen 3), a multiplication and its
addition as two operations:

- each linear layer of P = inputs x outputs on T tokens: 2 T P forward, as much for the gradient of its input, as much
  for that of its weight where that trains. With frozen weights nothing below the first layer needs a gradient, so the
  inputs of its q, k and v have none;
- LoRA of rank R: 2 T R (inputs + outputs) each of forward, gradients of inputs and gradients of A and B;
- causal attention: two products of 2 D operations for each head and each pair of a token and one at or before it in
  its own sequence, so 4 D l (l + 1) / 2 a sequence of l; five such products in the backward, since nobody keeps the
  scores (Dao et al., "FlashAttention", arXiv:2205.14135, algorithm 4);
- the head on the tokens that have a next one to predict, T - N;
- with gradient checkpointing, each layer's forward once more, but for what only its result would need: the product of
  ``down_proj`` (with LoRA also that of its B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["full", "lora", "qlora"]


@dataclass(frozen=True)
class StepFlops:
    """Operations of one step by what needs them."""

    linear: int
    lora: int
    attention: int
    head: int
    recomputed: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.linear + self.lora + self.attention + self.head + self.recomputed


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
    tokens, scored = sum(lengths), sum(lengths) - len(lengths)
    layer = layer_projections(config)
    layers: int = config.num_hidden_layers
    frozen = mode != "full"
    rank = rank if frozen else 0

    weights = sum(ins * outs for ins, outs in layer.values())
    low = rank * sum(ins + outs for ins, outs in layer.values())
    first = [layer[name] for name in ("q", "k", "v")] if frozen else []
    unneeded = 2 * tokens * sum(ins * outs for ins, outs in first)
    unneeded_low = 2 * tokens * rank * sum(ins for ins, _ in first)

    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attention = 4 * pairs * config.num_attention_heads * head_dim(config)

    recomputed = 0
    if checkpointing:
        ins, outs = layer["down"]
        recomputed = layers * (2 * tokens * (weights + low - ins * outs - rank * outs) + attention)
    return StepFlops(
        linear=layers * 2 * tokens * weights * (2 if frozen else 3) - unneeded,
        lora=layers * 2 * tokens * low * 3 - unneeded_low,
        attention=layers * (attention + attention // 2 * 5),
        head=2 * scored * config.hidden_size * config.vocab_size * (2 if frozen else 3),
        recomputed=recomputed,
    )


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
