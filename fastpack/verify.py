"""``verify``: proof, on a user's own model, that sequences don't see each other and that nothing else has changed.

The oracle is the stock model on each sequence alone. Compared are logits, the gradient of every token's embedding and
the gradient of everything that trains, by the rule of :mod:`fastpack.exactness.rule`. How far two right results may be
apart is measured on the stock model itself (:mod:`fastpack.exactness.rounding`), and both are held to the same experts
(:mod:`fastpack.exactness.choices`), since a choice that flips with rounding says nothing.

In half precision the same tokens are run several times, each time with embeddings a few roundings away, and means are
compared: rounding, which is another each time, falls away from them, and an error, which is the same, stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.adapters import not_isolated
from fastpack.errors import ContaminationError, InconclusiveError, PatchError
from fastpack.exactness.choices import Choices, choosers_of, held, recorded
from fastpack.exactness.probe import Distance, Pass, Probe
from fastpack.exactness.rounding import LIKE_ONE, NEARLY_ALL, Nudge, attending_by, coarsest_dtype, other_attention_of
from fastpack.exactness.rule import CONTROL, bound_of, is_half
from fastpack.families import family_of
from fastpack.layers.arguments import accepted
from fastpack.patching import PatchState, asleep, is_patched, uncovered
from fastpack.targets import find_parts, models_of, refuse_wrapped
from fastpack.verification import Check, Verification

LENGTHS = (13, 1, 20, 8, 17)
DRAWS, REPEATS = 3, 4
"""In half precision: of so many draws of tokens, how often each is run."""
SPREAD = 8
"""By how many roundings embeddings differ from run to run: by one alone, much would be rounded as before."""

_VERIFY_FIRST = (
    "verify runs a plain patched model, in this process alone: call it before the model is wrapped (of a trainer, "
    "before train()), or on the one that DistributedDataParallel holds, fastpack.verify(model.module)."
)


def verify(target: Any, *, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Verification:
    """Check a patched model against itself unpatched, on random tokens.

    Packed, and padded on the right, each sequence must give what it gives alone: logits, and the gradients of its
    tokens' embeddings and of all that trains. Where the tokens of one sequence are others, no other sequence may move;
    and taken for one long sequence the same tokens must give something else, or the check could not have seen a leak.
    Takes some thirty forwards and backwards of so many tokens, 160 in half precision, and memory for the
    gradients of all that trains. The model is in evaluation mode meanwhile, and without what others have put over its
    forwards (TRL's loss, accelerate's autocast); it is left as it was found.

    Args:
        target: a patched model, or a trainer that holds one.
        lengths: tokens of each sequence, three or more of them.
        seed: of the tokens.

    Returns:
        Every figure with its bound: 1.5 times what two right results of the stock model are apart in its dtypes, and
        in float32 1e-5 of the largest value of a tensor where that is more.

    Raises:
        ContaminationError: a check failed. It holds the :class:`~fastpack.verification.Verification`.
        InconclusiveError: rounding moves this model by so much in its dtypes that a leak would not be seen.
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
    family = family_of(parts.backbone)
    names = () if family is None else family.routers
    with torch.inference_mode(False), _evaluating(model), uncovered(model) as state:
        probes = [Probe.of(model, parts.backbone, lengths, seed=DRAWS * seed + draw) for draw in range(DRAWS)]
        runs = _Runs(probes, parts.head or model, state, choosers_of(model, names))
        dtype, checks = runs.compare()
    device = str(next(model.parameters()).device)
    result = Verification(type(model).__name__, str(dtype).removeprefix("torch."), device, tuple(checks))
    if result.verdict == "not exact":
        raise ContaminationError(result, "; ".join(not_isolated(parts.backbone)) or None)
    if result.verdict == "can't tell":
        raise InconclusiveError(result)
    return result


Passes = dict[str, Pass]


