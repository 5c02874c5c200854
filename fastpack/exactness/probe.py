"""Run a user's model on tokens that are all different, and join the results of several passes.

Nothing is left on the model: gradients are returned, not accumulated. Gradients of large weights become sketches.

Shape suffixes: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastpack.errors import PatchError
from fastpack.exactness.inputs import predicted, unpadded
from fastpack.exactness.rule import Result
from fastpack.utils.protocols import ConfigLike, ModelLike

SKETCH = 1 << 16
"""The number of elements of a sketch. A larger gradient is replaced by this many sums of its elements, with random
signs. These sums keep the gradient's norm, and norms of differences, to within a percent."""


ENTERING = 4096
"""The number of logits that are summed for each token. Over a larger vocabulary, the head's own sums would round by
more than 1e-5."""


def mean(passes: Sequence[Result]) -> Result:
    """Return the mean of several passes over the same tokens."""
    averaged: Result = tree_map(lambda *tensors: torch.stack(tensors).mean(0), *passes)
    return averaged


def joined(passes: Sequence[Result]) -> Result:
    """Return several passes as one pass over all of their tokens.

    Losses and gradients of weights add up.
    """
    return Result(
        [torch.cat([each.logits[0] for each in passes])],
        torch.stack([each.loss for each in passes]).sum(),
        {name: torch.stack([each.grads[name] for each in passes]).sum(0) for name in passes[0].grads},
        torch.cat([each.embeddings for each in passes if each.embeddings is not None]),
    )


def without(result: Result, tokens: slice) -> Result:
    """Return a pass's results without these tokens, and without weights' gradients, to which all tokens contribute."""
    rows = [result.logits[0], result.embeddings]
    logits, embeddings = (torch.cat([each[: tokens.start], each[tokens.stop :]]) for each in rows if each is not None)
    return Result([logits], result.loss, {}, embeddings)


