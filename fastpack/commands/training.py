"""What ``fastpack sft`` and ``fastpack dpo`` share: one of TRL's own trainers, built, patched, run and summed up.

Every flag of TRL's script of the same name works: the arguments are parsed by TRL's parser into its
``ScriptArguments``, the trainer's config and ``ModelConfig``; ours are added beside them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastpack
from fastpack.commands import UsageError, loading_errors, quiet, require, require_file, require_trl_on_cpu

if TYPE_CHECKING:
    from fastpack.commands.arguments import Given
    from fastpack.commands.meter import Summary
    from fastpack.metrics import MetricsCallback
    from fastpack.report import PatchReport

Logs = Mapping[str, Any]


@dataclass(frozen=True)
class Command:
    """What one of the commands is, and what its trainer has of its own.

    Attributes:
        name: of the subcommand; ``trainer`` and ``config`` name TRL's classes.
        what, formats, flags: one sentence, the formats of data, and flags worth a mention, for people.
        columns: from the trainer's config, the sets of columns of which a data set must have one.
        columns_in_words: the same for a message.
        advise: from the summary, the arguments, the number of ranks and the trainer's report, one line on what could be
            saved, or None.
        refuses_length: whether the trainer refuses its own default of ``max_length`` with this config.
        models: from the policy (a model, or where to load it) and the arguments, keyword arguments that the trainer
            is given beside or instead of the usual ones.
        rows: from what the last step logged, further rows of the summary.
    """

    name: str
    trainer: str
    config: str
    what: str
    formats: str
    columns: Callable[[Any], Collection[set[str]]]
    columns_in_words: Callable[[Any], str]
    advise: Callable[[Summary, Given, int, PatchReport], str | None]
    flags: str = ""
    refuses_length: Callable[[Any], bool] = lambda training: False
    models: Callable[[Any, Given], dict[str, Any]] = lambda source, given: {}
    rows: Callable[[Logs], Sequence[tuple[str, str]]] = lambda logs: ()


def run(command: Command, arguments: Sequence[str]) -> int:
    """Train, and print what the run did.

    Raises:
        UsageError: the arguments ask for what can't be done; the message says why.
    """
    require(command.name, "trl", "datasets")
    quiet()
    from fastpack.commands.arguments import parse
    from fastpack.metrics import attach

    given = parse(command, arguments)
    if given.training.process_index == 0:  # which writes it
        require_file("--json", given.ours.json, made=given.training.output_dir)
    try:
        trainer = make_trainer(command, given)
        if given.ours.patch:
            fastpack.patch(trainer, **given.ours.trainer_keywords())
        metrics = attach(trainer)
        metrics.logs = given.ours.metrics
    except loading_errors() as error:
        # Until training begins, these are the messages of TRL, transformers and the hub about what they were given.
        raise UsageError(str(error)) from error
    if given.training.device.type == "cpu":
        require_trl_on_cpu(command.name)
    train(trainer, metrics, given)
    return _finish(command, trainer, metrics, given)


def make_trainer(command: Command, given: Given) -> Any:
    """The unmodified trainer that TRL's own script would build, on local files too."""
    import torch
    import trl
    from transformers import set_seed
    from trl import get_peft_config, get_quantization_config  # type: ignore[attr-defined]

    from fastpack.commands.loading import load_dataset, load_tokenizer, random_model

    training, model, ours = given.training, given.model, given.ours
    tokenizer = load_tokenizer(given)
    train_dataset, eval_dataset = load_dataset(command, given)
    quantization = get_quantization_config(model)
    with ExitStack() as cleanup:
        if ours.random_init is None:
            source: Any = model.model_name_or_path
        else:
            set_seed(training.seed)
            source = random_model(given)
            if quantization is not None:  # weights are quantized as they are loaded
                folder = cleanup.enter_context(tempfile.TemporaryDirectory())
                source.save_pretrained(folder)
                source = folder
        if isinstance(source, str):
            loading = {
                "revision": None if ours.random_init else model.model_revision,
                "trust_remote_code": training.trust_remote_code,
                "attn_implementation": model.attn_implementation,
                "dtype": model.dtype,
            }
            training.model_init_kwargs = {**loading, **(training.model_init_kwargs or {})}
        settings: dict[str, Any] = {
            "model": source,
            "args": training,
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "processing_class": tokenizer,
            "quantization_config": quantization if isinstance(source, str) else None,
            "peft_config": get_peft_config(model),
        }
        trainer: Any = getattr(trl, command.trainer)(**settings | command.models(source, given))
        for adapter in getattr(trainer.model, "peft_config", {}).values() if ours.random_init else ():
            adapter.base_model_name_or_path = ours.random_init  # a folder of weights goes, or there was none
    if given.script.ignore_bias_buffers:  # of DistributedDataParallel, as TRL's script does
        buffers = trainer.model.named_buffers()
        trainer.model._ddp_params_and_buffers_to_ignore = [name for name, b in buffers if b.dtype == torch.bool]
    ids, rows = len(tokenizer), trainer.model.get_input_embeddings().weight.shape[0]
    if ids > rows:
        raise UsageError(
            f"the tokenizer has {ids:,} ids, the model embeds {rows:,}: take the model's own tokenizer"
            + (", or set vocab_size in the config of --random_init" if ours.random_init else "")
        )
    return trainer


