"""``fastpack.patch(trainer, max_tokens=...)``: plan, set up on one trainer instance, and take off again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fastpack.data.collators import stock_collator
from fastpack.data.lengths import lengths_of
from fastpack.data.sampler import TokenBudgetSampler
from fastpack.data.token_budget import TOO_LONG
from fastpack.errors import PatchError
from fastpack.patching.options import TokenBudget
from fastpack.patching.state import BUDGET, kept_on
from fastpack.trainers import loader, steps
from fastpack.trainers.kinds import Kind, kind_of, told
from fastpack.utils.console import counted
from fastpack.utils.protocols import ArgumentsLike, TrainerLike
from fastpack.utils.replacement import Replacement


@dataclass
class BudgetState:
    """A token budget that was set up on a trainer, and the changes that undo it."""

    budget: TokenBudget
    weighing: steps.Weighing
    sampler: TokenBudgetSampler | None
    dataset: Any
    drop_last: bool
    changes: list[Replacement[Any, None]] = field(default_factory=list)

    def start(self, trainer: TrainerLike) -> TokenBudgetSampler:
        """Return the sampler of a run that begins now, with equally many micro-batches in each epoch."""
        assert self.sampler is not None
        lengths = self.sampler.lengths
        if trainer.train_dataset is not self.dataset:  # by the lengths of the one before, examples would be lost
            lengths, self.dataset = _lengths(trainer), trainer.train_dataset
        # a new one: a run before this has evened out its own number of epochs, and a checkpoint fits every run like it
        self.sampler = sampler = loader.make_sampler(lengths, self.budget, trainer.args)
        sampler.even_out(loader.count_epochs(trainer.args, len(sampler)))
        return sampler

    def describe(self) -> str:
        """Return a line for the report."""
        most = f"max_tokens={self.budget.max_tokens:,}"
        if self.sampler is not None:
            plan = self.sampler.plan
            kept = "; dataloader_drop_last drops none: each example comes once an epoch" if self.drop_last else ""
            where = f"on each of {self.sampler.ranks} ranks, " if self.sampler.ranks > 1 else ""
            made = counted(plan.micro_batches, "micro-batch", "es")
            return f"{most}: {made} an epoch {where}{plan.fill:.1%} full{kept}"
        wholes, pieces = self.weighing.wholes, self.weighing.pieces
        ran = f"; {counted(wholes, 'batch', 'es')} ran in {counted(pieces, 'piece')}" if wholes else ""
        return f"{most}: batches over it are split inside the step{ran}"


def budget_of(target: object) -> BudgetState | None:
    """Return a trainer's budget in force, or None."""
    return kept_on(target, BUDGET)


def plan_budget(target: Any, given: int | TokenBudget | None, *, anew: bool = False) -> Callable[[], None]:
    """Check all that a budget needs, and return a function that sets it up, or removes one, and can't fail.

    Args:
        target: the trainer.
        given: the budget, or None to remove one.
        anew: whether to set it up even if the same budget is in force, since what lies beneath it will have changed.

    Raises:
        PatchError: the target is not a trainer, or one whose batches can't follow a budget; the message says why.
        PackingError: the data set's lengths can't be known, or an example is over the budget.
    """
    state = budget_of(target)
    if given is None:
        return functools.partial(remove_budget, target)
    budget = given if isinstance(given, TokenBudget) else TokenBudget(given)
    if type(budget.max_tokens) is not int or budget.max_tokens < 1:
        raise PatchError(f"max_tokens={budget.max_tokens!r}; pass an int from 1 on, the tokens of a micro-batch.")
    if type(budget.same_steps) is not bool:
        raise PatchError(f"same_steps={budget.same_steps!r}; pass True or False.")
    if budget.too_long not in TOO_LONG:
        raise PatchError(f"too_long={budget.too_long!r}; pass {' or '.join(map(repr, TOO_LONG))}.")
    if state is not None and state.budget == budget and not anew:
        return lambda: None
    kind = _checked_kind(target, budget)
    dataset = getattr(target, "train_dataset", None)
    unknown = not kind.planned or (budget.same_steps and isinstance(dataset, torch.utils.data.IterableDataset))
    # also where it is not used: it says what is wrong with the lengths, if anything is
    sampler = None if unknown else loader.make_sampler(_lengths(target), budget, target.args)
    splitting = budget.same_steps or not kind.planned
    weighing = steps.Weighing(kind, budget.max_tokens if splitting else None, fits=not unknown)
    sampler = None if budget.same_steps else sampler
    drop_last = bool(target.args.dataloader_drop_last)
    return functools.partial(_set_up, target, BudgetState(budget, weighing, sampler, dataset, drop_last))


def _lengths(trainer: TrainerLike) -> list[int]:
    """Tokens of each example of a trainer's data set, as its collator cuts them."""
    collator = stock_collator(trainer.data_collator)
    # TRL's collators cut at max_length; in those of transformers it is what they pad to, and they cut nothing.
    cuts = any(base.__module__.split(".")[0] == "trl" for base in type(collator).__mro__)
    return lengths_of(
        getattr(trainer, "train_dataset", None), max_length=getattr(collator, "max_length", None) if cuts else None
    )


