"""Check, set up and remove the token budget of one trainer: ``fastpack.patch(trainer, max_tokens=...)``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fastpack.data.collators import stock_collator
from fastpack.data.lengths import IMAGES, lengths_of
from fastpack.data.sampler import TokenBudgetSampler
from fastpack.data.token_budget import TOO_LONG
from fastpack.errors import PatchError
from fastpack.patching.options import TokenBudget
from fastpack.patching.state import BUDGET, trainer_record
from fastpack.trainers import loader, step_weights
from fastpack.trainers.loss_units import LossUnit, label_count_for, loss_unit_of
from fastpack.utils.console import counted
from fastpack.utils.protocols import ArgumentsLike, TrainerLike
from fastpack.utils.replacement import Replacement


@dataclass
class BudgetState:
    """A token budget that was set up on a trainer.

    Attributes:
        budget: the budget.
        weights: the weights of the current optimiser step's losses.
        sampler: the sampler of full micro-batches; None if the trainer keeps its own batches.
        dataset: the trainer's data set when ``sampler`` was made.
        drop_last: whether the trainer was built with ``dataloader_drop_last=True``, for the report.
        changes: the replacements on the trainer and its accelerator, in the order in which they were installed.
    """

    budget: TokenBudget
    weights: step_weights.StepWeights
    sampler: TokenBudgetSampler | None
    dataset: Any
    drop_last: bool
    changes: list[Replacement[Any, None]] = field(default_factory=list)

    def start(self, trainer: TrainerLike) -> TokenBudgetSampler:
        """Make the sampler of a new run, with the same number of micro-batches in each epoch, and return it."""
        assert self.sampler is not None
        lengths = self.sampler.lengths
        if trainer.train_dataset is not self.dataset:  # with the old data set's lengths, examples would be lost
            lengths, self.dataset = _lengths(trainer), trainer.train_dataset
        # Make a new sampler: the old one was evened out for an earlier run's number of epochs. Runs with the same
        # settings get the same batches, so a checkpoint of one run fits the others.
        self.sampler = sampler = loader.make_sampler(lengths, self.budget, trainer.args)
        sampler.even_out(loader.count_epochs(trainer.args, len(sampler)))
        return sampler

    def describe(self) -> str:
        """Return a line for the report."""
        most = f"max_tokens={self.budget.max_tokens:,}"
        if self.sampler is not None:
            plan = self.sampler.plan
            unused = "; dataloader_drop_last drops no batch: an epoch has each example once" if self.drop_last else ""
            where = f"on each of {self.sampler.ranks} ranks, " if self.sampler.ranks > 1 else ""
            micro_batches = counted(plan.micro_batches, "micro-batch", "es")
            return f"{most}: {micro_batches} an epoch {where}{plan.fill:.1%} full{unused}"
        batches, pieces = self.weights.batches, self.weights.pieces
        ran = f"; {counted(batches, 'batch', 'es')} ran in {counted(pieces, 'piece')}" if batches else ""
        return f"{most}: larger batches are split inside the step{ran}"


def budget_of(target: object) -> BudgetState | None:
    """Return the token budget that is set up on a trainer, or None."""
    return trainer_record(target, BUDGET)


def plan_budget(target: Any, max_tokens: int | TokenBudget | None, *, anew: bool = False) -> Callable[[], None]:
    """Check a token budget, and return a function that sets it up or removes it.

    Everything is checked beforehand, so the returned function can't fail.

    Args:
        target: the trainer.
        max_tokens: the budget, or None to remove the current one.
        anew: whether to set the budget up even if the same budget is already set up. The caller does so after replacing
            the loss that the budget wraps.

    Raises:
        PatchError: the target is not a trainer, or its batches can't follow a budget; the message says why.
        PackingError: the lengths of the data set's examples can't be read, or an example is over the budget.
    """
    state = budget_of(target)
    if max_tokens is None:
        return functools.partial(remove_budget, target)
    budget = max_tokens if isinstance(max_tokens, TokenBudget) else TokenBudget(max_tokens)
    if type(budget.max_tokens) is not int or budget.max_tokens < 1:
        raise PatchError(f"max_tokens={budget.max_tokens!r}; pass the tokens of a micro-batch, an int of at least 1.")
    if type(budget.same_steps) is not bool:
        raise PatchError(f"same_steps={budget.same_steps!r}; pass True or False.")
    if budget.too_long not in TOO_LONG:
        raise PatchError(f"too_long={budget.too_long!r}; pass {' or '.join(map(repr, TOO_LONG))}.")
    if state is not None and state.budget == budget and not anew:
        return lambda: None
    loss_unit = _checked_loss_unit(target, budget)
    dataset = getattr(target, "train_dataset", None)
    unknown = not loss_unit.planned or (budget.same_steps and isinstance(dataset, torch.utils.data.IterableDataset))
    # made even if it is not used below: making it raises if an example is over the budget
    sampler = None if unknown else loader.make_sampler(_lengths(target), budget, target.args)
    splitting = budget.same_steps or not loss_unit.planned
    weights = step_weights.StepWeights(
        loss_unit, budget.max_tokens if splitting else None, examples_checked=not unknown
    )
    sampler = None if budget.same_steps else sampler
    drop_last = bool(target.args.dataloader_drop_last)
    return functools.partial(_set_up, target, BudgetState(budget, weights, sampler, dataset, drop_last))


def _lengths(trainer: TrainerLike) -> list[int]:
    """Return the number of tokens of each example of a trainer's data set, after its collator's truncation."""
    collator = stock_collator(trainer.data_collator)
    # TRL's collators truncate to max_length. transformers' collators pad to it, and truncate nothing.
    cuts = any(base.__module__.split(".")[0] == "trl" for base in type(collator).__mro__)
    return lengths_of(
        getattr(trainer, "train_dataset", None),
        max_length=getattr(collator, "max_length", None) if cuts else None,
        collator=collator,
    )


def _has_images(trainer: TrainerLike) -> bool:
    """Return whether a trainer's data set has columns of images."""
    columns = getattr(getattr(trainer, "train_dataset", None), "column_names", None) or ()
    return not {*IMAGES}.isdisjoint(columns)


