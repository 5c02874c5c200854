"""How many floating-point operations of matrix products a training step needs. The one place that has the formulas.

A multiplication and its addition are two operations. Counted are the products of

- a linear layer of P = inputs x outputs on T tokens: 2 T P forward, as much for the gradient of its input where
  something before it trains, as much for that of its weight where that trains (Kaplan et al., "Scaling Laws for Neural
  Language Models", arXiv:2001.08361, section 2.1: 6 P a token where all trains). LoRA's A and B are such layers, of
  P = R x inputs and P = R x outputs. Of experts a token pays for those that it is routed to;
- attention: two products, of 2 D_k and 2 D_v operations, for each head and each pair of a token and one that it sees:
  itself and those before it in its own sequence, the window's last ones where there is a window. In the backward five
  such products, three of D_k and two of D_v, since nobody keeps the scores (Dao et al., "FlashAttention",
  arXiv:2205.14135, algorithm 4), all five as soon as anything before it trains;
- the head, on the positions that it is given;
- with gradient checkpointing, each layer's forward once more (Chen et al., "Training Deep Nets with Sublinear Memory
  Cost", arXiv:1604.06174), but for what only its result would need: the last product of a layer whose result is added
  to the residual stream as it is (with LoRA that of its B too).

Norms, activations, softmax, rotary positions and look-ups are no matrix products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_FORWARD, _BACKWARD = (1, 1), (3, 2)
"""Products over the sizes of keys and of values."""


@dataclass(frozen=True)
class StepFlops:
    """Operations by what needs them."""

    linear: int = 0
    lora: int = 0
    attention: int = 0
    head: int = 0
    recomputed: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.once + self.recomputed

    @property
    def once(self) -> int:
        """Without those that checkpointing computes a second time."""
        return self.linear + self.lora + self.attention + self.head

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(
            self.linear + other.linear,
            self.lora + other.lora,
            self.attention + other.attention,
            self.head + other.head,
            self.recomputed + other.recomputed,
        )


@dataclass(frozen=True)
class Span:
    """Which tokens of its sequence, up to itself, a token sees.

    Attributes:
        window: at most so many, itself included; None for all.
        chunk: only those of its own chunk of so many; None where there are no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def pairs(self, length: int) -> int:
        """How many pairs of a token and one that it sees a sequence of this length has."""
        if self.chunk is not None:
            whole, rest = divmod(length, self.chunk)
            return whole * _triangle(self.chunk) + _triangle(rest)
        seen = length if self.window is None else min(length, self.window)
        return _triangle(seen) + (length - seen) * seen


FULL = Span()


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


@dataclass(frozen=True)
class Product:
    """A linear layer.

    Attributes:
        inputs, outputs: its sizes.
        times: how often a token goes through one of these sizes; for experts, to how many it is routed.
        weight_grad, input_grad: which gradients the backward needs.
        lora: True for LoRA's A and B.
        recomputed: False where a checkpointed layer can do without computing it again.
    """

    inputs: int
    outputs: int
    times: int = 1
    weight_grad: bool = True
    input_grad: bool = True
    lora: bool = False
    recomputed: bool = True

    def forward(self, tokens: int) -> int:
        """Operations of the forward on so many tokens."""
        return 2 * tokens * self.inputs * self.outputs * self.times

    def training(self, tokens: int) -> int:
        """Those of forward and backward."""
        return self.forward(tokens) * (1 + self.weight_grad + self.input_grad)


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention.

    Attributes:
        heads, key_dim, value_dim: query heads, and the sizes of their keys and values.
        span: what a token sees.
        backward: whether anything before it trains.
    """

    heads: int
    key_dim: int
    value_dim: int
    span: Span = FULL
    backward: bool = True

    def forward(self, pairs: int) -> int:
        """Operations of the forward over so many pairs of tokens."""
        return self._products(pairs, _FORWARD)

    def training(self, pairs: int) -> int:
        """Those of forward and backward."""
        return self.forward(pairs) + (self._products(pairs, _BACKWARD) if self.backward else 0)

    def _products(self, pairs: int, counts: tuple[int, int]) -> int:
        over_keys, over_values = counts
        return 2 * (over_keys * self.key_dim + over_values * self.value_dim) * self.heads * pairs


@dataclass(frozen=True)
class Layer:
    """A decoder layer, or what stands before, between or behind them.

    Attributes:
        checkpointed: whether its forward is computed again in the backward.
    """

    products: tuple[Product, ...]
    attentions: tuple[Attention, ...] = ()
    checkpointed: bool = False


@dataclass(frozen=True)
class Load:
    """What a step gave to the model, summed over its sequences.

    Attributes:
        tokens: real ones.
        pairs: of each span, pairs of a token and one that it sees.
        head_positions: those that went through the head.
    """

    tokens: int
    pairs: Mapping[Span, int]
    head_positions: int

    @classmethod
    def of(cls, lengths: Sequence[int], spans: Iterable[Span] = (FULL,), *, head_positions: int | None = None) -> Load:
        """From the lengths of the sequences; by default the head gets each token that has a next one to predict."""
        pairs = {span: sum(map(span.pairs, lengths)) for span in spans}
        return cls(sum(lengths), pairs, sum(lengths) - len(lengths) if head_positions is None else head_positions)


def training_flops(layers: Iterable[Layer], head: Iterable[Product], load: Load) -> StepFlops:
    """What forward and backward need."""
    linear = lora = attention = recomputed = 0
    for layer in layers:
        for product in layer.products:
            needed = product.training(load.tokens)
            linear, lora = (linear, lora + needed) if product.lora else (linear + needed, lora)
            if layer.checkpointed and product.recomputed:
                recomputed += product.forward(load.tokens)
        for heads in layer.attentions:
            attention += heads.training(load.pairs[heads.span])
            if layer.checkpointed:
                recomputed += heads.forward(load.pairs[heads.span])
    return StepFlops(linear, lora, attention, sum(p.training(load.head_positions) for p in head), recomputed)


def forward_flops(layers: Iterable[Layer], head: Iterable[Product], load: Load, *, lora: bool = True) -> StepFlops:
    """What a forward alone needs, that of a reference model; ``lora=False`` where its adapters are switched off."""
    layers = tuple(layers)
    products = [product for layer in layers for product in layer.products]
    return StepFlops(
        linear=sum(p.forward(load.tokens) for p in products if not p.lora),
        lora=sum(p.forward(load.tokens) for p in products if p.lora) if lora else 0,
        attention=sum(a.forward(load.pairs[a.span]) for layer in layers for a in layer.attentions),
        head=sum(p.forward(load.head_positions) for p in head if lora or not p.lora),
    )
