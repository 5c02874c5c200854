"""Load the tokenizer, data and model of the training commands, from local files or from the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import get_dataset  # type: ignore[attr-defined]

from fastpack.cli import READERS, UsageError, read_dtype, require_there
from fastpack.cli.arguments import Command, ParsedArgs
from fastpack.utils.console import counted


def load_tokenizer(args: ParsedArgs) -> Any:
    """Load the requested tokenizer, or the model's own."""
    model, trust = args.model, args.training.trust_remote_code
    source: Any = args.ours.tokenizer or model.model_name_or_path or args.ours.random_init
    revision = model.model_revision if source == model.model_name_or_path else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust)
        if tokenizer.vocab_size == 0:
            raise ValueError("without tokenizer files transformers builds an empty tokenizer")
    except (OSError, ValueError, KeyError) as error:
        missing = f"no tokenizer in {source}: pass --tokenizer FOLDER, or a name on the hub"
        raise UsageError(f"{missing} ({error})") from error
    return tokenizer


def load_dataset(command: Command, args: ParsedArgs) -> tuple[Any, Any]:
    """Return the training split, and the evaluation split if the trainer evaluates, else None."""
    script = args.script
    name = script.dataset_name or "the mixture of datasets"
    try:
        splits = get_dataset(args.mixture) if args.mixture.datasets else _splits(script)
    except DatasetsError as error:
        raise UsageError(f"{name} can't be read as a data set: {error.__cause__ or error}") from error
    except StopIteration as error:  # datasets raises this for an empty file
        raise UsageError(f"{name} holds no rows") from error
    if not isinstance(splits, dict):
        splits = {script.dataset_train_split: splits}
    names = [script.dataset_train_split]
    if args.training.eval_strategy != "no":
        names.append(script.dataset_test_split)
    for split in names:
        if split not in splits:
            raise UsageError(
                f"{name} has no split {split!r}, only {', '.join(map(repr, splits))}: choose one with "
                "--dataset_train_split (and with --dataset_test_split if --eval_strategy is set)"
            )
    _check_columns(splits[names[0]], name, command, args.training)
    return splits[names[0]], splits[names[1]] if len(names) > 1 else None


def _splits(script: Any) -> Any:
    """Return the data set of ``--data``: its splits, or a single split."""
    name, path, stream = script.dataset_name, Path(script.dataset_name), script.dataset_streaming
    require_there(name)
    if path.is_file():
        if path.suffix not in READERS:
            raise UsageError(
                f"{name}: a local data set is a file that ends in {', '.join(READERS)}, or a folder of such files"
            )
        return datasets.load_dataset(READERS[path.suffix], data_files={"train": name}, streaming=stream)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return datasets.load_from_disk(name)
    return datasets.load_dataset(name, name=script.dataset_config, streaming=stream)


def _check_columns(dataset: Any, name: str, command: Command, training: Any) -> None:
    columns = set(dataset.column_names or ())
    present = next((required for required in command.columns(training) if required <= columns), set())
    if columns and not present:
        takes = f"{command.name.upper()} takes {command.formats}"
        raise UsageError(f"{name} has the columns {', '.join(sorted(columns))}; {takes}")
    table = getattr(dataset, "data", None)
    if table is None or len(table) != len(dataset):
        return  # a stream, or rows that were chosen from a table
    for column in sorted(present):
        if missing := table.column(column).null_count:
            raise UsageError(f"{name} has {counted(missing, 'row')} without a value of {column!r}: leave them out")


def shards(training: Any) -> bool:
    """Return whether TRL shards a frozen model while it builds the trainer; if so, the model is patched before."""
    flags = (os.environ.get(f"ACCELERATE_USE_{engine}", "false") for engine in ("FSDP", "DEEPSPEED"))
    return bool(training.fsdp or training.deepspeed or "true" in flags)


def random_model(source: str, args: ParsedArgs, seed: int | None = None) -> Any:
    """Return a causal LM with the config in ``source`` and random weights, of the trainer's seed or another."""
    trust, requested = args.training.trust_remote_code, args.model
    require_there(source)
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust)
    settings: dict[str, Any] = {"trust_remote_code": trust}
    if requested.dtype not in (None, "auto"):
        settings["dtype"] = read_dtype(requested.dtype)
    if requested.attn_implementation is not None:
        settings["attn_implementation"] = requested.attn_implementation
    set_seed(args.training.seed if seed is None else seed)
    # initialise on the training device: for a large model this takes a second, and minutes on the host
    with args.training.device:
        return AutoModelForCausalLM.from_config(config, **settings)