def train(trainer: Any, metrics: MetricsCallback, given: Given) -> None:
    """Train under a progress bar, and save what came of it, which ``--save_strategy`` is not about (as in TRL)."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from fastpack.commands.progress import ProgressBar

    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if trainer.is_world_process_zero() and not given.training.disable_tqdm:
        trainer.add_callback(ProgressBar(metrics))
    trainer.train(resume_from_checkpoint=given.training.resume_from_checkpoint)
    trainer.save_model(given.training.output_dir)


def _finish(command: Command, trainer: Any, metrics: MetricsCallback, given: Given) -> int:
    from fastpack.commands.meter import read_records, summarize

    summary = summarize(trainer, metrics)
    report = fastpack.report(trainer)
    advice = command.advise(summary, given, given.training.world_size, report)
    if not trainer.is_world_process_zero():
        return 0
    history = trainer.state.log_history
    logged = {entry["step"]: entry for entry in history if "loss" in entry}
    last = logged[max(logged)] if logged else {}
    evaluations = [entry for entry in history if any(name.startswith("eval_") for name in entry)]
    further = (*command.rows(last), *_evaluation_rows(evaluations))
    _print_summary(summary, report, given, title=f"fastpack {command.name}", further=further)
    if given.uncut is not None:
        print(
            f"note: --padding_free without --packing cuts no examples: the default --max_length {given.uncut:,} was off"
        )
    if given.ours.random_init is not None and hasattr(trainer.model, "peft_config"):
        print("note: the adapter alone was saved, and the random weights that it was trained over are gone")
    if advice is not None:
        print(advice)
    if given.ours.json is not None:
        figures = {
            "steps": [{**vars(record), **logged.get(record.step, {})} for record in read_records(metrics)],
            "evaluations": evaluations,
            "summary": {**vars(summary), "backend": report.backend, "rung": report.rung},
            "hint": advice,
            "report": report.to_dict(),
        }
        Path(given.ours.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _evaluation_rows(evaluations: Sequence[Logs]) -> list[tuple[str, str]]:
    """The losses on each evaluation set."""
    from fastpack.commands.meter import evaluation_losses

    losses: dict[str, list[float]] = {}
    for entry in evaluations:
        for name, value in evaluation_losses(entry).items():
            losses.setdefault(name, []).append(value)
    return [(f"{name}, first to last", f"{found[0]:.4f} to {found[-1]:.4f}") for name, found in losses.items()]


def _print_summary(
    summary: Summary, report: fastpack.PatchReport, given: Given, *, title: str, further: Sequence[tuple[str, str]]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def loss(value: float | None) -> str:
        return "not logged" if value is None else f"{value:.4f}"

    memory = summary.peak_memory_bytes
    table = Table(title=title, title_justify="left", box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("steps", f"{summary.steps:,}")
    table.add_row("loss, first to last", f"{loss(summary.first_loss)} to {loss(summary.last_loss)}")
    for name, value in further:
        table.add_row(name, value)
    table.add_row("real tokens", f"{summary.real_tokens:,}")
    table.add_row("real tokens/s", f"{summary.tokens_per_second:,.0f}")
    table.add_row("slots that were padding", f"{summary.padding_share:.1%} of {summary.slots:,}")
    if memory is not None:
        table.add_row("peak memory", f"{memory / 2**30:.2f} GiB ({summary.memory_kind})")
    table.add_row("attention backend", report.backend or "stock")
    table.add_row("rung", report.rung if given.ours.patch else "stock (--no_patch)")
    for note in report.notes:
        if note.startswith(("graphs: ", "loss: ", "offload: ", "prefixes: ", "max_tokens=")):
            table.add_row(*note.split(": ", 1))
    for what, reason in report.skipped:
        if what == "loss":
            table.add_row(what, f"not fused: {reason}")
    Console().print(table)
