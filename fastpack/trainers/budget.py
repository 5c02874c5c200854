"""``fastpack.patch(trainer, max_tokens=...)``: plan, set up on one trainer instance, and take off again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastpack.batching.budget_sampler import TokenBudgetSampler
from fastpack.batching.lengths import lengths_of
from fastpack.errors import PatchError
from fastpack.options import TokenBudget
from fastpack.patching import BUDGET
from fastpack.trainers import loader, steps
from fastpack.trainers.kinds import Kind, kind_of


@dataclass
class BudgetState:
    """What was set up on a trainer, and how to undo it."""

    budget: TokenBudget
    kind: Kind
    weighing: steps.Weighing
    lengths: list[int] | None
    sampler: TokenBudgetSampler | None
    undo: list[tuple[Any, str]] = field(default_factory=list)
    callback: Any = None

    def start(self, trainer: Any) -> TokenBudgetSampler:
        """The sampler of a run that begins now, with as many micro-batches in each epoch."""
        assert self.lengths is not None
        assert self.sampler is not None
        args = trainer.args
        self.sampler = loader.make_sampler(
            self.lengths,
            self.budget.max_tokens,
            self.budget.too_long,
            args,
            epochs=loader.count_epochs(args, self.sampler.plan.micro_batches),
        )
        return self.sampler

    def describe(self) -> str:
        """A line for the report."""
        most = f"max_tokens={self.budget.max_tokens:,}"
        if self.sampler is not None:
            plan = self.sampler.plan
            return (
                f"{most}: {plan.micro_batches:,} micro-batches an epoch on each of {self.sampler.ranks} ranks, "
                f"{plan.fill:.1%} full"
            )
        wholes, pieces = self.weighing.wholes, self.weighing.pieces
        ran = f"; {wholes:,} batches ran in {pieces:,} pieces" if wholes else ""
        return f"{most}: batches over it are split inside the step{ran}"


def budget_of(target: Any) -> BudgetState | None:
    """The budget in force on a trainer."""
    state: BudgetState | None = getattr(target, "__dict__", {}).get(BUDGET)
    return state


def plan_budget(target: Any, given: int | TokenBudget | None) -> Callable[[], None]:
    """Check everything that a budget needs; what is returned sets it up, or takes one off, and can't fail.

    Raises:
        PatchError: the target is no trainer, or one that this can't be done with, and why.
        PackingError: the data set's lengths can't be known, or an example is over the budget, and which.
    """
    state = budget_of(target)
    if given is None:
        return functools.partial(remove_budget, target)
    budget = given if isinstance(given, TokenBudget) else TokenBudget(given)
    if type(budget.max_tokens) is not int or budget.max_tokens < 1:
        raise PatchError(f"max_tokens={budget.max_tokens!r}; pass an int from 1 on, the tokens of a micro-batch.")
    if state is not None and state.budget == budget:
        return lambda: None
    kind = _checked_kind(target, budget)
    made = None
    lengths = None
    if kind.planned:
        lengths = lengths_of(
            getattr(target, "train_dataset", None), max_length=getattr(target.data_collator, "max_length", None)
        )
        made = loader.make_sampler(lengths, budget.max_tokens, budget.too_long, target.args)
        if budget.same_steps:
            made = None  # it has said what is wrong with the lengths, if anything is
    splitting = budget.same_steps or not kind.planned
    weighing = steps.Weighing(kind, budget.max_tokens if splitting else None)
    return functools.partial(_set_up, target, BudgetState(budget, kind, weighing, lengths, made))


def _checked_kind(trainer: Any, budget: TokenBudget) -> Kind:
    """The trainer's kind, if its batches can follow a budget."""
    kind = kind_of(trainer)
    if kind is None:
        raise PatchError(
            f"max_tokens={budget.max_tokens} needs a trainer of transformers or TRL that is already built, not a "
            f"{type(trainer).__name__}. For a loop of your own see fastpack.batching.budget_sampler.TokenBudgetSampler."
        )
    name = type(trainer).__name__
    splitting = budget.same_steps or not kind.planned
    why = kind.refuses(trainer) or (kind.whole(trainer) if splitting else None)
    if why is None and splitting and getattr(trainer, "is_deepspeed_enabled", False):
        why = "DeepSpeed takes every backward for a micro-batch, so none can be split"
    if why is None and not kind.planned and budget.same_steps:
        why = "its batches are made by generation: it always keeps its steps; leave same_steps out"
    parallel = {axis: size for axis in ("tp", "cp", "sp") if (size := _parallel(trainer, axis)) > 1}
    if why is None and parallel:
        why = f"ranks share a batch here ({parallel}), and each would plan its own"
    accelerator = trainer.accelerator
    if why is None and (getattr(accelerator, "split_batches", False) or accelerator.dispatch_batches):
        why = "split_batches and dispatch_batches of accelerator_config divide batches among ranks in another way"
    if why is None and budget.too_long == "truncate" and kind.unit != "trained tokens":
        why = 'too_long="truncate" cuts data sets of input_ids; set max_length in the config of this trainer'
    if why is not None:
        raise PatchError(f"max_tokens={budget.max_tokens} can't be kept with this {name}: {why}.")
    return kind


def _parallel(trainer: Any, axis: str) -> int:
    size = getattr(trainer, f"get_{axis}_size", None)
    return 1 if size is None else int(size())


def _set_up(trainer: Any, state: BudgetState) -> None:
    remove_budget(trainer)
    accelerator = trainer.accelerator
    changed: list[tuple[Any, str, Any]] = [
        (trainer, "get_batch_samples", functools.partial(steps.get_batch_samples, trainer)),
        (trainer, "compute_loss", functools.partial(steps.compute_loss, trainer)),
    ]
    for owner, name, ours in changed:
        _replace(state, owner, name, functools.partial(ours, getattr(owner, name), state.weighing))
    _replace(state, accelerator, "gather", functools.partial(steps.gather, accelerator, accelerator.gather))
    if state.sampler is not None:
        stock = trainer.get_train_dataloader
        _replace(
            state,
            trainer,
            "get_train_dataloader",
            functools.partial(loader.get_train_dataloader, trainer, stock, state),
        )
        state.callback = loader.BudgetCallback()
        trainer.add_callback(state.callback)
    trainer.__dict__[BUDGET] = state


def _replace(state: BudgetState, owner: Any, name: str, ours: Any) -> None:
    setattr(owner, name, ours)
    state.undo.append((owner, name))


def remove_budget(trainer: Any) -> None:
    """Take a budget off again; does nothing where there is none."""
    state = budget_of(trainer)
    if state is None:
        return
    for owner, name in reversed(state.undo):
        owner.__dict__.pop(name, None)
    if state.callback is not None:
        trainer.remove_callback(state.callback)
    del trainer.__dict__[BUDGET]
