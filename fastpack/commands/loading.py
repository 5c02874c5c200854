"""Tokenizer, data and model of the commands that train, from local files as well as from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpack.commands import UsageError, read_dtype
from fastpack.text import counted

if TYPE_CHECKING:
    from fastpack.commands.arguments import Given
    from fastpack.commands.training import Command

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""The reader of ``datasets`` for each kind of local file."""


def load_tokenizer(given: Given) -> Any:
    """The tokenizer asked for, or the model's own."""
    from transformers import AutoTokenizer

    source: Any = given.ours.tokenizer or given.model.model_name_or_path or given.ours.random_init
    if given.ours.tokenizer is None and Path(source).is_file():
        raise UsageError(f"{source} is a config and holds no tokenizer: pass --tokenizer FOLDER")
    revision = given.model.model_revision if source == given.model.model_name_or_path else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=given.training.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        unknown = "" if Path(source).is_dir() else f"; or is the name wrong? There is no folder {source} here"
        raise UsageError(f"no tokenizer in {source}: pass --tokenizer FOLDER{unknown} ({error})") from error
    if tokenizer.vocab_size == 0:  # transformers makes an empty one where it finds a config but no files
        raise UsageError(f"no tokenizer in {source}: pass --tokenizer FOLDER")
    return tokenizer


def load_dataset(command: Command, given: Given) -> tuple[Any, Any]:
    """The training split, and the evaluation split where the trainer is to evaluate (else None)."""
    from datasets.exceptions import DatasetsError
    from trl import get_dataset  # type: ignore[attr-defined]

    script, training = given.script, given.training
    name = script.dataset_name or "the mixture of datasets"
    try:
        splits = get_dataset(given.mixture) if given.mixture.datasets else _splits(script)
    except DatasetsError as error:
        cause = error.__cause__ or error
        raise UsageError(f"{name} can't be read as a data set: {cause}") from error
    except StopIteration as error:  # what datasets raises on a file without a line
        raise UsageError(f"{name} holds no rows") from error
    if not isinstance(splits, dict):
        splits = {script.dataset_train_split: splits}
    train = _split(splits, script.dataset_train_split, name)
    _check_columns(train, name, command, training)
    if training.eval_strategy == "no":
        return train, None
    return train, _split(splits, script.dataset_test_split, name)


def _splits(script: Any) -> Any:
    """The data set of ``--data``: its splits, or one alone."""
    import datasets

    name = script.dataset_name
    path = Path(name)
    if path.is_file():
        if path.suffix not in READERS:
            raise UsageError(f"{name}: a local data set is one of {', '.join(READERS)}, or a folder of them")
        return datasets.load_dataset(
            READERS[path.suffix], data_files={"train": name}, streaming=script.dataset_streaming
        )
    if path.suffix in READERS:
        raise UsageError(f"no such file: {name}")
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return datasets.load_from_disk(name)
    return datasets.load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)


def _split(splits: Any, split: str, name: str) -> Any:
    if split not in splits:
        raise UsageError(
            f"{name} has no split {split!r}, only {', '.join(map(repr, splits))}: choose with --dataset_train_split, "
            "and --dataset_test_split where --eval_strategy is set"
        )
    return splits[split]


def _check_columns(dataset: Any, name: str, command: Command, training: Any) -> None:
    columns = set(dataset.column_names or ())
    given = [wanted for wanted in command.columns(training) if wanted <= columns]
    if columns and not given:
        raise UsageError(f"{name} has the columns {', '.join(sorted(columns))}; {command.columns_in_words(training)}")
    table = getattr(dataset, "data", None)
    if not given or table is None or len(table) != len(dataset):
        return  # a stream, or rows that were chosen from a table
    for column in sorted(given[0]):
        if missing := table.column(column).null_count:
            raise UsageError(f"{name} has {counted(missing, 'row')} without a value of {column!r}: leave them out")


def random_model(given: Given) -> Any:
    """A causal LM of the config of ``--random_init``, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = given.ours.random_init
    assert source is not None
    if source.endswith(".json") and not Path(source).is_file():
        raise UsageError(f"no such file: {source}")
    trust = given.training.trust_remote_code
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust)
    settings: dict[str, Any] = {"trust_remote_code": trust}
    if given.model.dtype not in (None, "auto"):
        settings["dtype"] = read_dtype(given.model.dtype)
    if given.model.attn_implementation is not None:
        settings["attn_implementation"] = given.model.attn_implementation
    # where it will train: a large model is drawn in a second there, and in minutes on the host
    with given.training.device:
        return AutoModelForCausalLM.from_config(config, **settings)
