"""A model, fed in every way that there is, against each sequence alone: logits, and the gradient of every parameter.

The oracle is the stock model on each sequence alone, and the bounds are those of :mod:`fastpack.exactness.rule`: in
float32 against the model itself, of which a float64 copy tells how far off it is; in half precision against a float32
copy, over several draws of tokens, with experts held to those that the copy chooses. That says something only of a
model whose rounding stays small. One that is far from its own float32, or chooses in a way that nobody has named, may
be anywhere: it is proved in float32, on the same device and with the same heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.exactness.choices import Choices, choosers_of, held, recorded
from fastpack.exactness.inputs import INPUT_KINDS, make_sequences, single, taken_for_one, unpadded
from fastpack.exactness.rule import CONTROL, Error, Result, bound_of, compare, compare_draws, is_half
from fastpack.exactness.verification import Check, Verification
from fastpack.families.registry import FAMILIES
from fastpack.utils.protocols import ModelLike

DRAWS = 3
"""Of tokens, in half precision."""
STEADY = 0.1
"""What the stock model may be off by in half precision, if that is to prove anything."""
CHOOSES = ("expert", "router", "moe", "topk", "indexer")
"""In the names of modules that choose."""
LEAKS = 1e-2
"""How far off the control must be at least: it sees everything that comes before."""


def checkpointings(model: ModelLike) -> tuple[bool, ...]:
    """The kinds of checkpointing that a model of transformers has: torch's and, True, its reentrant kind."""
    if not model.supports_gradient_checkpointing:
        return ()
    family = FAMILIES.get(model.config.model_type)
    return (False,) if family is not None and family.shares_states else (False, True)


def weighted_sum(_: Any, logits: Tensor, start: int, total: int) -> Tensor:
    """Return a sum of the logits ``[L, V]``, with fixed weights for tokens ``start`` on of so many in all."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(total, logits.shape[-1], generator=generator) / logits.shape[-1]
    return (logits.float() * weights[start : start + len(logits)].to(logits.device)).sum()


Objective = Callable[[Any, Tensor, int, int], Tensor]
"""Makes a loss of a model's outputs: called as :func:`weighted_sum` is."""


def run_alone(
    model: nn.Module, sequences: Sequence[Tensor], loss_of: Objective = weighted_sum, **kwargs: Any
) -> Result:
    """Run a stock model forwards and backwards on one sequence after the other, without padding.

    Args:
        sequences: ids, each ``[L]``, on any device.
        kwargs: for the model.
    """
    return _run(model, [(single(model, ids), [ids]) for ids in sequences], loss_of, kwargs)


def run_batch(
    model: nn.Module,
    batch: Mapping[str, Any],
    sequences: Sequence[Tensor],
    loss_of: Objective = weighted_sum,
    **kwargs: Any,
) -> Result:
    """Run a model forwards and backwards on a batch of these sequences, without its labels."""
    return _run(model, [(batch, sequences)], loss_of, kwargs)


def _run(
    model: nn.Module,
    batches: Sequence[tuple[Mapping[str, Any], Sequence[Tensor]]],
    loss_of: Objective,
    kwargs: Mapping[str, Any],
) -> Result:
    """Run a model on one batch after the other, each with its sequences; losses and gradients add up."""
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    logits: list[Tensor] = []
    loss = torch.zeros((), device=device)
    tokens = sum(len(each) for _, sequences in batches for each in sequences)
    for batch, sequences in batches:
        given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items() if k != "labels"}
        outputs = model(**{**given, **kwargs})
        # a backbone alone has no logits
        scores = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        found = unpadded(scores.flatten(0, -2), given)
        part = loss_of(outputs, found, sum(map(len, logits)), tokens)
        part.backward()
        loss += part.detach()
        logits += found.detach().split([len(each) for each in sequences])
    grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result(logits, loss, grads)


