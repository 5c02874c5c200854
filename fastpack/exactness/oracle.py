"""Compare a model's logits and gradients on every kind of batch with those of each sequence alone.

The oracle is the stock model on each sequence alone; :mod:`fastpack.exactness.rule` sets the bounds. In float32 the
reference is the stock model itself, and a float64 copy measures its error. In half precision the reference is a float32
copy, over several draws of tokens, and the model is made to choose the experts that the copy chooses.

Half precision proves something only if a model's rounding errors stay small. Two kinds of models are proved in float32
instead, on the same device and with the same heads: a model that is far from its float32 copy, and a model that chooses
experts in modules that its family's row doesn't name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.exactness.expert_choices import Choices, choosers_of, recorded, replayed
from fastpack.exactness.inputs import INPUT_KINDS, make_sequences, predicted, single, taken_for_one, unpadded
from fastpack.exactness.rule import CONTROL, Error, Result, bound_of, compare, compare_draws, is_half
from fastpack.exactness.verification import Check, Verification
from fastpack.families.registry import family_of
from fastpack.model.unwrap import find_parts
from fastpack.utils.protocols import ModelLike

DRAWS = 3
"""The number of draws of tokens, in half precision."""
STEADY = 0.1
"""The largest error of the stock model in half precision. With a larger error, a comparison would prove nothing."""
CHOOSES = ("expert", "router", "moe", "topk", "indexer")
"""Words in the names of modules that choose experts or tokens."""
LEAKS = 1e-2
"""The least error of the control, in which tokens see all earlier tokens of other sequences."""


def checkpointings(model: Any) -> tuple[bool, ...]:
    """Return the values of ``use_reentrant`` that a model supports in checkpointing: False, and in most models True."""
    if not model.supports_gradient_checkpointing:
        return ()
    family = family_of(find_parts(model).backbone)
    return (False,) if family is not None and family.shares_states else (False, True)


def checkpointed(model: Any) -> Iterator[str]:
    """Turn on each kind of checkpointing that a model supports, one after the other, and yield its name."""
    for reentrant in checkpointings(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        yield "reentrant checkpointing" if reentrant else "checkpointing"


def weighted_sum(_: Any, logits: Tensor, start: int, total: int) -> Tensor:
    """Return a weighted sum of logits ``[L, V]``, by the fixed weights of tokens from ``start`` on, of ``total``."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(total, logits.shape[-1], generator=generator) / logits.shape[-1]
    return (logits.float() * weights[start : start + len(logits)].to(logits.device)).sum()


Objective = Callable[[Any, Tensor, int, int], Tensor]
"""A function that computes a loss from a model's outputs, with the arguments of :func:`weighted_sum`."""


def run_alone(
    model: nn.Module, sequences: Sequence[Tensor], loss_of: Objective = weighted_sum, **kwargs: Any
) -> Result:
    """Run a stock model forwards and backwards on one sequence after the other, without padding.

    Args:
        model: The stock model.
        sequences: Token ids, each ``[L]``, on any device.
        loss_of: Computes the loss from the outputs.
        **kwargs: Further arguments of the model.
    """
    return run_batches(model, [(single(model, ids), [ids]) for ids in sequences], loss_of, kwargs)


def run_batch(
    model: nn.Module,
    batch: Mapping[str, Any],
    sequences: Sequence[Tensor],
    loss_of: Objective = weighted_sum,
    **kwargs: Any,
) -> Result:
    """Run a model forwards and backwards on a batch of these sequences. The batch's labels are left out."""
    return run_batches(model, [(batch, sequences)], loss_of, kwargs)


def run_batches(
    model: nn.Module,
    batches: Sequence[tuple[Mapping[str, Any], Sequence[Tensor]]],
    loss_of: Objective = weighted_sum,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Result:
    """Run a model on one batch after another, each given with its sequences; losses and gradients add up."""
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    logits: list[Tensor] = []
    loss = torch.zeros((), device=device)
    tokens = sum(len(each) for _, sequences in batches for each in sequences)
    for batch, sequences in batches:
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items() if k != "labels"}
        outputs = model(**{**inputs, **kwargs})
        # a backbone alone has no logits
        scores = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        real = predicted(unpadded(scores.flatten(0, -2), inputs))
        part = loss_of(outputs, real, sum(map(len, logits)), tokens)
        part.backward()
        loss += part.detach()
        logits += real.detach().split([len(each) for each in sequences])
    grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result(logits, loss, grads)


