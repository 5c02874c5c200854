"""The arguments of ``fastpack sft``: TRL's, and ours beside them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser  # type: ignore[attr-defined]

from fastpack.attention_dispatch import BACKENDS
from fastpack.commands import UsageError
from fastpack.ops.implementation import IMPLEMENTATIONS
from fastpack.options import PatchKeywords


@dataclass
class OwnArguments:
    """What ``fastpack sft`` adds to TRL's arguments."""

    tokenizer: str | None = field(
        default=None, metadata={"help": "Folder or hub id of the tokenizer. Default: that of the model."}
    )
    random_init: str | None = field(
        default=None,
        metadata={
            "help": "Instead of --model_name_or_path: a config (JSON file, folder or hub id) of which to build a "
            "model with random weights."
        },
    )
    attention: str = field(
        default="auto",
        metadata={"help": "Attention backend of the patched model.", "choices": ["auto", *BACKENDS]},
    )
    kernels: str = field(
        default="auto",
        metadata={"help": "What computes norms, RoPE and gated units.", "choices": list(IMPLEMENTATIONS)},
    )
    graphs: str | None = field(
        default=None,
        metadata={"help": "Replay the decoder stack as CUDA graphs wherever that is right.", "choices": ["auto"]},
    )
    offload: str | None = field(
        default=None,
        metadata={"help": "With gradient checkpointing: layer inputs wait in host memory.", "choices": ["checkpoints"]},
    )
    patch: bool = field(
        default=True, metadata={"help": "Patch the model with fastpack; --no_patch trains it stock, to compare."}
    )
    json: str | None = field(
        default=None, metadata={"help": "File to write the losses of each step and the summary's figures to."}
    )

    def patch_keywords(self) -> PatchKeywords:
        """What of these :func:`fastpack.patch` takes."""
        found: Any = {name: getattr(self, name) for name in ("attention", "kernels", "graphs", "offload")}
        keywords: PatchKeywords = found
        return keywords


@dataclass
class SftArguments:
    """Everything that was asked for.

    Attributes:
        max_length: as asked for; ``training.max_length`` is None under ``--padding_free``, where TRL can't apply it.
    """

    script: Any
    training: Any
    model: Any
    ours: OwnArguments
    max_length: int | None


class _Unset(int):
    """A default that can be told from the same number given by the user."""


class _Parser(TrlParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `fastpack sft --help`)")


def parse(arguments: Sequence[str]) -> SftArguments:
    """Parse the command line, and ``--config FILE`` as TRL does.

    Raises:
        UsageError: unknown flags, values out of range, or nothing to train.
    """
    types: Any = (ScriptArguments, SFTConfig, ModelConfig, OwnArguments)
    parser = _Parser(
        types,
        prog="fastpack sft",
        usage="fastpack sft --model_name_or_path MODEL --dataset_name DATA [--packing] [any flag of TRL's SFTConfig]",
        description="Fine-tune with TRL's SFTTrainer, padding-free. MODEL: a folder or hub id. DATA: a .jsonl file, a "
        "folder or hub id, in any format that TRL takes (messages; prompt and completion; text).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default_length = _Unset(parser.get_default("max_length"))
    parser.set_defaults(
        logging_steps=1,
        output_dir="outputs/sft",
        max_length=default_length,
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    if not torch.accelerator.is_available():
        parser.set_defaults(bf16=False)  # TRL's default is bfloat16, which it refuses on a CPU
    try:
        script, training, model, ours = parser.parse_args_and_config(list(arguments))
    except (OSError, ValueError, RuntimeError, ImportError) as error:  # what TRL's dataclasses check
        raise UsageError(str(error)) from error
    if (ours.random_init is None) == (model.model_name_or_path is None):
        raise UsageError("pass either --model_name_or_path MODEL or --random_init CONFIG")
    if script.dataset_name is None:
        raise UsageError("pass --dataset_name: a .jsonl file, a folder or a hub id")
    wanted = training.max_length
    if isinstance(wanted, _Unset):
        # TRL refuses a max_length with padding_free unless packing cuts the rows; its own default needn't refuse.
        training.max_length = None if training.padding_free and not training.packing else int(wanted)
    return SftArguments(script, training, model, ours, None if wanted is None else int(wanted))