@dataclass(frozen=True, eq=False)
class _Runs:
    """The passes of one verification.

    Attributes:
        probes: one a draw of tokens.
        head: what the stock model is called as.
        choosers: the modules that choose experts.
    """

    probes: Sequence[Probe]
    head: Any
    state: PatchState
    choosers: Sequence[nn.Module]

    def compare(self) -> tuple[torch.dtype, list[Check]]:
        """Run everything; return the dtype that sets the bounds, and the checks."""
        dtype, mixed = self._precision()
        half = is_half(dtype)
        other = self._other_attention(dtype)
        draws = self.probes if half else self.probes[:1]
        means = [self._mean(probe, dtype, other, mixed=mixed) for probe in draws]
        passes = {name: [mean[name] for mean in means] for name in means[0]}
        apart = {name: Distance.between(each, passes["alone"], half=half) for name, each in passes.items()}
        own = [distance for name, distance in apart.items() if name not in ("alone", "packed", "padded")]
        kinds = [kind for kind in NAMES if kind != "weights" or self.probes[0].trained]
        bounds = {kind: bound_of(max(getattr(each, kind) for each in own), dtype) for kind in kinds}
        apart |= self._moved_and_control(half=half)
        moved = {kind: bound_of(getattr(apart["again"], kind), dtype) for kind in bounds}
        if self.choosers:  # experts get other tokens beside the same ones, and may round otherwise
            moved = bounds
        return dtype, list(_checks(apart, bounds, moved))

    def _precision(self) -> tuple[torch.dtype, bool]:
        """Return the least precise dtype computed in, and whether the stream of hidden states is a finer one."""
        probe = self.probes[0]
        with asleep(self.state):
            self._stock(probe, probe.sequences()[0], 0, None)
        (stream,) = probe.stream
        autocast = next(iter(probe.casts), None)
        dtype = coarsest_dtype(probe.model, stream, autocast)
        return dtype, dtype not in (stream, autocast)

    def _other_attention(self, dtype: torch.dtype) -> str | None:
        """Return the stock model's other attention, where that computes the same: sdpa drops softcaps, for one."""
        probe = self.probes[0]
        other = other_attention_of(probe.model)
        if other is None:
            return None
        alone, choices = self._alone(probe, None)
        with asleep(self.state), held(self.choosers, choices):
            rounded = self._one_by_one(probe, Nudge(0, dtype, share=NEARLY_ALL))
        with asleep(self.state), attending_by(probe.model, other), held(self.choosers, choices):
            found = self._one_by_one(probe, None)
        by_other, by_rounding = (Distance.between([each], [alone], half=True).logits for each in (found, rounded))
        return other if by_other <= CONTROL * by_rounding else None

    def _mean(self, probe: Probe, dtype: torch.dtype, other: str | None, *, mixed: bool) -> Passes:
        """Return each kind of pass over one draw, the mean of several in half precision."""
        half = is_half(dtype)
        every: list[Passes] = []
        for repeat in range(REPEATS if half else 1):
            near = Nudge(repeat, dtype, spread=SPREAD) if half else None
            alone, choices = self._alone(probe, near)
            passes = {"alone": alone}
            with asleep(self.state):
                if other is not None:
                    nudge = replace(near, share=LIKE_ONE) if near else None
                    with attending_by(probe.model, other), held(self.choosers, choices):
                        passes[other] = self._one_by_one(probe, nudge)
                if other is None or mixed or not half:
                    nudge = replace(near or Nudge(repeat, dtype), share=NEARLY_ALL)
                    with held(self.choosers, choices):
                        passes["a rounding off"] = self._one_by_one(probe, nudge)
            for name, batch in (("packed", _packed), ("padded", _padded)):
                with held(self.choosers, choices):
                    passes[name] = probe.run(batch(probe.sequences()), nudge=near)
            every.append(passes)
        return {name: Pass.mean([passes[name] for passes in every]) for name in every[0]}

    def _moved_and_control(self, *, half: bool) -> dict[str, Distance]:
        """Return how far others move with the tokens of one sequence, how far with nothing at all, and how far all do
        that are taken for one."""
        probe, which = self.probes[0], len(self.probes[0].lengths) // 2
        ids, at = list(probe.places(probe.sequences()))[which]
        alone, choices = self._alone(probe, None)
        with held(self.choosers, choices):
            packed = probe.run(_packed(probe.sequences()))
        with held(self.choosers, choices):
            again = probe.run(_packed(probe.sequences()))
        with held(self.choosers, choices):
            moved = probe.run(_packed(probe.sequences(other=which)))
        control = probe.run(_packed([torch.cat(probe.sequences())]))
        rest = slice(at, at + len(ids))
        return {
            "again": Distance.between([again], [packed], half=half),
            "moved": Distance.between([moved.without(rest)], [packed.without(rest)], half=half),
            "control": Distance.between([control], [alone], half=half),
        }

    def _alone(self, probe: Probe, nudge: Nudge | None) -> tuple[Pass, Choices]:
        """Return what the stock model gives for each sequence alone, and chooses."""
        with asleep(self.state), recorded(self.choosers) as choices:
            found = self._one_by_one(probe, nudge)
        return found, choices()

    def _one_by_one(self, probe: Probe, nudge: Nudge | None) -> Pass:
        return Pass.joined([self._stock(probe, ids, at, nudge) for ids, at in probe.places(probe.sequences())])

    def _stock(self, probe: Probe, ids: Tensor, at: int, nudge: Nudge | None) -> Pass:
        batch = {"input_ids": ids[None], **accepted(type(self.head).forward, {"use_cache": False})}
        return probe.run(batch, at, nudge)


def _packed(sequences: Sequence[Tensor]) -> dict[str, Any]:
    return {"input_ids": torch.cat(list(sequences))[None], "packed_seq_lens": [len(ids) for ids in sequences]}


def _padded(sequences: Sequence[Tensor]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    ones = [torch.ones_like(sequence) for sequence in sequences]
    return {"input_ids": ids, "attention_mask": torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)}


NAMES = {"logits": "logits", "embeddings": "gradients of embeddings", "weights": "gradients of what trains"}


def _checks(found: dict[str, Distance], bounds: dict[str, float], moved: dict[str, float]) -> Iterator[Check]:
    """Yield every comparison, of the kinds that there are bounds for, and the controls; ``moved`` are those of what
    another sequence may do."""
    for what in ("packed", "padded"):
        for kind, bound in bounds.items():
            yield Check(f"{what}, as each sequence alone: {NAMES[kind]}", getattr(found[what], kind), bound)
    for kind in ("logits", "embeddings"):
        error = getattr(found["moved"], kind)
        yield Check(f"another sequence changed: {NAMES[kind]} of the rest", error, moved[kind])
    for kind, bound in bounds.items():
        error = getattr(found["control"], kind)
        yield Check(f"control, taken for one sequence: {NAMES[kind]}", error, CONTROL * bound, at_least=True)


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