@dataclass(frozen=True, eq=False)
class Probe:
    """A run of a model on tokens that are all different, so that an id identifies a token.

    Attributes:
        model: The model.
        embedding: Its token embedding, whose outputs a hook records.
        lengths: The number of tokens of each sequence.
        ids: The ids of all sequences, one sequence after another, and then the ids that can replace one sequence's.
        place: ``[vocabulary]``: the index of each id in ``ids``, or -1.
        seed: The seed of the tokens.
        trained: The weights that get a gradient, by name.
        stream: The dtypes of the embeddings in all passes so far.
        casts: The dtypes of the autocasts under which passes ran.
    """

    model: nn.Module
    embedding: Any
    lengths: tuple[int, ...]
    ids: Tensor
    place: Tensor
    seed: int
    trained: dict[str, nn.Parameter]
    stream: set[torch.dtype] = field(default_factory=set)
    casts: set[torch.dtype] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, backbone: ModelLike, lengths: Sequence[int], seed: int) -> Probe:
        """Choose the tokens and return a probe.

        Raises:
            PatchError: The model embeds ids in several tables, or its vocabulary is too small.
        """
        embedding = backbone.get_input_embeddings()
        weight = getattr(embedding, "weight", None)
        if not isinstance(weight, Tensor):
            raise PatchError(
                f"verify identifies tokens by their ids in one table, but this model uses {type(embedding).__name__}."
            )
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(weight.shape[0], generator=generator)
        special = _special_tokens(backbone.config) + _special_tokens(getattr(model, "config", backbone.config))
        plain = order[(order > 2) & ~torch.isin(order, torch.tensor(special))]
        count = sum(lengths) + max(lengths)
        if len(plain) < count:
            raise PatchError(
                f"verify needs {count} different tokens, but this vocabulary has {len(plain)}: pass shorter lengths."
            )
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        ids = plain[:count].to(weight.device)
        place = torch.full((len(weight),), -1, device=ids.device)
        place[ids] = torch.arange(count, device=ids.device)
        return cls(model, embedding, tuple(lengths), ids, place, seed, trained)

    def sequences(self, other: int | None = None) -> list[Tensor]:
        """Return the ids of each sequence; the sequence with index ``other`` gets other tokens."""
        ids = list(self.ids[: sum(self.lengths)].split(self.lengths))
        if other is not None:
            ids[other] = self.ids[sum(self.lengths) :][: self.lengths[other]]
        return ids

    def places(self) -> list[tuple[Tensor, int]]:
        """Return the ids of each sequence, with the number of tokens before it."""
        return list(zip(self.sequences(), accumulate(self.lengths, initial=0), strict=False))

    def run(self, batch: dict[str, Any], at: int = 0, nudge: Nudge | None = None) -> Result:
        """Run the model forwards, and backwards from a fixed sum of the logits.

        Args:
            batch: ``input_ids``, with a mask if there is padding.
            at: The number of the probe's tokens that come before this batch's.
            nudge: How far to move each token's embedding, and the gradient of each logit. A token's moves do not depend
                on its place in the batch. None moves nothing.
        """
        embedded: list[tuple[Tensor, Tensor]] = []

        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            device = output.device.type
            if torch.is_autocast_enabled(device) and output.dtype == torch.float32:
                self.casts.add(torch.get_autocast_dtype(device))
            self.stream.add(output.dtype)
            leaf = output if output.requires_grad else output.detach().requires_grad_()
            ids = args[0] if args else kwargs["input"]
            embedded.append((ids, leaf))
            return (
                leaf.clone() if nudge is None else self._moved(leaf, ids, nudge)
            )  # a copy, since a model may scale it in place

        handle = self.embedding.register_forward_hook(watch, with_kwargs=True)
        with handle, torch.enable_grad():
            logits = self.model(**batch).logits
            real = predicted(unpadded(logits.flatten(0, -2), batch))
            first = real[:, :ENTERING].float()
            entering = self._entering(nudge)[at : at + len(real), : first.shape[1]]
            total = (first * entering.to(real.device)).sum()
        differentiated = [*self.trained.values(), *(out for _, out in embedded)]
        gradients = torch.autograd.grad(total, differentiated, allow_unused=True)
        of_weights = zip(self.trained.items(), gradients, strict=False)
        sketches = {name: self._sketch(weight, gradient) for (name, weight), gradient in of_weights}
        tokens = self._by_token(batch, embedded, gradients[len(self.trained) :])
        return Result([real.detach().float()], total.detach(), sketches, tokens)

    def _entering(self, nudge: Nudge | None) -> Tensor:
        """Return the gradient of each token's first logits, the same for all passes with the same nudge."""
        shape = (len(self.ids), ENTERING)
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed + 1))
        return drawn if nudge is None else moved_by(drawn, nudge.steps(shape), nudge.dtype)

    def _moved(self, embeddings: Tensor, ids: Tensor, nudge: Nudge) -> Tensor:
        table = nudge.steps((len(self.ids) + 1, embeddings.shape[-1]))
        table[-1] = 0  # the row for padding, whose place is -1
        return moved_by(embeddings, table[self.place[ids].cpu()], nudge.dtype)

    def _sketch(self, weight: Tensor, gradient: Tensor | None) -> Tensor:
        """Return a flat float32 gradient, or its sketch. The signs of a sketch are the same in each pass."""
        size = weight.numel()
        if gradient is None:
            return torch.zeros(min(size, SKETCH), device=weight.device)
        flat = gradient.reshape(-1)
        if size <= SKETCH:
            return flat.float()
        generator = torch.Generator(flat.device).manual_seed(size)
        signs = torch.randint(0, 2, flat.shape, generator=generator, device=flat.device, dtype=torch.int8)
        signed = torch.where(signs.bool(), flat, -flat)
        return nn.functional.pad(signed, (0, -size % SKETCH)).view(-1, SKETCH).sum(0, dtype=torch.float32)

    def _by_token(
        self, batch: dict[str, Any], embedded: list[tuple[Tensor, Tensor]], gradients: Sequence[Tensor | None]
    ) -> Tensor:
        """Return the gradients of the tokens' embeddings in the tokens' order, whichever rows held them."""
        ids = unpadded(batch["input_ids"].flatten(), batch)
        width = embedded[0][1].shape[-1]
        total = torch.zeros(len(self.ids), width, device=ids.device)
        for (token_ids, _), gradient in zip(embedded, gradients, strict=True):
            if gradient is not None:
                slots, gradient = token_ids.flatten(), gradient.reshape(-1, width)
                if token_ids.shape == batch["input_ids"].shape:  # a composite embeds padding as well
                    slots, gradient = unpadded(slots, batch), unpadded(gradient, batch)
                at = self.place[slots]
                if bool((at < 0).any()):
                    raise PatchError(
                        "verify identifies tokens by their ids, but this model embeds ids that are not in the batch "
                        "(learnt prompts)."
                    )
                total.index_add_(0, at, gradient.float())
        return total[self.place[ids]]


def _special_tokens(config: ConfigLike) -> list[int]:
    """Return the ids of special tokens: padding, the end of a text (a list in Llama 3), images and the like."""
    named = [value for name, value in vars(config).items() if name.endswith(("_token_id", "_token_index"))]
    flat = [i for value in named for i in (value if isinstance(value, list | tuple) else [value])]
    return [i for i in flat if isinstance(i, int)]


@dataclass(frozen=True)
class Nudge:
    """A small random move of each element of a tensor, counted in roundings.

    Attributes:
        seed: The seed of the random numbers. All passes that are compared use the same seed.
        dtype: The dtype whose roundings count.
        spread: The largest number of roundings, in either direction. It must be large enough that everything computed
            from the values rounds differently.
        share: The share of the elements that move by one more rounding, in either direction.
    """

    seed: int
    dtype: torch.dtype
    spread: int = 0
    share: float = 0.0

    def steps(self, shape: tuple[int, ...]) -> Tensor:
        """Return the number of roundings by which each element is moved, float32."""
        generator = torch.Generator().manual_seed(self.seed)
        steps = torch.randint(-self.spread, self.spread + 1, shape, generator=generator).float()
        chosen = torch.rand(shape, generator=generator)
        return steps + (chosen < self.share / 2).float() - (chosen > 1 - self.share / 2).float()


def moved_by(values: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values, each moved by its number of roundings in a dtype; gradients pass through."""
    step = 0.75 * torch.finfo(dtype).eps * values.detach().abs().float()  # reaches the next number from any value
    return values + (steps.to(values.device) * step).to(values.dtype)
