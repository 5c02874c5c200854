"""Running a user's model on tokens of which every one is different, and joining the results of several passes.

Nothing is left on the model: gradients are taken, not accumulated, and what trains is compared by sketches of them.

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
from fastpack.exactness.inputs import unpadded
from fastpack.exactness.rule import Result
from fastpack.utils.protocols import ConfigLike, ModelLike

SKETCH = 1 << 16
"""A weight's gradient of more elements is kept as so many sums of its elements under random signs: norms of it, and of
differences, stay what they are to within a percent."""


ENTERING = 4096
"""The number of logits of each token that are summed: a head's own sums over a large vocabulary round by more than
1e-5."""


def mean(passes: Sequence[Result]) -> Result:
    """Return the mean of passes over the same tokens."""
    found: Result = tree_map(lambda *tensors: torch.stack(tensors).mean(0), *passes)
    return found


def joined(passes: Sequence[Result]) -> Result:
    """Return one pass over the tokens of several, one behind the other: losses and gradients of weights add up."""
    return Result(
        [torch.cat([found.logits[0] for found in passes])],
        torch.stack([found.loss for found in passes]).sum(),
        {name: torch.stack([found.grads[name] for found in passes]).sum(0) for name in passes[0].grads},
        torch.cat([found.embeddings for found in passes if found.embeddings is not None]),
    )


def without(found: Result, tokens: slice) -> Result:
    """Return what a pass gave for all other tokens. Gradients of weights are of all, and left out."""
    rows = [found.logits[0], found.embeddings]
    logits, embeddings = (torch.cat([each[: tokens.start], each[tokens.stop :]]) for each in rows if each is not None)
    return Result([logits], found.loss, {}, embeddings)


@dataclass(frozen=True, eq=False)
class Probe:
    """Runs a model on some tokens, every one of them different, so that each can be told by its id.

    Attributes:
        ids: those that are run, one sequence behind the other, and behind them those that take the place of one.
        place: ``[vocabulary]``: where among these each id stands, -1 for the others.
        trained: names and weights of all that gets a gradient.
        stream: dtypes of the embeddings that were seen; casts: those of autocasts that a pass ran under.
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
        """Choose the tokens.

        Raises:
            PatchError: the model embeds ids in several tables, or has too few of them.
        """
        embedding = backbone.get_input_embeddings()
        weight = getattr(embedding, "weight", None)
        if not isinstance(weight, Tensor):
            raise PatchError(
                f"verify tells tokens by their ids in one embedding; this model has a {type(embedding).__name__} of "
                "them."
            )
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(weight.shape[0], generator=generator)
        plain = order[(order > 2) & ~torch.isin(order, torch.tensor(_special_tokens(backbone.config)))]
        count = sum(lengths) + max(lengths)
        if len(plain) < count:
            raise PatchError(
                f"verify needs {count} different tokens, this vocabulary has {len(plain)}: pass shorter lengths."
            )
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        ids = plain[:count].to(weight.device)
        place = torch.full((len(weight),), -1, device=ids.device)
        place[ids] = torch.arange(count, device=ids.device)
        return cls(model, embedding, tuple(lengths), ids, place, seed, trained)

    def sequences(self, other: int | None = None) -> list[Tensor]:
        """Return the ids of each sequence; those of the ``other``-th are others."""
        found = list(self.ids[: sum(self.lengths)].split(self.lengths))
        if other is not None:
            found[other] = self.ids[sum(self.lengths) :][: self.lengths[other]]
        return found

    def places(self) -> list[tuple[Tensor, int]]:
        """Return the ids of each sequence, and how many tokens come before it."""
        return list(zip(self.sequences(), accumulate(self.lengths, initial=0), strict=False))

    def run(self, batch: dict[str, Any], at: int = 0, nudge: Nudge | None = None) -> Result:
        """Run forward and backward of a fixed sum of the logits.

        Args:
            batch: ``input_ids``, with a mask where there is padding.
            at: how many tokens come before these.
            nudge: by which each token's embedding is moved, the same wherever it stands, and each gradient of a logit.
        """
        seen: list[tuple[Tensor, Tensor]] = []

        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            device = output.device.type
            if torch.is_autocast_enabled(device) and output.dtype == torch.float32:
                self.casts.add(torch.get_autocast_dtype(device))
            self.stream.add(output.dtype)
            leaf = output if output.requires_grad else output.detach().requires_grad_()
            ids = args[0] if args else kwargs["input"]
            seen.append((ids, leaf))
            return leaf.clone() if nudge is None else self._moved(leaf, ids, nudge)  # which a model may scale in place

        handle = self.embedding.register_forward_hook(watch, with_kwargs=True)
        with handle, torch.enable_grad():
            logits = self.model(**batch).logits
            real = unpadded(logits.flatten(0, -2), batch)
            first = real[:, :ENTERING].float()
            entering = self._entering(nudge)[at : at + len(real), : first.shape[1]]
            total = (first * entering.to(real.device)).sum()
        wanted = [*self.trained.values(), *(out for _, out in seen)]
        gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        of_weights = zip(self.trained.items(), gradients, strict=False)
        sketches = {name: self._sketch(weight, gradient) for (name, weight), gradient in of_weights}
        tokens = self._by_token(batch, seen, gradients[len(self.trained) :])
        return Result([real.detach().float()], total.detach(), sketches, tokens)

    def _entering(self, nudge: Nudge | None) -> Tensor:
        """Return the gradients of the first logits of each token, the same for each pass of a nudge."""
        shape = (len(self.ids), ENTERING)
        found = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed + 1))
        return found if nudge is None else moved_by(found, nudge.steps(shape), nudge.dtype)

    def _moved(self, embedded: Tensor, ids: Tensor, nudge: Nudge) -> Tensor:
        table = nudge.steps((len(self.ids) + 1, embedded.shape[-1]))
        table[-1] = 0  # of padding, whose place is -1
        return moved_by(embedded, table[self.place[ids].cpu()], nudge.dtype)

    def _sketch(self, weight: Tensor, gradient: Tensor | None) -> Tensor:
        """Return a gradient flat in float32, or sums of its elements under signs that are the same in each pass."""
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
        self, batch: dict[str, Any], seen: list[tuple[Tensor, Tensor]], gradients: Sequence[Tensor | None]
    ) -> Tensor:
        """Return the gradients of the tokens' embeddings, in order, whatever rows they were embedded in."""
        ids = unpadded(batch["input_ids"].flatten(), batch)
        width = seen[0][1].shape[-1]
        total = torch.zeros(len(self.ids), width, device=ids.device)
        for (embedded, _), gradient in zip(seen, gradients, strict=True):
            if gradient is not None:
                at = self.place[embedded.flatten()]
                if bool((at < 0).any()):
                    raise PatchError(
                        "verify tells tokens by their ids, and this model embeds others beside the batch's (prompts of "
                        "its own)."
                    )
                total.index_add_(0, at, gradient.float().reshape(-1, width))
        return total[self.place[ids]]


