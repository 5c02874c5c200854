"""``fastpack sft``: fine-tune with TRL's own SFTTrainer, patched."""

from __future__ import annotations

from collections.abc import Sequence

from fastpack.cli.arguments import Command
from fastpack.cli.training import run


def main(arguments: Sequence[str]) -> int:
    """Train, and print a summary."""
    return run(SFT, arguments)


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
)
