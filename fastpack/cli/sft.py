"""``fastpack sft``: fine-tune with TRL's own SFTTrainer, patched."""

from __future__ import annotations

from collections.abc import Sequence

from fastpack.cli.arguments import Command, ParsedArgs
from fastpack.cli.meter import Summary, hint
from fastpack.cli.training import run
from fastpack.patching.report import PatchReport


def main(arguments: Sequence[str]) -> int:
    """Train, and print what the run did."""
    return run(SFT, arguments)


def _advise(summary: Summary, args: ParsedArgs, ranks: int, report: PatchReport) -> str | None:
    if args.ours.max_tokens is not None:
        return None  # each step is full, as far as whole examples go
    training = args.training
    per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps * ranks
    full_step = per_step * args.max_length if args.max_length else None
    fused = args.ours.loss is not None and "loss" not in dict(report.skipped)
    return hint(summary, patched=args.ours.patch, packing=training.packing, full_step=full_step, fused_loss=fused)


SFT = Command(
    name="sft",
    trainer="SFTTrainer",
    config="SFTConfig",
    what="Fine-tune with TRL's SFTTrainer, padding-free.",
    formats="messages; prompt and completion; text, or another column that --dataset_text_field names",
    flags="[--packing] ",
    columns=lambda training: (
        {"messages"},
        {"conversations"},
        {"prompt", "completion"},
        {training.dataset_text_field},
        {"input_ids"},
    ),
    advise=_advise,
)
