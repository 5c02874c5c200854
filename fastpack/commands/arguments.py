"""The arguments of the commands that train: TRL's, and ours beside them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import trl
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser  # type: ignore[attr-defined]
from yaml import YAMLError

from fastpack.attention_dispatch import BACKENDS
from fastpack.batching.budget import TOO_LONG
from fastpack.commands import UsageError
from fastpack.ops.implementation import IMPLEMENTATIONS
from fastpack.options import OFFLOADS, PatchKeywords, PatchOptions, TokenBudget, not_a_choice

if TYPE_CHECKING:
    from fastpack.commands.training import Command

PATCH_OPTIONS = ("attention", "kernels", "graphs", "loss", "offload", "share_prefixes")
"""Which of our own arguments :func:`fastpack.patch` takes, under the same names."""


@dataclass
class OwnArguments:
    """What fastpack's commands add to TRL's arguments."""

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
    loss: str | None = field(
        default=None,
        metadata={
            "help": "Of sft: the head's own loss in training, without logits, in place of TRL's; the metrics stay.",
            "choices": ["fused"],
        },
    )
    offload: str | None = field(
        default=None,
        metadata={
            "help": "With gradient checkpointing: what waits in host memory, layer inputs alone, or what is dear to "
            "compute again too.",
            "choices": list(OFFLOADS),
        },
    )
    share_prefixes: str | None = field(
        default=None,
        metadata={"help": "Run what sequences have in common at their beginnings once.", "choices": ["auto"]},
    )
    max_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Micro-batches of whole examples, of at most so many tokens on each rank, instead of "
            "--per_device_train_batch_size examples; of a pair both sides count."
        },
    )
    same_steps: bool = field(
        default=False,
        metadata={
            "help": "With --max_tokens: each step keeps the examples that it has without, and batches over the budget "
            "are split."
        },
    )
    too_long: str = field(
        default="error",
        metadata={
            "help": "With --max_tokens: what becomes of a longer example; truncate keeps its first tokens, and "
            "--max_length cuts the sides of a pair.",
            "choices": list(TOO_LONG),
        },
    )
    metrics: bool = field(
        default=True,
        metadata={
            "help": "Log tokens, padding, speed, memory and MFU, to whatever --report_to names; "
            "--no_metrics leaves that to others."
        },
    )
    patch: bool = field(
        default=True, metadata={"help": "Patch the model with fastpack; --no_patch trains it stock, to compare."}
    )
    json: str | None = field(
        default=None, metadata={"help": "File to write what each step logged and the summary's figures to."}
    )

    def patch_keywords(self) -> PatchKeywords:
        """What of these :func:`fastpack.patch` takes, for a model."""
        found: Any = {name: getattr(self, name) for name in PATCH_OPTIONS}
        keywords: PatchKeywords = found
        return keywords

    def trainer_keywords(self) -> PatchKeywords:
        """The same for a trainer."""
        if self.max_tokens is None:
            return self.patch_keywords()
        too_long: Any = self.too_long
        budget = TokenBudget(self.max_tokens, same_steps=self.same_steps, too_long=too_long)
        return {**self.patch_keywords(), "max_tokens": budget}


@dataclass
class Given:
    """Everything that was asked for.

    Attributes:
        script, training, model, mixture: TRL's ``ScriptArguments``, the trainer's config, ``ModelConfig`` and
            ``DatasetMixtureConfig``, whose ``datasets`` are empty unless a ``--config`` mixes several.
        max_length: as asked for; ``training.max_length`` is None where the trainer refuses its own default.
        uncut: that default, where it is off.
    """

    script: Any
    training: Any
    model: Any
    mixture: Any
    ours: OwnArguments
    max_length: int | None
    uncut: int | None = None


_IN_A_FILE = " In a --config, --data is dataset_name, --no_patch is patch: false, and --no_metrics metrics: false."


class _Unset(int):
    """A default that can be told from the same number given by the user."""


class _Parser(TrlParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def parse(command: Command, arguments: Sequence[str]) -> Given:
    """Parse the command line, and ``--config FILE`` as TRL does.

    Raises:
        UsageError: unknown flags, values out of range, or nothing to train.
    """
    types: Any = (ScriptArguments, getattr(trl, command.config), ModelConfig, DatasetMixtureConfig, OwnArguments)
    parser = _Parser(
        types,
        prog=f"fastpack {command.name}",
        usage=f"fastpack {command.name} --model_name_or_path MODEL --data DATA {command.flags}"
        f"[any flag of TRL's {command.config}]",
        description=f"{command.what} MODEL: a folder or hub id. DATA: a .jsonl file, a folder or hub id, in any format "
        f"that TRL takes ({command.formats}).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", dest="dataset_name", metavar="DATA", help="The same as --dataset_name.")
    default_length = _Unset(parser.get_default("max_length"))
    parser.set_defaults(
        logging_steps=1,
        output_dir=f"outputs/{command.name}",
        max_length=default_length,
        dataloader_pin_memory=torch.accelerator.is_available(),
        ddp_find_unused_parameters=False,  # each has a gradient, and looking fails with reentrant checkpointing
    )
    if not torch.accelerator.is_available():
        # TRL's default is bfloat16, which it refuses on a CPU; and unless told, torchrun's processes each train alone
        parser.set_defaults(bf16=False, use_cpu=True)
    try:
        script, training, model, mixture, ours = parser.parse_args_and_config(list(arguments))
    except (
        OSError,
        ValueError,
        TypeError,
        RuntimeError,
        ImportError,
        YAMLError,
    ) as error:  # what TRL's dataclasses check
        raise UsageError(f"{error}{_IN_A_FILE if 'from config file' in str(error) else ''}") from error
    if (ours.random_init is None) == (model.model_name_or_path is None):
        raise UsageError("pass either --model_name_or_path MODEL or --random_init CONFIG")
    _check_ours(ours)
    if ours.loss is not None and command.name != "sft":
        raise UsageError(
            f"--loss is for fastpack sft: TRL's {command.trainer} brings a loss of other things than labels"
        )
    if training.use_liger_kernel and find_spec("liger_kernel") is None:
        raise UsageError(
            "--use_liger_kernel needs Liger, not installed here: pip install liger-kernel, or leave it out"
        )
    for flag, given in (("--same_steps", ours.same_steps), ("--too_long", ours.too_long != "error")):
        if given and ours.max_tokens is None:
            raise UsageError(f"{flag} says how --max_tokens is kept: pass that too")
    if script.dataset_name is None and not mixture.datasets:
        raise UsageError(
            "pass --data (or --dataset_name): a .jsonl file, a folder or a hub id; or a --config with `datasets`"
        )
    if script.dataset_name is not None and mixture.datasets:
        raise UsageError(f"pass one of them: --data {script.dataset_name}, or the `datasets` of the --config")
    training.resume_from_checkpoint = _checkpoint(training)
    wanted, uncut = training.max_length, None
    if isinstance(wanted, _Unset):  # what the user did not ask for is no reason to refuse
        uncut = int(wanted) if command.refuses_length(training) else None
        training.max_length = int(wanted) if uncut is None else None
    return Given(script, training, model, mixture, ours, None if wanted is None else int(wanted), uncut)


def _check_ours(ours: OwnArguments) -> None:
    """Raise for values that argparse did not see, in a ``--config``, and for flags that a stock run has no use for."""
    PatchOptions(**{name: getattr(ours, name) for name in PATCH_OPTIONS}).check()
    if ours.too_long not in TOO_LONG:
        raise not_a_choice("too_long", ours.too_long, TOO_LONG)
    if ours.max_tokens is not None and ours.max_tokens < 1:
        raise UsageError(f"--max_tokens {ours.max_tokens}: pass the tokens of a micro-batch, 1 or more")
    if ours.patch:
        return
    plain = OwnArguments()
    names = [name for name in (*PATCH_OPTIONS, "max_tokens") if getattr(ours, name) != getattr(plain, name)]
    if names:
        flags = ", ".join(f"--{name}" for name in names)
        raise UsageError(f"{flags}: fastpack's, and --no_patch asks for a stock run; leave one or the other out")


def _checkpoint(training: Any) -> str | None:
    """The folder to go on from; ``True``, which a flag can only spell, is the last one in ``--output_dir``."""
    asked = training.resume_from_checkpoint
    named = str(asked).lower()
    if named in ("none", "false"):
        return None
    folder = Path(training.output_dir)
    if named == "true":
        last = get_last_checkpoint(folder) if folder.is_dir() else None
        if last is None:
            raise UsageError(
                f"--resume_from_checkpoint {asked}: no checkpoint-N in {folder}, --output_dir; pass the folder of a "
                "checkpoint, or leave the flag out to begin anew"
            )
        asked = last
    if not (Path(asked) / TRAINER_STATE_NAME).is_file():
        raise UsageError(
            f"--resume_from_checkpoint {asked}: no checkpoint of a trainer there (no {TRAINER_STATE_NAME}); pass the "
            f"folder of one, as {folder / 'checkpoint-N'}, or True for the last one in --output_dir"
        )
    return str(asked)
