"""The memory that a step of training takes: its terms, at each moment at which their sum may be the largest.

A step's forward holds what its backward needs, and the backward frees it again, layer after layer, while gradients are
added. So the peak is in one of these moments, at the layer that runs last in the forward or first in the backward, or
at the layer with which the backward ends:

- ``forward``: the MLP of the last layer;
- ``loss``: the loss, and the gradient of what it reads; ``head``: the gradient of the head's weight;
- ``last mlp``, ``last attention``: in the backward of the last layer, which checkpointing has computed again (Chen et
  al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174);
- ``second`` and ``first``: the same in these layers, when the gradients of all behind them are there;
- ``embedding``: the gradient of the embedding.

Letters in formulas, all sizes of one token: H hidden size, I size inside an MLP, Q all query heads, K all key heads, N
number of query heads, R width of a position table, r rank of LoRA. V is the vocabulary, L the number of layers, C the
rows of a chunk of logits, and M the tokens of an MLP's tile. Everything has ``itemsize`` bytes, b, unless a factor says
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from fastpack.layers import decoder
from fastpack.memory.settings import TrainingSettings
from fastpack.memory.sizes import ModelSizes
from fastpack.memory.terms import Moment, Term, quantised_bytes
from fastpack.offload import activations, checkpoints, saved
from fastpack.ops.linear.gated_mlp import tile_rows
from fastpack.ops.loss.chunks import chunk_rows
from fastpack.ops.loss.linear_cross_entropy import CHUNK, CHUNK_TRAINED

WORKSPACE = 32 * 2**20
"""The bytes that torch allocates for the workspace of cuBLAS on Hopper; on other GPUs they are 8 MiB."""
TRL_TILE = 4096 * 32768
"""The logits of a tile of TRL's loss."""
LONG = 8000
"""Operations for each byte of attention's result from which it waits on the host: 8,000 tokens in a sequence, as on an
H100. Other cards, whose matmuls and copies are both slower, have similar numbers."""
GRADIENTS = "as large as the trained weights"
IDS = 40
"""Bytes of a token's id, label, target, position and number of its sequence, int64 each."""


def peak(
    sizes: ModelSizes, settings: TrainingSettings, tokens: int, longest: int | None = None
) -> tuple[Moment, float]:
    """Return the moment at which a step takes the most memory, and its bytes.

    Args:
        sizes: the model's sizes.
        settings: the settings of the training run.
        tokens: the number of tokens of a batch.
        longest: the length of its sequences; None for one sequence.
    """
    found = moments(sizes, settings, tokens, longest)
    best = max(found, key=lambda moment: moment.of(tokens))
    return best, best.of(tokens)


def moments(sizes: ModelSizes, settings: TrainingSettings, tokens: int, longest: int | None = None) -> list[Moment]:
    """Return the moments of a step; for the arguments see :func:`peak`."""
    return Step(sizes, settings, tokens, longest or tokens).moments()


