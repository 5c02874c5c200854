"""One family, fed in every way that there is, against each sequence alone: logits, and the gradient of every parameter.

Models are in training mode, ``use_cache`` is at its default, and where the family has gradient checkpointing, it is
tried both ways. The loss is a fixed weighted sum of the logits, so that no head's own loss is taken for granted; some
have none.

In float32 the oracle is the stock model on each sequence alone, and what is allowed is 1e-4 of the largest value of
each tensor. In half precision the oracle is that model in float32, and what is allowed is twice what the stock model
itself is off by, in norms. That says something of a model only whose rounding stays small: one that chooses experts or
keys chooses otherwise after any rounding, and one that is far from its own float32 may be anywhere. Both are proved in
float32, on the same device and with the same heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import fastpack
from fastpack.exactness.rule import Result, compare, compare_norms
from fastpack.layers.arguments import accepted
from fastpack.smoke.inputs import INPUT_KINDS
from fastpack.smoke.setting import Setting
from fastpack.smoke.tiny import plain_tokens

LENGTHS = (7, 1, 12, 12, 20, 3)
"""A single token, two of a length, and one that outgrows windows and chunks of 8."""
BOUND = 1e-4
HALF_FACTOR, HALF_FLOOR = 2.0, 2e-2
"""Of the stock model's own error in half precision, and what is allowed wherever that is less."""
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
    """Each sequence alone, how far from it a batch may be, and the precision in which that says something."""

    result: Result
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
        if not self.errors[self.worst] <= self.bound:
            return f"not exact: {self.worst}, {self.errors[self.worst]:.1e} where {self.bound:.0e} is allowed"
        if not self.control > max(LEAKS, self.bound):
            return f"the control is off by {self.control:.1e} only: a leak would not be seen"
        return None


def make_sequences() -> list[Tensor]:
    """Those of a sweep, int64, none with a special token."""
    return [plain_tokens(1, length, seed=i)[0] for i, length in enumerate(LENGTHS)]


def oracle_of(model_type: str, setting: Setting) -> Oracle:
    """Each sequence alone through the stock model, and what is allowed.

    Raises what building or running the stock model in float32 raises.
    """
    sequences = make_sequences()
    if setting.half:
        true = run_alone(setting.build_in_float32(model_type), sequences)
        own = _own_error(model_type, setting, true)
        if own <= STEADY:
            return Oracle(true, max(HALF_FACTOR * own, HALF_FLOOR), setting)
    setting = replace(setting, dtype="float32")
    return Oracle(run_alone(setting.build(model_type), sequences), BOUND, setting)


def _own_error(model_type: str, setting: Setting, true: Result) -> float:
    """Of the stock model in half precision; infinite where it chooses, or can't run so."""
    model = setting.build(model_type)
    names = {type(module).__name__.lower() for module in model.modules()}
    if any(word in name for word in CHOOSES for name in names):
        return float("inf")
    try:
        own = run_alone(model, make_sequences())
    except RuntimeError:  # a dtype that it does not expect, in its own forward
        return float("inf")
    return _error(own, true, half=True)


def sweep(model_type: str, oracle: Oracle, backend: str = "auto") -> Swept:
    """Every kind of input, both kinds of checkpointing, and the control.

    Raises what :func:`fastpack.patch` raises for a family or a backend that it does not take.
    """
    model, sequences, half = oracle.setting.build(model_type), make_sequences(), oracle.setting.half
    fastpack.patch(model, attention=backend)
    report = fastpack.report(model)
    errors = {kind: _error(run(model, make(sequences)), oracle.result, half) for kind, make in INPUT_KINDS.items()}
    control = _control(model, sequences, oracle)
    for reentrant in (False, True):
        if not model.supports_gradient_checkpointing or (reentrant and model_type in SHARED_STATES):
            continue
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        kind = "reentrant checkpointing" if reentrant else "checkpointing"
        errors[kind] = _error(run(model, INPUT_KINDS[CHECKPOINTED](sequences)), oracle.result, half)
    return Swept(report.rung, report.backend, errors, oracle.bound, control)


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
    pairs = zip(logits, oracle.result.logits, strict=True)
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
