"""The passes of ``verify``: each sequence alone through the stock model, and all of them through a patched model.

In half precision the same tokens run several times, each time with embeddings that are a few roundings away, and means
are compared. Rounding differs from run to run and averages out; an error is the same in each run, and stays.

How far two correct results may differ is measured on the stock model, by computing its results in a second way. In
half precision the second way uses transformers' other attention (sdpa or eager) and inputs that are one rounding off,
since fused kernels round at other places, too. A third way changes the inputs alone, nearly all of them by one
rounding. It is used in three cases: in full precision; if there is no other attention, or the other attention computes
another function; and if a model rounds more coarsely inside than its hidden states do (4-bit weights that compute in
bfloat16, with float32 hidden states).

Neither way changes how a recurrence rounds. In full precision the stock model also runs with padding on the left, where
its chunks begin at other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.exactness.expert_choices import Choices, recorded, replayed
from fastpack.exactness.inputs import behind_padding, packed, rows_of, single, taken_for_one
from fastpack.exactness.probe import Nudge, Probe, joined, mean, without
from fastpack.exactness.rule import CONTROL, Error, Result, bound_of, compare, compare_draws, is_half
from fastpack.exactness.verification import Check, Verification

DRAWS, REPEATS = 3, 4
"""In half precision: the number of draws of tokens, and the number of runs of each."""
SPREAD = 8
"""The number of roundings by which embeddings differ between runs. With one, many values would round as before."""

LIKE_ONE, NEARLY_ALL = 1 / 12, 2 / 3
"""Shares of elements to move by one rounding. Moving a twelfth adds the variance of one rounding error (1/12); moving
two thirds adds about three times the standard deviation of one."""
SHIFT = 13
"""The number of slots of padding on the left of each sequence."""
BEHIND = "behind padding"
TELLS_NOTHING = 1e-3
"""If the stock model is off by more behind padding, it computes something else there, and that says nothing."""
KINDS = {"logits": "logits", "embeddings": "gradients of embeddings", "grads": "gradients of trained weights"}
"""The names of the tensors that are compared."""


@dataclass(frozen=True, eq=False)
class Runs:
    """The passes of one verification.

    Attributes:
        probes: One probe for each draw of tokens.
        head: The module that is called: the head, or the model.
        stock: Makes a context in which the model is the stock model.
        choosers: The modules that choose experts.
        recurrent: Whether the model has recurrences, and so computes the same behind padding on the left.
    """

    probes: Sequence[Probe]
    head: nn.Module
    stock: Callable[[], AbstractContextManager[Any]]
    choosers: Sequence[nn.Module]
    recurrent: bool = False

    def compare(self) -> Verification:
        """Run all passes, and return every comparison with its bound."""
        alone = self._alone(self.probes[0], None)
        dtype, mixed = self._precision()
        half = is_half(dtype)
        other = self._other_attention(dtype, *alone)
        draws = self.probes if half else self.probes[:1]
        means = [self._mean(probe, dtype, other, mixed=mixed) for probe in draws]
        true = [mean["alone"] for mean in means]
        errors = {name: compare_draws([mean[name] for mean in means], true, half=half) for name in means[0]}
        own = [error for name, error in errors.items() if name not in ("alone", *BATCHES)]
        if BEHIND in errors and errors[BEHIND].worst > TELLS_NOTHING:
            own.remove(errors[BEHIND])
        kinds = [kind for kind in KINDS if true[0].by_kind()[kind]]
        bounds = {kind: self._bound(max(getattr(error, kind) for error in own), dtype) for kind in kinds}
        again, moved, control = self._moved_and_control(*alone, half=half)
        # an expert's batch then holds other tokens beside the unchanged ones, which may round differently
        still = bounds if self.choosers else {kind: self._bound(getattr(again, kind), dtype) for kind in kinds}
        checks = [
            Check(f"{name}, as each sequence alone: {KINDS[kind]}", getattr(errors[name], kind), bound)
            for name in BATCHES
            for kind, bound in bounds.items()
        ]
        for kind in ("logits", "embeddings"):
            what = f"another sequence changed: {KINDS[kind]} of the rest"
            checks.append(Check(what, getattr(moved, kind), still[kind]))
        for kind, bound in bounds.items():
            what = f"control, taken for one sequence: {KINDS[kind]}"
            checks.append(Check(what, getattr(control, kind), CONTROL * bound, at_least=True))
        return Verification.of(self.probes[0].model, dtype, checks)

    def _bound(self, own: float, dtype: torch.dtype) -> float:
        return bound_of(own, dtype, recurrent=self.recurrent)

    def _precision(self) -> tuple[torch.dtype, bool]:
        """Return the least precise dtype of the passes so far, and whether the hidden states have a finer dtype."""
        probe = self.probes[0]
        (stream,) = probe.stream
        autocast = next(iter(probe.casts), None)
        dtype = coarsest_dtype(probe.model, stream, autocast)
        return dtype, dtype not in (stream, autocast)

    def _other_attention(self, dtype: torch.dtype, alone: Result, choices: Choices) -> str | None:
        """Return the stock model's other attention, or None if it computes something else: sdpa drops softcaps."""
        probe = self.probes[0]
        other = other_attention_of(probe.model)
        if other is None:
            return None
        with replayed(self.choosers, choices):
            rounded = self._stock(probe, Nudge(0, dtype, share=NEARLY_ALL))
            attended = self._stock(probe, None, other)
        by_other, by_rounding = (compare(each, alone, half=True).logits for each in (attended, rounded))
        return other if by_other <= CONTROL * by_rounding else None

    def _mean(self, probe: Probe, dtype: torch.dtype, other: str | None, *, mixed: bool) -> dict[str, Result]:
        """Return each kind of pass over one draw of tokens; in half precision, the mean of several passes of a kind."""
        half = is_half(dtype)
        every: list[dict[str, Result]] = []
        for repeat in range(REPEATS if half else 1):
            near = Nudge(repeat, dtype, spread=SPREAD if half else 0)
            alone, choices = self._alone(probe, near)
            passes = {"alone": alone}
            with replayed(self.choosers, choices):
                if other is not None:
                    passes[other] = self._stock(probe, replace(near, share=LIKE_ONE if half else 0.0), other)
                if other is None or mixed or not half:
                    passes["a rounding off"] = self._stock(probe, replace(near, share=NEARLY_ALL))
                if self.recurrent and not half and not self.choosers:  # padding chooses experts, too
                    passes[BEHIND] = self._stock(probe, near, shift=SHIFT)
                for name, batch in BATCHES.items():
                    passes[name] = probe.run(batch(probe.sequences()), nudge=near)
            every.append(passes)
        return {name: mean([passes[name] for passes in every]) for name in every[0]}

    def _moved_and_control(self, alone: Result, choices: Choices, *, half: bool) -> tuple[Error, Error, Error]:
        """Return the errors of three passes.

        The first repeats a packed pass without any change. The second replaces the tokens of one sequence, and compares
        the other tokens. The third treats all sequences as one.
        """
        probe, which = self.probes[0], len(self.probes[0].lengths) // 2
        ids, at = probe.places()[which]
        rest = slice(at, at + len(ids))
        with replayed(self.choosers, choices):
            first, again = (probe.run(packed(probe.sequences())) for _ in range(2))
            moved = probe.run(packed(probe.sequences(other=which)))
        control = probe.run(taken_for_one(probe.sequences()))
        return (
            compare(again, first, half=half),
            compare(without(moved, rest), without(first, rest), half=half),
            compare(control, alone, half=half),
        )

    def _alone(self, probe: Probe, nudge: Nudge | None) -> tuple[Result, Choices]:
        """Return the stock model's results for each sequence alone, and its choices of experts."""
        with recorded(self.choosers) as choices:
            result = self._stock(probe, nudge)
        return result, choices()

    def _stock(self, probe: Probe, nudge: Nudge | None, attention: str | None = None, shift: int = 0) -> Result:
        """Return the stock model's results for each sequence alone, by its own attention or another, behind padding."""
        with self.stock(), attending_by(probe.model, attention):
            batches = [(single(self.head, ids) | behind_padding(ids, shift), at) for ids, at in probe.places()]
            return joined([probe.run(batch, at, nudge) for batch, at in batches])