def _checked_loss_unit(trainer: TrainerLike, budget: TokenBudget) -> LossUnit:
    """Return the trainer's loss unit; raise if its batches can't follow a budget."""
    loss_unit = loss_unit_of(trainer)
    if loss_unit is None:
        raise PatchError(
            f"max_tokens={budget.max_tokens} needs a trainer that is already built, not a {type(trainer).__name__}: "
            "transformers' own, or TRL's for SFT, DPO, KTO, rewards, GRPO, RLOO or distillation. For your own loop, "
            "see fastpack.data.sampler.TokenBudgetSampler."
        )
    why = next(_reasons(trainer, loss_unit, budget), None)
    if why is not None:
        raise PatchError(f"max_tokens={budget.max_tokens} can't be kept with this {type(trainer).__name__}: {why}.")
    return loss_unit


def _reasons(trainer: TrainerLike, loss_unit: LossUnit, budget: TokenBudget) -> Iterator[str]:
    """Yield the reasons why a trainer's batches can't follow a budget."""
    args, accelerator = trainer.args, trainer.accelerator
    splitting = budget.same_steps or not loss_unit.planned
    own = loss_unit.why_inexact(trainer) or (loss_unit.why_unsplittable(trainer) if splitting else None)
    if own is not None:
        yield own
    flattening = type(stock_collator(getattr(trainer, "data_collator", None)))
    if splitting and any(base.__name__ == "DataCollatorWithFlattening" for base in flattening.__mro__):
        yield (
            f"{flattening.__name__} joins a batch into one row, and a batch can only be split between rows; pass a "
            "collator that pads (a patched model runs without padding anyway), or leave same_steps out"
        )
    if splitting and getattr(trainer, "is_deepspeed_enabled", False):
        yield "DeepSpeed counts every backward as a micro-batch, so a micro-batch can't be split"
    balances = loss_unit.counts_labels and getattr(trainer, "aux_loss_enabled", False)
    if balances and label_count_for(trainer, loss_unit) == "its own labels":
        # whether TRL divides the auxiliary loss by the micro-batches of the step depends on the same setting
        yield (
            "its custom loss includes the auxiliary loss of experts: set loss_is_scaled_for_ga on the "
            "trainer to True if the loss is divided by num_items_in_batch, or to False if it is a mean over a "
            "micro-batch; or set router_aux_loss_coef=0.0"
        )
    if not loss_unit.planned and budget.same_steps:
        yield "its batches are generated, so it always keeps its own steps; leave same_steps out"
    parallel = {axis: size for axis in ("tp", "cp", "sp") if (size := _parallel(trainer, axis)) > 1}
    if parallel:
        yield f"ranks share a batch here ({parallel}), but each rank would plan its own batches"
    if getattr(accelerator, "split_batches", False) or accelerator.dispatch_batches:
        yield "split_batches and dispatch_batches of accelerator_config divide batches among ranks in another way"
    uneven = not getattr(accelerator, "even_batches", True) and not args.dataloader_drop_last
    if splitting and uneven and accelerator.num_processes > 1:
        yield (
            "even_batches=False of accelerator_config gives ranks different numbers of batches, so a rank would wait "
            "for ever for a rank that has no batch left; leave it out, or pass dataloader_drop_last=True"
        )
    if not splitting and (order := _order(args)) is not None:
        yield (
            f"train_sampling_strategy={order!r} asks for an order of the data, but full batches are filled from "
            "shuffled data; leave it out, or pass same_steps=True"
        )
    sampled = type(trainer)._get_train_sampler.__module__.split(".")[0]
    if not splitting and sampled not in ("transformers", "trl"):
        yield "it has its own _get_train_sampler, and full batches would not follow that sampler's order"
    average = getattr(args, "average_tokens_across_devices", True)
    if accelerator.num_processes > 1 and not average and loss_unit.name == "trained tokens":
        yield "average_tokens_across_devices=False takes the mean of the ranks' means, over different numbers of tokens"
    if loss_unit.planned and _has_images(trainer):
        if splitting:
            yield "a batch doesn't say which row its images belong to, so it can't be split; leave same_steps out"
        if getattr(trainer, "calculate_KL", False):
            yield (
                f"loss_type {trainer.loss_type!r} compares with completions of other rows of the batch, and the data "
                'set says nothing of their lengths; pass loss_type="apo_zero_unpaired"'
            )
        if budget.too_long == "truncate":
            yield 'too_long="truncate" would cut the tokens of images; raise max_tokens, or drop the longer examples'
    if budget.too_long != "truncate":
        return
    if budget.same_steps:
        yield 'too_long="truncate" cuts examples in our batches, and same_steps keeps the batches of the trainer'
    if getattr(args, "packing", False):
        yield 'packing joined examples in one row, and too_long="truncate" would cut the row; set a lower max_length'
    if not loss_unit.counts_labels:
        yield 'too_long="truncate" needs a data set of input_ids; set max_length in the config of this trainer'