@dataclass(frozen=True, eq=False)
class Oracle:
    """The results of each sequence alone, the bound of a batch's error, and the dtype of the proof.

    Attributes:
        draws: The sequences of each draw of tokens.
        results: The results of each draw's sequences alone.
        bound: The largest error allowed.
        dtype: The dtype of the proof.
        routers: The names of the classes that choose experts.
        choices: The experts chosen in each draw. Batches of the draw are made to choose the same experts.
        finer: The results of a copy in float64, if ``results`` are in float32.
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
        """Run each sequence alone, and set the bound.

        Args:
            build: Makes the stock model in a dtype, in training mode, with the same weights each time but for rounding.
            dtype: The dtype to prove the model in, if that is possible.
            routers: The names of the classes that choose experts.

        Errors from building or running the stock model in float32 are raised unchanged.
        """
        if is_half(dtype) and (oracle := cls._of_half(build, dtype, routers)) is not None:
            return oracle
        model = build(torch.float32)
        return cls.of_float32(model, make_sequences(), lambda: finer_copy(build, model, torch.float64))

    @classmethod
    def of_float32(cls, model: nn.Module, sequences: Sequence[Tensor], in_float64: Callable[[], nn.Module]) -> Oracle:
        """Make the oracle of a stock model in float32; a copy in float64 measures the model's error."""
        alone = run_alone(model, sequences)
        try:
            wide = run_alone(in_float64(), sequences)
        except (RuntimeError, TypeError):  # some models raise for a dtype that their own forward does not expect
            wide = alone
        bound = bound_of(compare(alone, wide).of_tensors, torch.float32)
        return cls([sequences], [alone], bound, torch.float32, finer=[wide])

    @classmethod
    def _of_half(
        cls, build: Callable[[torch.dtype], nn.Module], dtype: torch.dtype, routers: Sequence[str]
    ) -> Oracle | None:
        """Make an oracle from a float32 copy's results.

        Returns:
            The oracle; None if the model chooses experts in unknown modules, is far off, or can't run in this dtype.
        """
        model = build(dtype)
        wide = finer_copy(build, model, torch.float32)
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
                with replayed(choosers_of(model, routers), choices[-1]):
                    alone.append(run_alone(model, sequences))
            except RuntimeError:  # some models raise for a dtype that their own forward does not expect
                return None
        own = compare_draws(alone, results, half=True).of_tensors
        return cls(draws, results, bound_of(own, dtype), dtype, routers, choices) if own <= STEADY else None

    def prove(self, model: ModelLike) -> Verification:
        """Run a model on every kind of input, with each kind of checkpointing that it has, and the control.

        The model must understand packed batches, as a patched model does, and must be in training mode.
        """
        errors = {kind: self.error(model, make).of_tensors for kind, make in INPUT_KINDS.items()}
        for kind in checkpointed(model):
            errors[kind] = self.error(model, INPUT_KINDS["restarting positions"]).of_tensors
        return self.judge(model, errors)

    def judge(self, model: nn.Module, errors: Mapping[str, float]) -> Verification:
        """Return the verification of a model, after running the control.

        Args:
            model: The model.
            errors: For each kind of input the worst error of logits and gradients.
        """
        checks = [Check(kind, error, self.bound) for kind, error in errors.items()]
        control = self.error(model, taken_for_one).logits
        least = max(LEAKS, CONTROL * self.bound)
        checks.append(Check("control, taken for one sequence: logits", control, least, at_least=True))
        return Verification.of(model, self.dtype, checks)

    def error(self, model: nn.Module, make: Callable[[Sequence[Tensor]], Mapping[str, Any]]) -> Error:
        """Return the errors of batches, made from each draw's sequences, against these sequences alone."""
        choosers = choosers_of(model, self.routers)
        results: list[Result] = []
        for sequences, choices in zip(self.draws, self.choices, strict=True):
            with replayed(choosers, choices):
                results.append(run_batch(model, make(sequences), sequences))
        return compare_draws(results, self.results, half=is_half(self.dtype))


def finer_copy(build: Callable[[torch.dtype], nn.Module], model: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy of a model, with the same weights, built in a finer dtype."""
    finer: Any = build(dtype)
    with torch.no_grad():
        for parameter, source in zip(finer.parameters(), model.parameters(), strict=True):
            parameter.copy_(source)
    return with_eager_experts(finer)


def with_eager_experts(model: Any) -> Any:
    """Return the model, with experts that run in float64, too, which transformers' grouped matmuls don't know."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model
