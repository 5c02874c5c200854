"""Token-budget batches for a trainer, which keeps its data set, collator and workers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from fastpack.data.sampler import TokenBudgetSampler
from fastpack.errors import PackingError
from fastpack.patching.options import TokenBudget
from fastpack.utils.protocols import ArgumentsLike
from fastpack.utils.replacement import Replacement

_COPIED = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class BatchesOfEpochs(TokenBudgetSampler):
    """A :class:`TokenBudgetSampler` whose epoch both accelerate and the Trainer can set."""

    @property
    def sampler(self) -> BatchesOfEpochs:
        """The sampler itself, which accelerate looks up here when it skips the first batches of an epoch."""
        return self

    def settings(self, args: ArgumentsLike) -> dict[str, Any]:
        """Return the settings that must stay the same for a checkpoint's place in an epoch to be valid."""
        more = {"micro_batches": len(self), "gradient_accumulation_steps": args.gradient_accumulation_steps}
        return {**self._settings(), **more}


def make_sampler(lengths: Sequence[int], budget: TokenBudget, args: ArgumentsLike) -> BatchesOfEpochs:
    """Return the sampler for a trainer's arguments."""
    seed = args.seed if args.data_seed is None else args.data_seed
    return BatchesOfEpochs(lengths, budget.max_tokens, seed=seed, too_long=budget.too_long)


def count_epochs(args: ArgumentsLike, micro_batches: int) -> int:
    """Return the largest number of epochs that a run can have, with this number of micro-batches an epoch."""
    if args.max_steps > 0:
        return math.ceil(args.max_steps / math.ceil(micro_batches / args.gradient_accumulation_steps))
    return math.ceil(args.num_train_epochs)


def get_train_dataloader(patched: Replacement[Any, None]) -> Any:
    """Return the loader of ``Trainer.get_train_dataloader`` with the batches of a :class:`TokenBudgetSampler`.

    Accelerate divides a loader's batches among ranks. The sampler already gives each rank its own batches, so
    accelerate gets ``num_processes=1``.
    """
    from accelerate.data_loader import prepare_data_loader

    trainer = patched.owner
    stock_loader = patched.stock()
    sampler = patched.spec.start(trainer)
    settings = {name: getattr(stock_loader, name) for name in _COPIED if hasattr(stock_loader, name)}
    if sampler.too_long == "truncate":
        settings["collate_fn"] = functools.partial(_truncated, settings["collate_fn"], sampler.max_tokens)
    accelerator = trainer.accelerator
    return prepare_data_loader(
        DataLoader(stock_loader.dataset, batch_sampler=sampler, **settings),
        device=accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        non_blocking=accelerator.non_blocking,
    )


def _truncated(collate: Callable[[Any], Any], max_tokens: int, examples: Sequence[Mapping[str, Any]]) -> Any:
    """Collate examples truncated to ``max_tokens``, in every column that has one entry for each token."""

    def truncate(example: Mapping[str, Any]) -> dict[str, Any]:
        tokens = len(example["input_ids"])
        columns = {name for name, value in example.items() if hasattr(value, "__len__") and len(value) == tokens}
        return {name: value[:max_tokens] if name in columns else value for name, value in example.items()}

    return collate([truncate(example) if len(example["input_ids"]) > max_tokens else example for example in examples])


class BudgetCallback(TrainerCallback, ExportableState):
    """A callback that saves the batches' settings in each checkpoint, and compares them when a run resumes."""

    def __init__(self) -> None:
        """Set up the callback, without settings yet."""
        self.settings: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """Return the entry that transformers writes into ``trainer_state.json``."""
        return {"args": {}, "attributes": {"settings": self.settings}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the batches' settings with those of the checkpoint that a run resumes from.

        A trainer that keeps its own batches has no settings. Data are compared only by the lengths of the examples, in
        order, so other data of the same lengths pass.

        Raises:
            PackingError: the checkpoint's batches differ; resuming would lose examples, or show some twice.
        """
        sampler = kwargs["train_dataloader"].batch_sampler
        self.settings = sampler.settings(args) if isinstance(sampler, BatchesOfEpochs) else {}
        saved: dict[str, Any] = {}
        if type(self).__name__ in state.stateful_callbacks:
            saved = state.stateful_callbacks[type(self).__name__]["attributes"]["settings"]
        state.stateful_callbacks[type(self).__name__] = self.state()
        if state.global_step == 0 or args.ignore_data_skip:
            return
        saved_by = f"the checkpoint at step {state.global_step} was made"
        if bool(saved) != bool(self.settings):
            batching = f"max_tokens={saved['max_tokens']}" if saved else "the trainer's own batches"
            raise PackingError(
                f"{saved_by} with {batching}: its place in the epoch is counted in those batches. Resume with them, or "
                "pass ignore_data_skip=True to begin a new epoch."
            )
        for name, ours in self.settings.items():
            theirs = saved.get(name)
            if theirs != ours:
                raise PackingError(
                    f"{saved_by} with {name} {theirs!r}, and this run has {ours!r}: its batches differ, so examples "
                    "would be lost or seen twice. Resume with the same data, settings and number of processes, or pass "
                    "ignore_data_skip=True to begin a new epoch."
                )