def _order(args: ArgumentsLike) -> str | None:
    """Return the order of examples that the user asked for, or None for a random one or the config's default.

    KTO's config has a default order of its own.
    """
    name = "train_sampling_strategy"
    order: str = getattr(args, name, "random")
    return None if order in ("random", getattr(type(args), name, order)) else order


def _parallel(trainer: TrainerLike, axis: str) -> int:
    size = getattr(trainer, f"get_{axis}_size", None)
    return 1 if size is None else int(size())


def _set_up(trainer: TrainerLike, state: BudgetState) -> None:
    remove_budget(trainer)
    state.weights.label_count = label_count_for(trainer, state.weights.loss_unit)
    state.changes += [
        Replacement(trainer, "get_batch_samples", step_weights.get_batch_samples, state.weights, None),
        Replacement(trainer, "compute_loss", step_weights.compute_loss, state.weights, None),
        Replacement(trainer.accelerator, "gather", step_weights.gather, None, None),
    ]
    if state.sampler is not None:
        change = Replacement(trainer, "get_train_dataloader", loader.get_train_dataloader, state, None)
        state.changes.append(change)
    for change in state.changes:
        change.install()
    if state.weights.loss_unit.planned:
        trainer.add_callback(loader.BudgetCallback())
    trainer.__dict__[BUDGET] = state


def remove_budget(trainer: TrainerLike) -> None:
    """Remove a trainer's token budget, if it has one."""
    state = budget_of(trainer)
    if state is None:
        return
    for change in reversed(state.changes):
        change.undo()
    if state.weights.loss_unit.planned:
        trainer.remove_callback(loader.BudgetCallback)  # by class: resuming may have replaced the instance
    del trainer.__dict__[BUDGET]