def _special_tokens(config: ConfigLike) -> list[int]:
    """Return ids of padding, ends of texts (a list of them in Llama 3), images and the like."""
    named = [value for name, value in vars(config).items() if name.endswith("_token_id")]
    flat = [i for value in named for i in (value if isinstance(value, list | tuple) else [value])]
    return [i for i in flat if isinstance(i, int)]


@dataclass(frozen=True)
class Nudge:
    """By how many roundings each element of some values is moved.

    Attributes:
        seed: of the numbers, which are the same for each pass that is compared with another.
        dtype: whose roundings.
        spread: up to so many, either way: far enough that everything computed from the values is rounded anew.
        share: of the elements that are moved by one more, either way.
    """

    seed: int
    dtype: torch.dtype
    spread: int = 0
    share: float = 0.0

    def steps(self, shape: tuple[int, ...]) -> Tensor:
        """Return by how many roundings each is moved, float32."""
        generator = torch.Generator().manual_seed(self.seed)
        found = torch.randint(-self.spread, self.spread + 1, shape, generator=generator).float()
        chosen = torch.rand(shape, generator=generator)
        return found + (chosen < self.share / 2).float() - (chosen > 1 - self.share / 2).float()


def moved_by(values: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values, each off by so many roundings of a dtype; gradients pass through."""
    step = 0.75 * torch.finfo(dtype).eps * values.detach().abs().float()  # reaches the neighbour from anywhere
    return values + (steps.to(values.device) * step).to(values.dtype)
