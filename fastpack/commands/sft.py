"""``fastpack sft``: fine-tune with TRL's own SFTTrainer, patched."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from fastpack.commands.training import Command, run

if TYPE_CHECKING:
    from fastpack.commands.arguments import Given
    from fastpack.commands.meter import Summary
    from fastpack.report import PatchReport


def main(arguments: Sequence[str]) -> int:
    """Train, and print what the run did."""
    return run(SFT, arguments)


def _columns(training: Any) -> Collection[set[str]]:
    return {"messages"}, {"conversations"}, {"prompt", "completion"}, {training.dataset_text_field}, {"input_ids"}


def _columns_in_words(training: Any) -> str:
    text = training.dataset_text_field
    return f"SFT takes messages, or prompt and completion, or {text} (--dataset_text_field names another)"


def _refuses_length(training: Any) -> bool:
    """TRL refuses a max_length with padding_free unless packing cuts the rows."""
    return training.padding_free and not training.packing


def _advise(summary: Summary, given: Given, ranks: int, report: PatchReport) -> str | None:
    from fastpack.commands.meter import hint

    if given.ours.max_tokens is not None:
        return None  # each step is full, as far as whole examples go
    training = given.training
    per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps * ranks
    full_step = per_step * given.max_length if given.max_length else None
    fused = given.ours.loss is not None and "loss" not in dict(report.skipped)
    return hint(summary, patched=given.ours.patch, packing=training.packing, full_step=full_step, fused_loss=fused)


SFT = Command(
    name="sft",
    trainer="SFTTrainer",
    config="SFTConfig",
    what="Fine-tune with TRL's SFTTrainer, padding-free.",
    formats="messages; prompt and completion; text",
    flags="[--packing] ",
    columns=_columns,
    columns_in_words=_columns_in_words,
    advise=_advise,
    refuses_length=_refuses_length,
)
