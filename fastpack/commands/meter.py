"""What a training run did: losses, real tokens and slots of every step, speed, memory.

Counted as :mod:`fastpack.metrics.counting` does, which says what a slot is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from fastpack.metrics.counting import Count, count_slots, peak_memory

__all__ = [
    "Feeding",
    "Meter",
    "StepRecord",
    "Summary",
    "count_slots",
    "evaluation_losses",
    "hint",
    "peak_memory",
]


@dataclass
class StepRecord:
    """One optimizer step; ``loss`` is None where the trainer did not log it."""

    step: int
    real_tokens: int
    slots: int
    seconds: float
    loss: float | None = None


@dataclass(frozen=True)
class Summary:
    """The figures of a run; tokens and slots are those of all ranks."""

    steps: int
    first_loss: float | None
    last_loss: float | None
    real_tokens: int
    slots: int
    padding_share: float
    tokens_per_second: float
    peak_memory_bytes: int | None
    memory_kind: str

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self)


@dataclass
class _Step:
    number: int
    seconds: float
    slots: int
    real: list[Count] = field(default_factory=list)


class Meter(TrainerCallback):
    """Counts what the model is given, batch by batch, and takes the time of each step.

    Counted at the model's door rather than in the collator: what a data loader has fetched ahead, or for evaluation,
    was not trained on. Nothing is copied from the device before the run has ended.
    """

    def __init__(self, trainer: Any) -> None:
        self._losses: dict[int, float] = {}
        self._steps: list[_Step] = []
        self._batches: list[tuple[Count, int]] = []
        self._start = 0.0
        self._device = trainer.args.device
        self._hook = trainer.model.register_forward_pre_hook(self._count, with_kwargs=True)
        trainer.add_callback(self)

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._batches.append(count_slots(kwargs))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the memory that loading took."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._batches.clear()
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        seconds = time.perf_counter() - self._start
        real = [tokens for tokens, _ in self._batches]
        self._steps.append(_Step(state.global_step, seconds, sum(slots for _, slots in self._batches), real))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the loss as logged: with ``logging_steps`` above 1, the mean since the last."""
        if logs and "loss" in logs:
            self._losses[state.global_step] = logs["loss"]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hook off the model before it is saved."""
        self._hook.remove()

    @property
    def records(self) -> list[StepRecord]:
        """One of each step of this rank, so far."""
        return [
            StepRecord(s.number, sum(int(n) for n in s.real), s.slots, s.seconds, self._losses.get(s.number))
            for s in self._steps
        ]

    def records_of_all_ranks(self, accelerator: Any) -> list[StepRecord]:
        """The same with the tokens and slots of all ranks; seconds are those of this one, as it waits for others."""
        records = self.records
        local = torch.tensor([[r.real_tokens, r.slots] for r in records], device=self._device).reshape(-1, 2)
        totals = accelerator.reduce(local, "sum").tolist()
        return [replace(r, real_tokens=real, slots=slots) for r, (real, slots) in zip(records, totals, strict=True)]

    def summary(self, records: list[StepRecord]) -> Summary:
        """Sum up over all steps. The first step warms up and is left out of the speed if there are more."""
        timed = records[1:] or records
        real, slots = sum(r.real_tokens for r in records), sum(r.slots for r in records)
        seconds = sum(r.seconds for r in timed)
        losses = [r.loss for r in records if r.loss is not None]
        memory, kind = peak_memory(self._device)
        return Summary(
            steps=len(records),
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            real_tokens=real,
            slots=slots,
            padding_share=1 - real / slots if slots else 0.0,
            tokens_per_second=sum(r.real_tokens for r in timed) / seconds if seconds else 0.0,
            peak_memory_bytes=memory,
            memory_kind=kind,
        )


def evaluation_losses(logs: Mapping[str, Any]) -> dict[str, float]:
    """What a trainer logged of its evaluation sets: ``eval_loss``, or ``eval_NAME_loss`` of each."""
    return {name: value for name, value in logs.items() if name.startswith("eval_") and name.endswith("loss")}


@dataclass(frozen=True)
class Feeding:
    """How a run was fed; what :func:`hint` judges by.

    Attributes:
        patched, packing: whether they were on.
        full_step: slots of one step if packing filled every row, on all ranks; None without a ``max_length``.
        fused_loss: the head's own loss ran, which leaves padding out.
    """

    patched: bool
    packing: bool
    full_step: int | None
    fused_loss: bool = False


WASTE = 0.2
"""A share of padding above which something is said."""


def hint(summary: Summary, feeding: Feeding) -> str | None:
    """One line on what this run could have saved and which flag does it; None where there is nothing to save."""
    wasteful = summary.padding_share > WASTE
    per_step = summary.real_tokens / max(summary.steps, 1)
    fills = feeding.full_step is not None and per_step > (1 - WASTE) * feeding.full_step
    if feeding.packing or not summary.steps or (fills and (not wasteful or feeding.fused_loss)):
        return None
    flag = "--packing" if feeding.full_step else "--packing --max_length N"
    gain = ""
    if feeding.full_step:
        steps = max(1, -(-summary.real_tokens // feeding.full_step))
        gain = (
            f" (this run's {summary.real_tokens:,} real tokens in about {steps:,} step{'s' * (steps > 1)} of "
            f"{feeding.full_step:,}, not {summary.steps:,} of {per_step:,.0f})"
        )
    if not wasteful:
        return f"hint: packing was off, which left room in every step; {flag} fills it{gain}."
    padding = summary.slots - summary.real_tokens
    share = f"{summary.padding_share:.0%} of the slots ({padding:,} of {summary.slots:,}) were padding"
    if feeding.fused_loss:
        room = f"which left room in every step; {flag} fills it{gain}"
        return f"hint: {share}: backbone and fused loss skipped them, {room}."
    if feeding.patched:
        return (
            f"hint: {share}: the patched backbone skipped them, the loss head was still given them; --padding_free, "
            f"which cuts no examples, leaves them out there too, {flag} also fills each step{gain}."
        )
    return (
        f"hint: {share}, and every layer worked on them; without --no_patch the backbone skips them, with the same "
        f"losses; {flag} leaves them out and fills each step{gain}."
    )
