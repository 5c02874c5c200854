"""What a training run did: losses, real tokens and slots of its steps, speed, memory, as its metrics counted them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastpack.trainers.metrics import MetricsCallback
from fastpack.trainers.metrics.counting import peak_memory


@dataclass(frozen=True)
class StepRecord:
    """What was logged at a step: tokens, slots and seconds of a step, means since the last log; the loss likewise.

    Tokens and slots are those of all ranks. The loss is None at a last step that was not logged.
    """

    step: int
    real_tokens: float
    slots: float
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


def read_records(metrics: MetricsCallback) -> list[StepRecord]:
    """Return one of each log, so far."""
    return [
        StepRecord(
            step=int(each["step"]),
            real_tokens=each["real_tokens"],
            slots=each["real_tokens"] + each["padding_tokens"],
            seconds=each["step_seconds"],
            loss=each.get("loss"),
        )
        for each in metrics.history
    ]


def summarize(trainer: Any, metrics: MetricsCallback) -> Summary:
    """Sum up over all steps. What was logged first warms up, and is left out of the speed if there is more."""
    timed = metrics.history[1:] or metrics.history
    seconds = sum(each["steps"] * each["step_seconds"] for each in timed)
    losses = [each["loss"] for each in metrics.history if "loss" in each]
    real, slots = metrics.totals["real"], metrics.totals["slots"]
    memory, kind = peak_memory(trainer.args.device)
    return Summary(
        steps=metrics.totals["steps"],
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        real_tokens=real,
        slots=slots,
        padding_share=1 - real / slots if slots else 0.0,
        tokens_per_second=sum(each["steps"] * each["real_tokens"] for each in timed) / seconds if seconds else 0.0,
        peak_memory_bytes=memory,
        memory_kind=kind,
    )


def evaluation_losses(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return what a trainer logged of its evaluation sets: ``eval_loss``, or ``eval_NAME_loss`` of each."""
    return {name: value for name, value in logs.items() if name.startswith("eval_") and name.endswith("loss")}


WASTE = 0.2
"""A share of padding above which something is said."""


def hint(
    summary: Summary, *, patched: bool, packing: bool, full_step: int | None, fused_loss: bool = False
) -> str | None:
    """Return one line on what this run could have saved and which flag does it; None where there is nothing to save.

    Args:
        summary: of the run.
        patched, packing: whether they were on.
        full_step: slots of one step if packing filled every row, on all ranks; None without a ``max_length``.
        fused_loss: whether the head's own loss ran, which leaves padding out.
    """
    wasteful = summary.padding_share > WASTE and not fused_loss
    per_step = summary.real_tokens / max(summary.steps, 1)
    fills = full_step is not None and per_step > (1 - WASTE) * full_step
    if packing or not summary.steps or (fills and not wasteful):
        return None
    flag = "--packing" if full_step else "--packing --max_length N"
    gain = ""
    if full_step:
        steps = max(1, -(-summary.real_tokens // full_step))
        gain = (
            f" (this run's {summary.real_tokens:,} real tokens in about {steps:,} step{'s' * (steps > 1)} of "
            f"{full_step:,}, not {summary.steps:,} of {per_step:,.0f})"
        )
    if not wasteful:
        return f"hint: packing was off, which left room in every step; {flag} fills it{gain}."
    padding = summary.slots - summary.real_tokens
    share = f"{summary.padding_share:.0%} of the slots ({padding:,} of {summary.slots:,}) were padding"
    if patched:
        return (
            f"hint: {share}: the patched backbone skipped them, the loss head was still given them; --padding_free, "
            f"which cuts no examples, leaves them out there too, {flag} also fills each step{gain}."
        )
    return (
        f"hint: {share}, and every layer worked on them; without --no_patch the backbone skips them, with the same "
        f"losses; {flag} leaves them out and fills each step{gain}."
    )
