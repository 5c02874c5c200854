"""One family, fed in every way that there is, against each sequence alone: logits, and the gradient of every parameter.

Models are in training mode, ``use_cache`` is at its default, and where the family has gradient checkpointing, it is
tried both ways. The loss is a fixed weighted sum of the logits, so that no head's own loss is taken for granted; some
have none.

The oracle is the stock model on each sequence alone, and the bounds are those of :mod:`fastpack.exactness.rule`: in
float32 against the model itself, of which a float64 copy tells how far off it is; in half precision against a float32
copy, over several draws of tokens, with experts held to those that the copy chooses. That says something only of a
model whose rounding stays small. One that is far from its own float32, or chooses in a way that its family's row does
not name, may be anywhere: it is proved in float32, on the same device and with the same heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import fastpack
from fastpack.exactness.choices import Choices, choosers_of, held, recorded
from fastpack.exactness.rule import Result, bound_of, compare, compare_norms, middle, verdict_of
from fastpack.families import FAMILIES
from fastpack.layers.arguments import accepted
from fastpack.exactness.inputs import INPUT_KINDS
from fastpack.smoke.setting import Setting
from fastpack.exactness.tiny import plain_tokens

LENGTHS = (7, 1, 12, 12, 20, 3)
"""A single token, two of a length, and one that outgrows windows and chunks of 8."""
DRAWS = 3
"""Of tokens, in half precision."""
STEADY = 0.1
"""What the stock model may be off by in half precision, if that is to prove anything."""
CHOOSES = ("expert", "router", "moe", "topk", "indexer")
"""In the names of modules that choose."""
LEAKS = 1e-2
"""How far off the control must be at least: it sees everything that comes before."""
CHECKPOINTED = "restarting positions"
SHARED_STATES = ("gemma3n_text", "gemma4_text")
"""Their layers share keys and values through keywords, which reentrant checkpointing loses, stock too."""


@dataclass(frozen=True, eq=False)
class Oracle:
    """Each sequence alone, how far from it a batch may be, and the precision in which that says something.

    Attributes:
        results: of each draw of tokens; choices: the experts that are chosen in it, which a batch is held to.
    """

    results: tuple[Result, ...]
    choices: tuple[Choices, ...]
    bound: float
    setting: Setting


@dataclass(frozen=True)
class Swept:
    """What came out for one attention backend.

    Attributes:
        errors: of each kind of input, the worst of logits and gradients, relative.
        control: of the logits, where all tokens were taken for one sequence.
    """

    rung: str
    backend: str | None
    errors: Mapping[str, float]
    bound: float
    control: float

    @property
    def worst(self) -> str:
        """The kind of input that is off most."""
        return max(self.errors, key=lambda kind: self.errors[kind])

    @property
    def problem(self) -> str | None:
        """Why this is no proof, or None."""
        error = self.errors[self.worst]
        verdict = verdict_of(error, self.bound, self.control if self.control > LEAKS else 0.0)
        if verdict == "not exact":
            return f"not exact: {self.worst}, {error:.1e} where {self.bound:.0e} is allowed"
        if verdict == "can't tell":
            return f"the control is off by {self.control:.1e} only: a leak would not be seen"
        return None


def make_sequences(draw: int = 0) -> list[Tensor]:
    """Return those of a sweep, int64, none with a special token."""
    return [plain_tokens(1, length, seed=len(LENGTHS) * draw + i)[0] for i, length in enumerate(LENGTHS)]


def oracle_of(model_type: str, setting: Setting) -> Oracle:
    """Return what each sequence alone gives, and what is allowed.

    Raises what building or running the stock model in float32 raises.
    """
    if setting.half:
        oracle = _half_oracle(model_type, setting)
        if oracle is not None:
            return oracle
    setting = replace(setting, dtype="float32")
    alone = run_alone(setting.build(model_type), make_sequences())
    try:
        own = _error(alone, run_alone(setting.build_in("float64", model_type), make_sequences()), half=False)
    except (RuntimeError, TypeError):  # a dtype that it does not expect, in its own forward
        own = 0.0
    return Oracle((alone,), (), bound_of(own, torch.float32), setting)


def _half_oracle(model_type: str, setting: Setting) -> Oracle | None:
    """Return a float32 copy's results; None where the model chooses freely, is far off, or can't run so."""
    routers = FAMILIES[model_type].routers if model_type in FAMILIES else ()
    model, wide = setting.build(model_type), setting.build_in("float32", model_type)
    names = {type(module).__name__.lower() for module in model.modules()}
    if not routers and any(word in name for word in CHOOSES for name in names):
        return None
    results, choices, own = [], [], []
    for draw in range(DRAWS):
        with recorded(choosers_of(wide, routers)) as chosen:
            results.append(run_alone(wide, make_sequences(draw)))
        choices.append(chosen())
        try:
            with held(choosers_of(model, routers), choices[-1]):
                alone = run_alone(model, make_sequences(draw))
        except RuntimeError:  # a dtype that it does not expect, in its own forward
            return None
        own.append(_error(alone, results[-1], half=True))
    if not middle(own) <= STEADY:
        return None
    return Oracle(tuple(results), tuple(choices), bound_of(middle(own), getattr(torch, setting.dtype)), setting)


def sweep(model_type: str, oracle: Oracle, backend: str = "auto") -> Swept:
    """Every kind of input, both kinds of checkpointing, and the control.

    Raises what :func:`fastpack.patch` raises for a family or a backend that it does not take.
    """
    model, sequences = oracle.setting.build(model_type), make_sequences()
    fastpack.patch(model, attention=backend)
    report = fastpack.report(model)
    errors = {kind: _error_of_kind(model, model_type, kind, oracle) for kind in INPUT_KINDS}
    control = _control(model, sequences, oracle)
    for reentrant in (False, True):
        if not model.supports_gradient_checkpointing or (reentrant and model_type in SHARED_STATES):
            continue
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        kind = "reentrant checkpointing" if reentrant else "checkpointing"
        errors[kind] = _error_of_kind(model, model_type, CHECKPOINTED, oracle)
    return Swept(report.rung, report.backend, errors, oracle.bound, control)


def _error_of_kind(model: nn.Module, model_type: str, kind: str, oracle: Oracle) -> float:
    """Return the median over draws of how far a batch is from each of its sequences alone."""
    choosers = choosers_of(model, FAMILIES[model_type].routers) if oracle.choices else []
    errors = []
    for draw, true in enumerate(oracle.results):
        with held(choosers, oracle.choices[draw]) if choosers else nullcontext():
            found = run(model, INPUT_KINDS[kind](make_sequences(draw)))
        errors.append(_error(found, true, oracle.setting.half))
    return middle(errors)


def run(model: nn.Module, batch: Mapping[str, Any]) -> Result:
    """Logits of each sequence, and gradients, of a patched model that is given all of them at once."""
    device = next(model.parameters()).device
    given = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in batch.items() if name != "labels"}
    model.zero_grad(set_to_none=True)
    logits = model(**given).logits
    mask = given.get("attention_mask")
    flat = logits.flatten(0, -2)
    real = flat if mask is None else flat[mask.flatten() != 0]
    loss = _loss(real)
    loss.backward()
    return Result(list(real.detach().split(LENGTHS)), loss.detach(), _gradients(model))


def run_alone(model: nn.Module, sequences: Sequence[Tensor]) -> Result:
    """The stock model on one sequence after the other, without padding."""
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    logits: list[Tensor] = []
    total = torch.zeros((), device=device)
    for sequence in sequences:
        batch = {"input_ids": sequence[None].to(device), **accepted(type(model).forward, {"use_cache": False})}
        found = model(**batch).logits[0]
        loss = _loss(found, start=sum(map(len, logits)))
        loss.backward()
        total += loss.detach()
        logits.append(found.detach())
    return Result(logits, total, _gradients(model))


def _control(model: nn.Module, sequences: Sequence[Tensor], oracle: Oracle) -> float:
    """How far off the logits are where the same tokens are taken for one sequence."""
    ids = torch.cat(list(sequences))[None].to(next(model.parameters()).device)
    with torch.no_grad():
        logits = model(input_ids=ids, packed_seq_lens=[ids.shape[1]]).logits[0].split(LENGTHS)
    pairs = zip(logits, oracle.results[0].logits, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def _loss(logits: Tensor, start: int = 0) -> Tensor:
    """A sum of the logits ``[L, V]``, with fixed weights for tokens ``start`` on."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(sum(LENGTHS), logits.shape[-1], generator=generator) / logits.shape[-1]
    return (logits.float() * weights[start : start + len(logits)].to(logits.device)).sum()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def _error(found: Result, true: Result, half: bool) -> float:
    """The worst of logits and gradients; parameters without a gradient on one side count as zero there."""
    names = found.grads.keys() | true.grads.keys()
    for result, other in ((found, true), (true, found)):
        for name in names - result.grads.keys():
            result.grads[name] = torch.zeros_like(other.grads[name])
    measure: Callable[[Result, Result], Any] = compare_norms if half else compare
    measured = measure(found, true)
    return max(measured.logits, measured.grads)