@dataclass(frozen=True)
class Step:
    """One step on a batch; each method returns the terms of one part."""

    sizes: ModelSizes
    settings: TrainingSettings
    tokens: int
    longest: int

    @property
    def full(self) -> bool:
        """True if every weight trains."""
        return self.settings.mode == "full"

    @property
    def offloads(self) -> bool:
        """True if layer inputs are large enough to wait on the host."""
        nbytes = self.tokens * self.sizes.hidden * self.settings.itemsize
        return self.settings.offload is not None and nbytes >= checkpoints.MIN_BYTES

    @property
    def offloads_attention(self) -> bool:
        """True if attention's results wait there too: a token costs 2 Q operations for each of the tokens it sees."""
        s, b = self.sizes, self.settings.itemsize
        operations = 2 * s.queries * self.longest
        return self.offloads and operations >= LONG * (s.queries * b + 4 * s.heads)

    @property
    def tile(self) -> int:
        """The tokens of an MLP's tile; all of them if it runs in one piece."""
        if not self.settings.checkpointing:
            return self.tokens
        return tile_rows(self.tokens, self.sizes.intermediate, self.settings.dtype, decoder.TILE_BYTES)

    def moments(self) -> list[Moment]:
        """Return the moments at which the sum may be the largest."""
        layers = self.sizes.layers
        found = {
            "forward": [*self.inputs_in_forward(), *self.mlp_forward()],
            "loss": [*self.inputs_in_loss(), *self.loss()],
        }
        for name, index in {"last": layers - 1, "second": min(1, layers - 1), "first": 0}.items():
            there = [*self.gradients(behind=layers - 1 - index), *self.inputs_in_backward(index)]
            found[f"{name} mlp"] = [*there, *self.mlp_backward()]
            found[f"{name} attention"] = [*there, *self.attention_backward()]
        if self.full:
            found["head"] = [*self.inputs_in_loss(), *self.head_gradient()]
            found["embedding"] = [*self.gradients(behind=layers), *self.embedding_gradient()]
        every = (*self.fixed(), *self.held())
        return [Moment(name, (*every, *terms)) for name, terms in found.items()]

    def fixed(self) -> list[Term]:
        """Return what is there in every step."""
        s, b = self.sizes, self.settings.itemsize
        if self.settings.mode == "qlora":
            nbytes = sum(quantised_bytes(out * inputs) for out, inputs in s.linear.values())
            weights = [
                Term("weights in NF4", "(1/2 + 1/64 + 4/64/256) x weights", fixed=nbytes),
                Term("other weights", "b x (embedding + head + norms + biases)", fixed=b * s.other),
            ]
        else:
            weights = [Term("weights", "b x parameters", fixed=b * s.parameters)]
        trained = self.trained_bytes
        adapters = [] if self.full else [Term("A and B", f"{self.adapter_letter} x r x (in + out)", fixed=trained)]
        terms = [
            *weights,
            *adapters,
            Term("AdamW's moments", "2 x trained weights", fixed=2 * trained),
            Term("workspace of matmuls", "constant", fixed=WORKSPACE),
        ]
        if self.settings.accumulation:
            terms.append(Term("gradients", GRADIENTS, fixed=trained))
        return terms

    @property
    def adapter_letter(self) -> str:
        """The letter or number of bytes of an element of A and B, for formulas."""
        return "b" if self.settings.mode == "qlora" else "4"

    @property
    def trained_bytes(self) -> int:
        """The bytes of everything that trains."""
        if self.full:
            return self.settings.itemsize * self.sizes.parameters
        return self.settings.adapter_itemsize * self.sizes.lora_parameters(self.settings.rank)

    def gradients(self, *, behind: int) -> list[Term]:
        """Return the gradients when the backward has left so many layers behind; all are there with accumulation."""
        sizes, layers = self.sizes, self.sizes.layers
        if self.settings.accumulation:
            return []  # they are among what is there in every step
        head = self.settings.itemsize * sizes.head if self.full else 0
        embedding = 0 if sizes.tied else head
        nbytes = head + behind * (self.trained_bytes - head - embedding) / layers
        if behind == layers:
            nbytes += embedding
        return [Term(f"gradients of {behind} layers", GRADIENTS, fixed=nbytes)] if nbytes else []

    def held(self) -> list[Term]:
        """Return the tokens' own numbers, which every layer reads."""
        b = self.settings.itemsize
        terms = [
            Term("ids, labels, positions", f"{IDS}", per_token=IDS),
            Term("position tables", "2 x R x b", per_token=2 * self.sizes.rotary * b),
        ]
        if self.settings.checkpointing and not self.full:
            # an embedding whose output needs a gradient for checkpointing is a leaf, which stays where it is
            terms.append(Term("embedded tokens", "H x b", per_token=self.sizes.hidden * b))
        return terms

    # --- inputs of layers, and attention's results ---

    def inputs(self, count: int, results: int) -> list[Term]:
        """Return the inputs of so many layers, beside the embedded tokens, and so many results of attention."""
        s, b = self.sizes, self.settings.itemsize
        terms = [Term("inputs of layers", f"{count} x H x b", per_token=count * s.hidden * b)]
        if results and self.offloads_attention:
            nbytes = results * (s.queries * b + 4 * s.heads)
            terms.append(Term("attention of other layers", f"{results} x (Q x b + 4 x N)", per_token=nbytes))
        return terms

    @property
    def all_inputs(self) -> int:
        """The inputs of all layers, without the first one's if that is the embedded tokens."""
        return self.sizes.layers - (not self.full)

    def inputs_in_forward(self) -> list[Term]:
        """Return what earlier layers have left when the last layer runs."""
        if not self.settings.checkpointing:
            return self.saved_layers(self.sizes.layers - 1)
        if not self.offloads:
            return self.inputs(self.all_inputs, 0)
        # the stock forward holds the embedded tokens until it ends
        count = min(self.all_inputs, saved.KEEP + saved.IN_FLIGHT + self.full)
        return self.inputs(count, min(self.sizes.layers, activations.KEEP + activations.IN_FLIGHT))

    def inputs_in_loss(self) -> list[Term]:
        """Return what the layers have left when the loss runs."""
        if not self.settings.checkpointing:
            return self.saved_layers(self.sizes.layers)
        return self.inputs(saved.KEEP - 1, activations.KEEP) if self.offloads else self.inputs(self.all_inputs, 0)

    def inputs_in_backward(self, index: int) -> list[Term]:
        """Return the inputs that are left in the backward of the layer with this index."""
        embedded = not self.full  # the first input, which is counted as embedded tokens
        if not self.settings.checkpointing:
            return self.saved_layers(index)
        if not self.offloads:
            return self.inputs(index + 1 - embedded, 0)
        # the layer's own, and the next one, which is on its way back
        own, following = index >= embedded, index - 1 >= embedded
        return self.inputs(own + following, activations.KEEP if index == self.sizes.layers - 1 else min(index, 1))

    def saved_layers(self, count: int) -> list[Term]:
        """Return what so many layers save without checkpointing."""
        s, b = self.sizes, self.settings.itemsize
        normed = s.queries + s.keys if s.head_norms else 0
        size = 2 * s.hidden + normed + 2 * s.queries + 2 * s.keys + 2 * s.intermediate + 7 * self.rank
        formula = f"{count} x ((2 H + {'3 Q + 3 K' if normed else '2 Q + 2 K'} + 2 I + 7 r) x b + 4 x N + 8)"
        casts = count * self.cast_bytes
        return [Term("saved by layers", formula, casts, count * (size * b + 4 * s.heads + 8))]

    # --- one layer ---

    @property
    def rank(self) -> int:
        """LoRA's rank, or 0."""
        return 0 if self.full else self.settings.rank

    @property
    def cast_bytes(self) -> float:
        """The bytes of one layer's A and B in the activations' dtype, if that is not their own."""
        copies = not self.full and self.settings.adapter_itemsize != self.settings.itemsize
        return copies * self.settings.itemsize * self.sizes.lora_parameters(self.rank) / self.sizes.layers

    def attention(self, *, before: bool) -> list[Term]:
        """Return what attention saves; ``before``: with queries and keys as they were before their rotation."""
        s, b = self.sizes, self.settings.itemsize
        before = before or s.head_norms
        terms = [Term("queries, keys, values", "(Q + 2 K) x b", per_token=(s.queries + 2 * s.keys) * b)]
        if before:
            terms.append(Term("the same before RoPE", "(Q + K) x b", per_token=(s.queries + s.keys) * b))
        terms.append(Term("attention's result", "Q x b + 4 x N", per_token=s.queries * b + 4 * s.heads))
        terms.append(Term("statistics of two norms", "2 x 4", per_token=8))
        if self.rank:
            terms.append(Term("products with A", "4 x r x b", per_token=4 * self.rank * b))
        return terms

    def mlp_forward(self) -> list[Term]:
        """Return what the last layer takes in the forward when its MLP has its widest tensors."""
        # a checkpointed layer has freed what its attention saved
        return [*([] if self.settings.checkpointing else self.attention(before=True)), *self._mlp_run()]

    def _mlp_run(self) -> list[Term]:
        """Return what the forward of an MLP takes."""
        s, b = self.sizes, self.settings.itemsize
        return [
            Term("input and result of the MLP", "2 x H x b", per_token=2 * s.hidden * b),
            self._inside(results=1),
        ]

    def _inside(self, *, results: int) -> Term:
        """Return the tensors inside an MLP, or inside one tile of it and so many results of tiles."""
        s, b = self.sizes, self.settings.itemsize
        size = 3 * s.intermediate + s.hidden + 2 * self.rank
        if self.tile == self.tokens:
            return Term("inside the MLP", "(3 I + H + 2 r) x b", per_token=size * b)
        nbytes = self.tile * (size + results * s.hidden) * b
        return Term("inside a tile of the MLP", f"M x (3 I + {1 + results} H + 2 r) x b", fixed=nbytes)

    def mlp_backward(self) -> list[Term]:
        """Return what a layer takes in the backward when its MLP has its widest tensors."""
        s, b = self.sizes, self.settings.itemsize
        gradient = Term("gradient of the layer's result", "H x b", per_token=s.hidden * b)
        if not self.settings.checkpointing:
            dense = self.dense_weight()
            inside = Term("inside the MLP", "(3 I + H) x b", per_token=(3 * s.intermediate + s.hidden) * b)
            return [*self.attention(before=False), gradient, inside, *dense]
        whole = self.tile == self.tokens
        weights = 3 * s.intermediate * s.hidden * b
        terms = [*self.attention(before=False), gradient]
        if whole:
            return [*terms, *self._mlp_run()]
        terms.append(Term("input of the MLP and its gradient", "2 x H x b", per_token=2 * s.hidden * b))
        terms.append(self._inside(results=2))
        if self.full:
            terms.append(Term("gradients of the MLP, and of a tile", "2 x 3 x H x I x b", fixed=2 * weights))
        return [*terms, *self.dense_weight()]

    def dense_weight(self) -> list[Term]:
        """Return the weight that is made dense for a matmul."""
        if self.settings.mode != "qlora":
            return []
        nbytes = self.sizes.intermediate * self.sizes.hidden * self.settings.itemsize
        return [Term("a weight made dense", "H x I x b", fixed=nbytes)]

    def attention_backward(self) -> list[Term]:
        """Return what a layer takes in the backward of attention."""
        s, b = self.sizes, self.settings.itemsize
        return [
            *self.attention(before=False),
            Term("gradient of attention's input", "H x b", per_token=s.hidden * b),
            Term("gradient of attention's result", "Q x b + 4 x N", per_token=s.queries * b + 4 * s.heads),
            Term("gradients of queries, keys, values", "(Q + 2 K) x b", per_token=(s.queries + 2 * s.keys) * b),
            *self.workspace_of_attention(),
        ]

    def workspace_of_attention(self) -> list[Term]:
        """Return what cuDNN's and FlashAttention 2's backward allocate; ours allocates nothing.

        They sum the gradients of queries in float32, and those of keys and values for each query head.
        """
        if self.settings.attention != "auto":
            return []
        s, b = self.sizes, self.settings.itemsize
        grouped = s.queries > s.keys
        formula = "4 x Q + 2 x Q x b" if grouped else "4 x Q"
        return [Term("workspace of attention's backward", formula, per_token=(4 + 2 * b * grouped) * s.queries)]

    # --- head and embedding ---

    def loss(self) -> list[Term]:
        """Return what the loss takes."""
        s, b = self.sizes, self.settings.itemsize
        if self.settings.loss == "trl":
            terms = [
                Term("result of the last layer, normalised, selected", "3 x H x b", per_token=3 * s.hidden * b),
                Term("statistics of the loss", "28", per_token=28),
                Term("a tile of logits", "4096 x 32768 x b", fixed=TRL_TILE * b),
            ]
            if not self.full:  # with the head's gradient, the backward takes more
                per_token = s.hidden * (3 * b + 4)
                terms[0] = Term(
                    "result of the last layer, selected, gradients", "3 x H x b + 4 x H", per_token=per_token
                )
            return terms
        rows = chunk_rows(self.tokens, CHUNK_TRAINED if self.full else CHUNK)
        padded = ceil(s.vocabulary / 64) * 64
        terms = [
            Term("result of the last layer, normalised, gradient", "3 x H x b", per_token=3 * s.hidden * b),
            Term("a chunk of logits", "C x (V + 2 H) x b", fixed=rows * (padded + 2 * s.hidden) * b),
            Term("losses and their order", "12", per_token=12),
        ]
        if self.full and rows < self.tokens:
            terms.append(Term("sum of the head's gradient", "4 x V x H", fixed=4 * s.head))
        return terms

    def head_gradient(self) -> list[Term]:
        """Return what the gradient of the head's weight takes."""
        s, b = self.sizes, self.settings.itemsize
        several = self.settings.loss == "trl" or self.tokens > CHUNK_TRAINED
        fixed = (4 * several + b) * s.head
        terms = [Term("sum of the head's gradient, and rounded", "(4 + b) x V x H", fixed=fixed)]
        if self.settings.loss == "trl":
            return [*terms, Term("hidden states and gradients", "3 H x b + 4 H", per_token=s.hidden * (3 * b + 4))]
        return [*terms, Term("result of the last layer and a gradient", "2 x H x b", per_token=2 * s.hidden * b)]

    def embedding_gradient(self) -> list[Term]:
        """Return what the gradient of the embedding takes, before it is added to the others."""
        s, b = self.sizes, self.settings.itemsize
        terms = [Term("gradient of the embedded tokens", "H x b", per_token=s.hidden * b)]
        if s.tied or self.settings.accumulation:
            terms.append(Term("gradient of the embedding", "V x H x b", fixed=s.head * b))
        return terms