@dataclass(frozen=True, eq=False)
class Oracle:
    """Each sequence alone, how far from it a batch may be, and the precision in which that says something.

    Attributes:
        draws: the sequences of each draw of tokens; results: what each of them gives alone.
        choices: the experts that are chosen in each draw, which a batch is held to.
        routers: names of the classes that choose them.
        finer: what a copy in float64 gives, where the results are float32's.
    """

    draws: Sequence[Sequence[Tensor]]
    results: Sequence[Result]
    bound: float
    dtype: torch.dtype
    routers: Sequence[str] = ()
    choices: Sequence[Choices] = ((),)
    finer: Sequence[Result] = ()

    @classmethod
    def of(cls, build: Callable[[torch.dtype], nn.Module], dtype: torch.dtype, routers: Sequence[str] = ()) -> Oracle:
        """Return what each sequence alone gives, and what is allowed.

        Args:
            build: makes the stock model, always of the same weights but for a dtype's rounding, in training mode.
            dtype: the one to prove it in, if that can be.
            routers: names of the classes that choose experts.

        Raises what building or running the stock model in float32 raises.
        """
        if is_half(dtype) and (oracle := cls._of_half(build, dtype, routers)) is not None:
            return oracle
        model = build(torch.float32)
        return cls.of_float32(model, make_sequences(), lambda: _finer(build, model, torch.float64))

    @classmethod
    def of_float32(cls, model: nn.Module, sequences: Sequence[Tensor], in_float64: Callable[[], nn.Module]) -> Oracle:
        """Return it for a stock model in float32; what makes a copy of it in float64 tells how far off it is."""
        alone = run_alone(model, sequences)
        try:
            wide = run_alone(in_float64(), sequences)
        except (RuntimeError, TypeError):  # a dtype that it does not expect, in its own forward
            wide = alone
        bound = bound_of(compare(alone, wide).of_tensors, torch.float32)
        return cls([sequences], [alone], bound, torch.float32, finer=[wide])

    @classmethod
    def _of_half(
        cls, build: Callable[[torch.dtype], nn.Module], dtype: torch.dtype, routers: Sequence[str]
    ) -> Oracle | None:
        """Return a float32 copy's results; None where the model chooses freely, is far off, or can't run so."""
        model = build(dtype)
        wide = _finer(build, model, torch.float32)
        names = {type(module).__name__.lower() for module in model.modules()}
        if not routers and any(word in name for word in CHOOSES for name in names):
            return None
        draws = [make_sequences(draw=draw) for draw in range(DRAWS)]
        results, choices, alone = [], [], []
        for sequences in draws:
            with recorded(choosers_of(wide, routers)) as chosen:
                results.append(run_alone(wide, sequences))
            choices.append(chosen())
            try:
                with held(choosers_of(model, routers), choices[-1]):
                    alone.append(run_alone(model, sequences))
            except RuntimeError:  # a dtype that it does not expect, in its own forward
                return None
        own = compare_draws(alone, results, half=True).of_tensors
        return cls(draws, results, bound_of(own, dtype), dtype, routers, choices) if own <= STEADY else None

    def prove(self, model: ModelLike) -> Verification:
        """Run a model on every kind of input, with both kinds of checkpointing where it has any, and the control.

        It knows of the packing of its batches, as a patched model does, and is in training mode.
        """
        errors = {kind: self.error(model, make).of_tensors for kind, make in INPUT_KINDS.items()}
        for reentrant in checkpointings(model):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
            kind = "reentrant checkpointing" if reentrant else "checkpointing"
            errors[kind] = self.error(model, INPUT_KINDS["restarting positions"]).of_tensors
        return self.judge(model, errors)

    def judge(self, model: nn.Module, errors: Mapping[str, float]) -> Verification:
        """Return the verdict on a model.

        Args:
            errors: of each kind of input, the worst of logits and gradients.
        """
        checks = [Check(kind, error, self.bound) for kind, error in errors.items()]
        control = self.error(model, taken_for_one).logits
        least = max(LEAKS, CONTROL * self.bound)
        checks.append(Check("control, taken for one sequence: logits", control, least, at_least=True))
        return Verification.of(model, self.dtype, checks)

    def error(self, model: nn.Module, make: Callable[[Sequence[Tensor]], Mapping[str, Any]]) -> Error:
        """Return how far batches made of the draws' sequences are from each of these alone."""
        choosers = choosers_of(model, self.routers)
        found: list[Result] = []
        for sequences, choices in zip(self.draws, self.choices, strict=True):
            with held(choosers, choices):
                found.append(run_batch(model, make(sequences), sequences))
        return compare_draws(found, self.results, half=is_half(self.dtype))


def _finer(build: Callable[[torch.dtype], nn.Module], model: nn.Module, dtype: torch.dtype) -> Any:
    """Return a model of the same weights, built in a finer dtype."""
    finer: Any = build(dtype)
    with torch.no_grad():
        for parameter, given in zip(finer.parameters(), model.parameters(), strict=True):
            parameter.copy_(given)
    if finer._can_set_experts_implementation():
        finer.set_experts_implementation("eager")  # products over groups of rows know no float64
    return finer