def _checked_kind(trainer: TrainerLike, budget: TokenBudget) -> Kind:
    """Return the trainer's kind, if its batches can follow a budget."""
    kind = kind_of(trainer)
    if kind is None:
        raise PatchError(
            f"max_tokens={budget.max_tokens} needs a trainer that is already built, not a {type(trainer).__name__}: "
            "transformers' own, or TRL's for SFT, DPO, KTO, rewards, GRPO or RLOO. For a loop of your own see "
            "fastpack.data.sampler.TokenBudgetSampler."
        )
    why = next(_reasons(trainer, kind, budget), None)
    if why is not None:
        raise PatchError(f"max_tokens={budget.max_tokens} can't be kept with this {type(trainer).__name__}: {why}.")
    return kind


def _reasons(trainer: TrainerLike, kind: Kind, budget: TokenBudget) -> Iterator[str]:
    """Yield the reasons why a trainer's batches can't follow a budget."""
    args, accelerator = trainer.args, trainer.accelerator
    splitting = budget.same_steps or not kind.planned
    own = kind.refuses(trainer) or (kind.whole(trainer) if splitting else None)
    if own is not None:
        yield own
    flattening = type(stock_collator(getattr(trainer, "data_collator", None)))
    if splitting and any(base.__name__ == "DataCollatorWithFlattening" for base in flattening.__mro__):
        yield (
            f"{flattening.__name__} makes one row of a batch, and only rows can be split; pass a collator that pads, a "
            "patched model runs without padding all the same, or leave same_steps out"
        )
    if splitting and getattr(trainer, "is_deepspeed_enabled", False):
        yield "DeepSpeed takes every backward for a micro-batch, so none can be split"
    balances = kind.of_labels and getattr(trainer, "aux_loss_enabled", False)
    if balances and told(trainer, kind) == "its own labels":  # TRL divides it by the micro-batches of the step, or not
        yield (
            "its loss is its user's own, and has the auxiliary loss of experts in it: set loss_is_scaled_for_ga on the "
            "trainer, to True where the loss is divided by num_items_in_batch and to False where it is a mean over a "
            "micro-batch; or set router_aux_loss_coef=0.0"
        )
    if not kind.planned and budget.same_steps:
        yield "its batches are made by generation: it always keeps its steps; leave same_steps out"
    parallel = {axis: size for axis in ("tp", "cp", "sp") if (size := _parallel(trainer, axis)) > 1}
    if parallel:
        yield f"ranks share a batch here ({parallel}), and each would plan its own"
    if getattr(accelerator, "split_batches", False) or accelerator.dispatch_batches:
        yield "split_batches and dispatch_batches of accelerator_config divide batches among ranks in another way"
    uneven = not getattr(accelerator, "even_batches", True) and not args.dataloader_drop_last
    if splitting and uneven and accelerator.num_processes > 1:
        yield (
            "even_batches=False of accelerator_config gives ranks other numbers of batches, and each would wait for "
            "the others in one that they don't have; leave it out, or pass dataloader_drop_last=True"
        )
    if not splitting and (order := _order(args)) is not None:
        yield (
            f"train_sampling_strategy={order!r} is an order of its own, and full batches are filled from a shuffled "
            "one; leave it out, or pass same_steps=True"
        )
    sampled = type(trainer)._get_train_sampler.__module__.split(".")[0]
    if not splitting and sampled not in ("transformers", "trl"):
        yield "its own _get_train_sampler says what comes when, and full batches are drawn in another way"
    average = getattr(args, "average_tokens_across_devices", True)
    if accelerator.num_processes > 1 and not average and kind.unit == "trained tokens":
        yield "average_tokens_across_devices=False takes the mean of the ranks' means, which are of uneven sizes"
    if budget.too_long != "truncate":
        return
    if budget.same_steps:
        yield 'too_long="truncate" cuts examples as batches are made, and same_steps leaves the trainer its own batches'
    if getattr(args, "packing", False):
        yield 'packing made rows of several examples, and too_long="truncate" would cut those; set a lower max_length'
    if not kind.of_labels:
        yield 'too_long="truncate" cuts data sets of input_ids; set max_length in the config of this trainer'


def _order(args: ArgumentsLike) -> str | None:
    """Return the requested order of examples, or None for a random one (KTO's config sets its own order by default)."""
    name = "train_sampling_strategy"
    asked: str = getattr(args, name, "random")
    return None if asked in ("random", getattr(type(args), name, asked)) else asked


def _parallel(trainer: TrainerLike, axis: str) -> int:
    size = getattr(trainer, f"get_{axis}_size", None)
    return 1 if size is None else int(size())


def _set_up(trainer: TrainerLike, state: BudgetState) -> None:
    remove_budget(trainer)
    state.weighing.told = told(trainer, state.weighing.kind)
    state.changes += [
        Replacement(trainer, "get_batch_samples", steps.get_batch_samples, state.weighing, None),
        Replacement(trainer, "compute_loss", steps.compute_loss, state.weighing, None),
        Replacement(trainer.accelerator, "gather", steps.gather, None, None),
    ]
    if state.sampler is not None:
        change = Replacement(trainer, "get_train_dataloader", loader.get_train_dataloader, state, None)
        state.changes.append(change)
    for change in state.changes:
        change.install()
    if state.weighing.kind.planned:
        trainer.add_callback(loader.BudgetCallback())
    trainer.__dict__[BUDGET] = state


def remove_budget(trainer: TrainerLike) -> None:
    """Take a budget off again; does nothing where there is none."""
    state = budget_of(trainer)
    if state is None:
        return
    for change in reversed(state.changes):
        change.undo()
    if state.weighing.kind.planned:
        trainer.remove_callback(loader.BudgetCallback)  # by class: resuming may have put another one in its place
    del trainer.__dict__[BUDGET]