BATCHES: Mapping[str, Callable[[Sequence[Tensor]], dict[str, Any]]] = {"packed": packed, "padded": rows_of}


def other_attention_of(model: nn.Module) -> str | None:
    """Return the other attention implementation of a model, beside its current one, or None."""
    current = {config._attn_implementation for config in _configs(model)}
    if not current or None in current:
        return None
    if current != {"eager"}:
        return "eager"
    models = [module for module in model.modules() if hasattr(module, "_supports_sdpa")]
    return "sdpa" if models and all(module._supports_sdpa for module in models) else None


@contextmanager
def attending_by(model: nn.Module, implementation: str | None) -> Iterator[None]:
    """Make a stock model use this attention implementation, if any, inside a ``with`` block."""
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        for config, own in before:
            config._attn_implementation_internal = implementation or own
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def _configs(model: nn.Module) -> list[Any]:
    """Return each config from which modules read their attention implementation, once."""
    configs = (module.__dict__.get("config") for module in model.modules())
    return list({id(c): c for c in configs if hasattr(c, "_attn_implementation_internal")}.values())


def coarsest_dtype(model: nn.Module, stream: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    """Return the least precise dtype in which a model computes, as far as its modules show it.

    Args:
        model: The model.
        stream: The dtype of its embeddings.
        autocast: The dtype of the autocast that it runs under, or None.
    """
    used = {stream, autocast}
    for module in model.modules():
        used |= {weight.dtype for weight in module._parameters.values() if weight is not None}
        used.add(getattr(module, "compute_dtype", None))
        if _is_quantised(module):
            used.add(torch.bfloat16)
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in used), stream)


def _is_quantised(module: nn.Module) -> bool:
    """Return whether a module is a projection whose weight is not a plain floating-point tensor."""
    if not (hasattr(module, "in_features") and hasattr(module, "out_features")):
        return False
    weight = getattr(module, "weight", None)
    return (
        not isinstance(weight, Tensor) or not weight.is_floating_point() or type(weight) not in (Tensor, nn.Parameter)
    )
