"""The arguments of the commands that train: TRL's, and fastpack's own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
import trl
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser  # type: ignore[attr-defined]
from yaml import YAMLError

from fastpack.attention_dispatch import BACKENDS
from fastpack.cli import UsageError, loading_errors
from fastpack.data.token_budget import TOO_LONG
from fastpack.ops.implementation import IMPLEMENTATIONS
from fastpack.patching.options import OFFLOADS, PatchKeywords, PatchOptions, TokenBudget

PATCH_OPTIONS = ("attention", "kernels", "graphs", "loss", "offload", "share_prefixes")
"""The arguments that :func:`fastpack.patch` takes under the same names."""
BUDGET = ("max_tokens", "same_steps", "too_long")
"""The arguments that make up a token budget."""


@dataclass
class OwnArguments:
    """The flags that fastpack's commands add to TRL's."""

    tokenizer: str | None = field(
        default=None, metadata={"help": "Folder or hub id of the tokenizer. Default: the model's own."}
    )
    random_init: str | None = field(
        default=None,
        metadata={
            "help": "Instead of --model_name_or_path: a config (JSON file, folder or hub id), to build a model with "
            "random weights."
        },
    )
    attention: str = field(
        default="auto",
        metadata={"help": "Attention backend of the patched model.", "choices": ["auto", *BACKENDS]},
    )
    kernels: str = field(
        default="auto",
        metadata={"help": "Implementation of norms, RoPE and gated MLPs.", "choices": list(IMPLEMENTATIONS)},
    )
    graphs: str | None = field(
        default=None,
        metadata={"help": "Replay the decoder layers as CUDA graphs where that is exact.", "choices": ["auto"]},
    )
    loss: str | None = field(
        default=None,
        metadata={
            "help": "For sft: compute the training loss without holding the logits; for grpo and dpo: the "
            "log-probabilities of policy and reference. TRL's metrics stay.",
            "choices": ["fused"],
        },
    )
    offload: str | None = field(
        default=None,
        metadata={
            "help": "With gradient checkpointing: keep the layer inputs in host memory (checkpoints), or also tensors "
            "that are expensive to compute again (activations).",
            "choices": list(OFFLOADS),
        },
    )
    share_prefixes: str | None = field(
        default=None,
        metadata={"help": "Run a prompt only once if several sequences share it.", "choices": ["auto"]},
    )
    max_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Fill micro-batches with whole examples up to this many tokens on each rank, instead of "
            "--per_device_train_batch_size examples; both sides of a pair count."
        },
    )
    same_steps: bool = field(
        default=False,
        metadata={
            "help": "With --max_tokens: each step keeps its usual examples, and batches over the budget are split."
        },
    )
    too_long: str = field(
        default="error",
        metadata={
            "help": "With --max_tokens: what to do with an example over the budget; truncate keeps its first tokens "
            "(for pairs, set --max_length instead).",
            "choices": list(TOO_LONG),
        },
    )
    shard_base: bool = field(
        default=False,
        metadata={
            "help": "With several processes and LoRA: shard the frozen layers over them, and keep adapters whole. "
            "Instead of --fsdp, which shards adapters, too."
        },
    )
    metrics: bool = field(
        default=True,
        metadata={
            "help": "Log tokens, padding, speed, memory and MFU to the loggers of --report_to; --no_metrics turns "
            "this off."
        },
    )
    patch: bool = field(
        default=True, metadata={"help": "Patch the model with fastpack; --no_patch trains the stock model to compare."}
    )
    json: str | None = field(default=None, metadata={"help": "File to write the logs of each step and the summary to."})

    def patch_keywords(self) -> PatchKeywords:
        """Return the keywords that :func:`fastpack.patch` takes for a model."""
        keywords: Any = {name: getattr(self, name) for name in PATCH_OPTIONS}
        return keywords

    def trainer_keywords(self) -> PatchKeywords:
        """Return the keywords that :func:`fastpack.patch` takes for a trainer."""
        too_long: Any = self.too_long
        budget = None if self.max_tokens is None else TokenBudget(self.max_tokens, self.same_steps, too_long)
        return {**self.patch_keywords(), "max_tokens": budget}


@dataclass
class ParsedArgs:
    """The parsed arguments.

    Attributes:
        script, training, model, mixture: TRL's ``ScriptArguments``, the trainer's config, ``ModelConfig`` and
            ``DatasetMixtureConfig``, whose ``datasets`` are empty unless a ``--config`` mixes several.
        ours: fastpack's own arguments.
        max_length: the requested length; ``training.max_length`` is None if the trainer refuses its own default. None
            for trainers without such a setting.
        loaded: whatever a command loaded while it checked its arguments.
    """

    script: Any
    training: Any
    model: Any
    mixture: Any
    ours: OwnArguments
    max_length: int | None
    loaded: dict[str, Any] = field(default_factory=dict)

    @property
    def uncut(self) -> bool:
        """Return whether ``max_length`` was not set and the trainer's default was turned off."""
        return self.max_length != getattr(self.training, "max_length", None)


