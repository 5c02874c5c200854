"""``verify``: proof, on a user's own model, that sequences don't see each other and that nothing else has changed.

The oracle is the stock model on each sequence alone. Compared are logits, and the gradient of every token's embedding,
in which whatever happens in the backward pass of any layer shows. Weights are only read, and get no gradient.

An error is that of the worst sequence, ``|ours - alone| / |alone|`` over all its values: another sequence that is seen
moves all of them, while rounding, or an expert that is chosen otherwise for one token, hardly shows.

Shape suffixes: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.adapters import LLM_INT8, count_projections
from fastpack.errors import ContaminationError, PatchError
from fastpack.layers.arguments import accepted
from fastpack.patching import asleep, is_patched, uncovered
from fastpack.targets import find_parts, models_of, refuse_wrapped
from fastpack.verification import Check, Verification

LENGTHS = (13, 1, 20, 8, 17)
BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-4}
HALF_BOUND = 5e-2
CONTROL = 0.1
"""How far off the control must be: it sees everything that comes before."""


_VERIFY_FIRST = (
    "verify runs a plain patched model, in this process alone: call it before the model is wrapped (of a trainer, "
    "before train()), or on the one that DistributedDataParallel holds, fastpack.verify(model.module)."
)


def verify(target: Any, *, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Verification:
    """Check a patched model against itself unpatched, on random tokens.

    Packed, and padded on the right, each sequence must give what it gives alone, logits and gradients; where the tokens
    of one sequence are others, no other sequence may move; and taken for one long sequence the same tokens must give
    something else, or the check could not have seen a leak. Takes a few forwards and backwards of so many tokens. The
    model is in evaluation mode meanwhile, and without what others have put over its forwards (TRL's loss, accelerate's
    autocast); it is left as it was found.

    Args:
        target: a patched model, or a trainer that holds one.
        lengths: tokens of each sequence, three or more of them.
        seed: of the tokens.

    Returns:
        Every figure, with a bound of 1e-4 in float32 and 5e-2 in half precision, or under an autocast to it.

    Raises:
        ContaminationError: a check failed. It holds the :class:`~fastpack.verification.Verification`.
        ValueError: fewer than three sequences, or one without a token.
        PatchError: the model is not patched, classifies whole sequences, has too small a vocabulary for so many
            different tokens, embeds them in several tables, or others beside them.
    """
    if len(lengths) < 3 or min(lengths) < 1:
        raise ValueError(f"lengths={tuple(lengths)}: verify takes three sequences or more, each of a token or more.")
    model = models_of(target)[0]
    refuse_wrapped(model, _VERIFY_FIRST)
    parts = find_parts(model)
    if type(parts.head).__name__.endswith("ForSequenceClassification"):
        raise PatchError(
            f"verify compares the logits of every token, and {type(parts.head).__name__} gives one result a row. "
            "Verify the causal LM of the same family."
        )
    if not is_patched(model):
        raise PatchError("verify compares a patched model with itself unpatched: call fastpack.patch(model) first.")
    with torch.inference_mode(False), _evaluating(model), uncovered(model) as state:
        probe = _Probe.of(model, parts.backbone, lengths, seed)
        sequences = probe.sequences()
        packed = probe.run(_packed(sequences))
        padded = probe.run(_padded(sequences))
        moved = probe.run(_packed(probe.sequences(other=len(lengths) // 2)))
        control = probe.run(_packed([torch.cat(sequences)]))
        with asleep(state):
            alone = [probe.run(_alone(parts.head or model, ids), at) for ids, at in probe.places(sequences)]
    found = _checks(probe, packed, padded, moved, control, _joined(alone))
    device = str(next(model.parameters()).device)
    result = Verification(type(model).__name__, str(probe.computed).removeprefix("torch."), device, tuple(found))
    if not result.passed:
        in_8_bit = any("8-bit" in kind for kind in count_projections(parts.backbone))
        raise ContaminationError(result, LLM_INT8 if in_8_bit else None)
    return result


@dataclass(frozen=True, eq=False)
class _Found:
    """``logits`` [T, V] and ``grads`` [T, H], float32, of the tokens in order."""

    logits: Tensor
    grads: Tensor


@dataclass(frozen=True, eq=False)
class _Probe:
    """Runs a model on some tokens, every one of them different, so that each can be told by its id.

    Attributes:
        ids: ``[2 T]``: the first half is run, the second takes its place where tokens are to be others.
        cast: the dtypes of autocasts that the model was found in.
    """

    model: nn.Module
    embedding: nn.Module
    lengths: tuple[int, ...]
    ids: Tensor
    vocabulary: int
    seed: int
    dtype: torch.dtype
    cast: set[torch.dtype] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, backbone: Any, lengths: Sequence[int], seed: int) -> _Probe:
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
        half = weight.dtype in (torch.float16, torch.bfloat16)
        dtype = weight.dtype if half or weight.dtype == torch.float64 else backbone.dtype
        ids = plain[:count].to(weight.device)
        return cls(model, embedding, tuple(lengths), ids, int(weight.shape[0]), seed, dtype)

    @property
    def bound(self) -> float:
        """What the precision allows in which it computes."""
        return BOUNDS.get(self.computed, HALF_BOUND)

    @property
    def computed(self) -> torch.dtype:
        """The model's dtype, or that of the autocast which it was found in."""
        return next(iter(self.cast), self.dtype)

    def sequences(self, other: int | None = None) -> list[Tensor]:
        """The ids of each sequence; those of the ``other``-th are others."""
        found = list(self.ids[: sum(self.lengths)].split(self.lengths))
        if other is not None:
            found[other] = self.ids[sum(self.lengths) :][: self.lengths[other]]
        return found

    def places(self, sequences: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
        """Each with the number of tokens before it."""
        at = 0
        for ids in sequences:
            yield ids, at
            at += len(ids)

    def run(self, batch: dict[str, Any], at: int = 0) -> _Found:
        """Forward and backward of a fixed sum of the logits; ``at`` tokens come before these."""
        seen: list[tuple[Tensor, Tensor]] = []

        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            device = output.device.type
            if torch.is_autocast_enabled(device) and self.dtype == torch.float32:
                self.cast.add(torch.get_autocast_dtype(device))
            leaf = output if output.requires_grad else output.detach().requires_grad_()
            seen.append((args[0] if args else kwargs["input"], leaf))
            return leaf if leaf is output else leaf.clone()  # which the model may scale in place

        handle = self.embedding.register_forward_hook(watch, with_kwargs=True)
        try:
            with torch.enable_grad():
                logits = self.model(**batch).logits
        finally:
            handle.remove()
        mask = batch.get("attention_mask")
        with torch.enable_grad():
            real = logits.flatten(0, -2) if mask is None else logits.flatten(0, -2)[mask.flatten() != 0]
            weights = torch.randn(at + len(real), 64, generator=torch.Generator().manual_seed(self.seed + 1))[at:]
            spread = weights.to(real.device).repeat(1, -(-real.shape[-1] // 64))[:, : real.shape[-1]]
            total = (real.float() * spread).sum()
        gradients = torch.autograd.grad(total, [out for _, out in seen], allow_unused=True)
        return _Found(real.detach().float(), self._by_token(batch, seen, gradients))

    def _by_token(
        self, batch: dict[str, Any], seen: list[tuple[Tensor, Tensor]], gradients: Sequence[Tensor | None]
    ) -> Tensor:
        """The gradients of the tokens' embeddings, in order, whatever rows they were embedded in."""
        ids, mask = batch["input_ids"].flatten(), batch.get("attention_mask")
        ids = ids if mask is None else ids[mask.flatten() != 0]
        place = torch.full((self.vocabulary,), -1, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        width = seen[0][1].shape[-1]
        total = torch.zeros(len(ids), width, device=ids.device)
        for (embedded, _), gradient in zip(seen, gradients, strict=True):
            if gradient is not None:
                at = place[embedded.flatten()]
                if bool((at < 0).any()):
                    raise PatchError(
                        "verify tells tokens by their ids, and this model embeds others beside the batch's (prompts of "
                        "its own)."
                    )
                total.index_add_(0, at, gradient.float().reshape(-1, width))
        return total


def _special_tokens(config: Any) -> list[int]:
    """Ids of padding, ends of texts (a list of them in Llama 3), images and the like."""
    named = [value for name, value in vars(config).items() if name.endswith("_token_id")]
    flat = [i for value in named for i in (value if isinstance(value, list | tuple) else [value])]
    return [i for i in flat if isinstance(i, int)]


def _packed(sequences: Sequence[Tensor]) -> dict[str, Any]:
    return {"input_ids": torch.cat(list(sequences))[None], "packed_seq_lens": [len(ids) for ids in sequences]}


def _padded(sequences: Sequence[Tensor]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    ones = [torch.ones_like(sequence) for sequence in sequences]
    return {"input_ids": ids, "attention_mask": torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)}


def _alone(head: Any, ids: Tensor) -> dict[str, Any]:
    return {"input_ids": ids[None], **accepted(type(head).forward, {"use_cache": False})}


def _joined(found: Sequence[_Found]) -> _Found:
    return _Found(torch.cat([f.logits for f in found]), torch.cat([f.grads for f in found]))


def _checks(
    probe: _Probe, packed: _Found, padded: _Found, moved: _Found, control: _Found, alone: _Found
) -> Iterator[Check]:
    others = [i for i in range(len(probe.lengths)) if i != len(probe.lengths) // 2]
    for what, found in (("packed", packed), ("padded", padded)):
        for kind in ("logits", "grads"):
            error = _error(getattr(found, kind), getattr(alone, kind), probe.lengths)
            yield Check(f"{what}, as each sequence alone: {NAMES[kind]}", error, probe.bound)
    for kind in ("logits", "grads"):
        error = _error(getattr(moved, kind), getattr(packed, kind), probe.lengths, others)
        yield Check(f"another sequence has other tokens: {NAMES[kind]} of the rest", error, probe.bound)
    error = _error(control.logits, alone.logits, probe.lengths)
    yield Check("control: taken for one sequence, logits differ", error, CONTROL, at_least=True)


NAMES = {"logits": "logits", "grads": "gradients"}


def _error(found: Tensor, true: Tensor, lengths: Sequence[int], which: Sequence[int] | None = None) -> float:
    """Of the worst sequence, ``|found - true| / |true|``."""
    pairs = list(zip(found.split(tuple(lengths)), true.split(tuple(lengths)), strict=True))
    floor = 1e-3 * max(float(t.norm()) for _, t in pairs)
    errors = [float((f - t).norm()) / max(float(t.norm()), floor) for f, t in pairs]
    chosen = errors if which is None else [errors[i] for i in which]
    return max(chosen, key=lambda error: float("inf") if error != error else error)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; every module's mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
