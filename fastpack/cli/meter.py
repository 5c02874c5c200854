"""Summarise a training run from its metrics: losses, real tokens and slots, speed and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastpack.trainers.metrics import MetricsCallback
from fastpack.trainers.metrics.counting import peak_memory


@dataclass(frozen=True)
class Summary:
    """The results of a run; tokens and slots are summed over all ranks."""

    steps: int
    first_loss: float | None
    last_loss: float | None
    real_tokens: int
    slots: int
    padding_share: float
    tokens_per_second: float
    peak_memory_bytes: int | None
    memory_kind: str


def read_steps(metrics: MetricsCallback) -> list[dict[str, Any]]:
    """Return the tokens, slots and seconds of each logged step (means since the last log), and its loss.

    Tokens and slots are summed over all ranks. If the last step was not logged, its loss is None.
    """
    return [
        {
            "step": int(each["step"]),
            "real_tokens": each["real_tokens"],
            "slots": each["real_tokens"] + each["padding_tokens"],
            "seconds": each["step_seconds"],
            "loss": each.get("loss"),
        }
        for each in metrics.history
    ]


def summarize(trainer: Any, metrics: MetricsCallback) -> Summary:
    """Summarise all steps; the first log entry is warm-up, and counts in the speed only if it is the only entry."""
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


WASTE = 0.2
"""The share of padding above which a hint is printed."""


def hint(summary: Summary, *, patched: bool, head_too: bool) -> str | None:
    """Return a line about the flag that avoids padding, or None if there is little padding or no such flag.

    Args:
        summary: the run's summary.
        patched: whether the backbone skipped padding.
        head_too: whether the loss head skipped padding too, or no flag could make it do so.
    """
    if summary.padding_share <= WASTE or (patched and head_too):
        return None
    padding = summary.slots - summary.real_tokens
    share = f"hint: {summary.padding_share:.0%} of the slots ({padding:,} of {summary.slots:,}) were padding"
    if not patched:
        return f"{share}, and every layer worked on them; without --no_patch the backbone skips them."
    return (
        f"{share}: the patched backbone skipped them, but the loss head did not; with --padding_free the head skips "
        "them too, and --packing also fills each step."
    )