@dataclass(frozen=True)
class Command:
    """A training command, with the properties of its trainer.

    Attributes:
        name: the subcommand.
        trainer, config: the names of TRL's classes.
        what: one sentence for the help text.
        formats: the accepted data formats, for the help text.
        flags: flags to show in the usage line.
        columns: a function that returns, for the trainer's config, the sets of columns of which a data set must have
            one.
        models: a function of the policy (a model, or where to load it from) and the arguments. It returns keyword
            arguments of the trainer, which are added to the usual arguments or replace them.
        script: TRL's class of the script's arguments.
        own: the class of fastpack's own arguments.
        check: a function that checks the parsed arguments, before anything is loaded.
        check_data: a function that checks the columns of the training data, before a model is loaded.
        metric: a metric to show in the summary beside the loss, or None.
        why_not_fused: why ``--loss fused`` is refused, or None if the trainer's loss can be fused.
    """

    name: str
    trainer: str
    config: str
    what: str
    formats: str
    flags: str
    columns: Callable[[Any], Collection[set[str]]]
    models: Callable[[Any, ParsedArgs], dict[str, Any]] = lambda source, args: {}
    script: type = ScriptArguments
    own: type[OwnArguments] = OwnArguments
    check: Callable[[ParsedArgs], None] = lambda args: None
    check_data: Callable[[ParsedArgs, list[str]], None] = lambda args, columns: None
    metric: str | None = None
    why_not_fused: str | None = None


_IN_A_FILE = " In a --config, --data is dataset_name, --no_patch is patch: false, and --no_metrics is metrics: false."


class _Unset(int):
    """A default, distinguishable from the same number passed by the user."""


class _Parser(TrlParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def parse(command: Command, arguments: Sequence[str]) -> ParsedArgs:
    """Parse the command line, and ``--config FILE`` as TRL does.

    Raises:
        UsageError: unknown flags, values out of range, or nothing to train.
    """
    try:
        parsed: Any = _parser(command).parse_args_and_config(list(arguments))
    except (*loading_errors(), TypeError, YAMLError) as error:  # TypeError: from checks in TRL's dataclasses
        raise UsageError(f"{error}{_IN_A_FILE if 'from config file' in str(error) else ''}") from error
    script, training, model, mixture, ours = parsed
    args = ParsedArgs(script, training, model, mixture, ours, getattr(training, "max_length", None))
    _check(command, args)
    command.check(args)
    training.resume_from_checkpoint = _checkpoint(training)
    # With padding_free, TRL's SFT refuses max_length, even its own default, unless packing cuts the rows. DPO never
    # packs and always cuts.
    cuts = not getattr(training, "padding_free", False) or getattr(training, "packing", True)
    if isinstance(args.max_length, _Unset):
        training.max_length = int(training.max_length) if cuts else None
    return args


def _parser(command: Command) -> _Parser:
    types: Any = (command.script, getattr(trl, command.config), ModelConfig, DatasetMixtureConfig, command.own)
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
    parser.set_defaults(
        logging_steps=1,
        output_dir=f"outputs/{command.name}",
        dataloader_pin_memory=torch.accelerator.is_available(),
        ddp_find_unused_parameters=False,  # none are unused; the search fails with reentrant checkpointing
    )
    if (longest := parser.get_default("max_length")) is not None:
        parser.set_defaults(max_length=_Unset(longest))
    if not torch.accelerator.is_available():
        # TRL's default bfloat16 is refused on a CPU; and without use_cpu each process of torchrun trains alone
        parser.set_defaults(bf16=False, use_cpu=True)
    return parser


def _check(command: Command, args: ParsedArgs) -> None:
    """Raise if flags don't go together, or if a ``--config`` has values that argparse would refuse."""
    script, ours, mixed = args.script, args.ours, bool(args.mixture.datasets)
    if (ours.random_init is None) == (args.model.model_name_or_path is None):
        raise UsageError("pass either --model_name_or_path MODEL or --random_init CONFIG")
    if script.dataset_name is None and not mixed:
        raise UsageError(
            "pass --data (or --dataset_name): a .jsonl file, a folder or a hub id; or a --config with `datasets`"
        )
    if script.dataset_name is not None and mixed:
        raise UsageError(f"pass only one: --data {script.dataset_name}, or the `datasets` of the --config")
    PatchOptions(**{name: getattr(ours, name) for name in PATCH_OPTIONS}).check()
    changed = [name for name in (*PATCH_OPTIONS, *BUDGET) if getattr(ours, name) != getattr(OwnArguments(), name)]
    if changed and not ours.patch:
        flags = ", ".join(f"--{name}" for name in changed)
        raise UsageError(f"{flags}: needs fastpack, but --no_patch trains without it; leave one or the other out")
    if ours.max_tokens is None and (budget_flags := [f"--{name}" for name in changed if name in BUDGET]):
        raise UsageError(f"{budget_flags[0]} changes how --max_tokens works: pass --max_tokens too")
    if ours.loss is not None and command.why_not_fused is not None:
        raise UsageError(f"--loss {ours.loss} is for fastpack sft, dpo and grpo: {command.why_not_fused}. Leave it out")
    if args.training.use_liger_kernel and find_spec("liger_kernel") is None:
        raise UsageError(
            "--use_liger_kernel needs Liger, which is not installed: pip install liger-kernel, or leave the flag out"
        )


def _checkpoint(training: Any) -> str | None:
    """Return the folder to resume from, or None; ``True`` stands for the last one in ``--output_dir``."""
    value, folder = str(training.resume_from_checkpoint), Path(training.output_dir)
    if value.lower() in ("none", "false"):
        return None
    checkpoint = Path(value)
    if value.lower() == "true":
        checkpoint = Path((get_last_checkpoint(folder) if folder.is_dir() else None) or folder)
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        raise UsageError(
            f"--resume_from_checkpoint {value}: {checkpoint} is not a checkpoint, it has no {TRAINER_STATE_NAME}. "
            f"Pass a checkpoint's folder, or True for the last checkpoint-N in --output_dir {folder}; or leave it out"
        )
    return str(checkpoint)
