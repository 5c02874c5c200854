"""How many floating-point operations of matrix products one training step needs, for the floor under its time.

From the config alone of a dense decoder with a gated MLP (Llama, Qwen 2, Qwen 3). A multiplication and its addition are
two operations. Counted are the products of

- a linear layer of P = inputs x outputs on T tokens: 2 T P forward, as much for the gradient of its input where
  something before it trains, as much for that of its weight where that trains (Kaplan et al., "Scaling Laws for Neural
  Language Models", arXiv:2001.08361, section 2.1: 6 P a token where all trains). LoRA's A and B are such layers, of
  P = R x inputs and P = R x outputs;
- attention: two products, of 2 D operations, for each head and each pair of a token and one before it in its own
  sequence, or itself. In the backward five such products, since nobody keeps the scores (Dao et al., "FlashAttention",
  arXiv:2205.14135, algorithm 4);
- the head, on the tokens that have a next one to predict, T - N;
- with gradient checkpointing, each layer's forward once more (Chen et al., "Training Deep Nets with Sublinear Memory
  Cost", arXiv:1604.06174), but for what only its result would need: the last product, with LoRA that of its B too.

With frozen weights nothing below the first layer needs a gradient, so the inputs of its q, k and v have none. Norms,
activations, softmax, rotary positions and look-ups are no matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["full", "lora", "qlora"]


@dataclass(frozen=True)
class StepFlops:
    """Operations by what needs them."""

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
    """Count what one step on sequences of these lengths needs.

    Args:
        config: of a dense decoder with a gated MLP.
        lengths: of the sequences of the batch, in tokens.
        mode: whether every weight trains, or LoRA on every linear layer but the head.
        checkpointing: whether layers are computed anew in the backward.
        rank: of LoRA.
    """
    full, layers, tokens = mode == "full", config.num_hidden_layers, sum(lengths)
    rank = 0 if full else rank
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    scores = layers * 2 * 2 * head_dim(config) * config.num_attention_heads * pairs
    linear = lora = 0
    recomputed = scores
    for name, (ins, outs) in layer_projections(config).items():
        base, a, b = (2 * tokens * size for size in (ins * outs, ins * rank, rank * outs))
        linear += layers * base * (3 if full else 2)
        lora += layers * (a + b) * 3
        if not full and name in ("q", "k", "v"):
            linear, lora = linear - base, lora - a
        recomputed += layers * (a if name == "down" else base + a + b)
    head = 2 * (tokens - len(lengths)) * config.hidden_size * config.vocab_size * (3 if full else 2)
    return StepFlops(linear, lora, scores * 7 // 2, head, recomputed if checkpointing else 0)


def layer_projections(config: Any) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each linear layer of one decoder layer."""
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
    """Return the size of an attention head."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size
