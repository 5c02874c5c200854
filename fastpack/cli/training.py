"""Build one of TRL's own trainers, patch it, run it, and print a summary, for the commands that train.

Every flag of TRL's script of the same name works. TRL's parser reads the arguments into its ``ScriptArguments``, the
trainer's config and ``ModelConfig``; our flags are added to them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import trl
from rich import box
from rich.console import Console
from rich.table import Column, Table
from trl import get_peft_config, get_quantization_config  # type: ignore[attr-defined]

import fastpack
from fastpack.cli import UsageError, loading_errors, require_file, require_trl_on_cpu
from fastpack.cli.arguments import Command, ParsedArgs, parse
from fastpack.cli.loading import load_dataset, load_tokenizer, random_model
from fastpack.cli.meter import Summary, hint, read_steps, summarize
from fastpack.patching.report import PatchReport
from fastpack.trainers.metrics import MetricsCallback, attach


def run(command: Command, arguments: Sequence[str]) -> int:
    """Train, and print a summary.

    Raises:
        UsageError: the run is not possible; the message says why.
    """
    args = parse(command, arguments)
    if args.training.process_index == 0:  # only this process writes it
        require_file("--json", args.ours.json, made=args.training.output_dir)
    try:
        trainer = make_trainer(command, args)
        if args.ours.patch:
            fastpack.patch(trainer, **args.ours.trainer_keywords())
        if args.ours.shard_base:
            fastpack.shard_base(trainer)
        metrics = attach(trainer)
        metrics.logs = args.ours.metrics
    except loading_errors() as error:
        # Until training begins, these are errors of TRL, transformers and the hub about the arguments.
        raise UsageError(str(error)) from error
    if args.training.device.type == "cpu":
        require_trl_on_cpu(command.name)
    trainer.train(resume_from_checkpoint=args.training.resume_from_checkpoint)
    trainer.save_model(args.training.output_dir)  # TRL's scripts save too, whatever --save_strategy is
    _finish(command, trainer, metrics, args)
    return 0


def make_trainer(command: Command, args: ParsedArgs) -> Any:
    """Return the trainer that TRL's own script would build, unmodified, also for local files."""
    training, model, ours = args.training, args.model, args.ours
    tokenizer = load_tokenizer(args)
    train_dataset, eval_dataset = load_dataset(command, args)
    command.check_data(args, list(train_dataset.column_names or ()))
    quantization = get_quantization_config(model)
    with ExitStack() as cleanup:
        source: Any = model.model_name_or_path
        if ours.random_init is not None:
            source = random_model(ours.random_init, args)
            if quantization is not None:  # quantization happens while weights are loaded
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
            "quantization_config": quantization,
            "peft_config": get_peft_config(model),
        }
        trainer: Any = getattr(trl, command.trainer)(**settings | command.models(source, args))
    if args.script.ignore_bias_buffers:  # DistributedDataParallel reads this, as in TRL's script
        buffers = trainer.model.named_buffers()
        trainer.model._ddp_params_and_buffers_to_ignore = [name for name, b in buffers if b.dtype == torch.bool]
    ids, rows = len(tokenizer), trainer.model.get_input_embeddings().weight.shape[0]
    if ids > rows:
        raise UsageError(
            f"the tokenizer has {ids:,} ids, but the model embeds {rows:,}: use the model's own tokenizer"
            + (", or set vocab_size in the config of --random_init" if ours.random_init else "")
        )
    return trainer


def _finish(command: Command, trainer: Any, metrics: MetricsCallback, args: ParsedArgs) -> None:
    """Print the summary and write ``--json`` on the main process; every rank adds to the counts."""
    summary = summarize(trainer, metrics)
    report = fastpack.report(trainer)
    fused = args.ours.loss is not None and "loss" not in dict(report.skipped)
    head_too = command.name != "sft" or args.ours.max_tokens is not None or fused
    advice = hint(summary, patched=args.ours.patch, head_too=head_too)
    if not trainer.is_world_process_zero():
        return
    history = trainer.state.log_history
    logged = {entry["step"]: entry for entry in history if "loss" in entry}
    evaluations = [entry for entry in history if any(name.startswith("eval_") for name in entry)]
    values = [entry[command.metric] for entry in history if command.metric in entry]
    changed = {f"{command.metric}, first to last": f"{values[0]:.4f} to {values[-1]:.4f}"} if values else {}
    _print_summary(f"fastpack {command.name}", summary, report, changed)
    if args.uncut:
        off = f"the default --max_length {args.max_length:,} was off"
        print(f"note: --padding_free without --packing cuts no examples: {off}")
    if advice is not None:
        print(advice)
    if args.ours.json is not None:
        results = {
            "steps": [{**step, **logged.get(step["step"], {})} for step in read_steps(metrics)],
            "evaluations": evaluations,
            "summary": {**vars(summary), "backend": report.backend, "tier": report.tier},
            "hint": advice,
            "report": report.to_dict(),
        }
        Path(args.ours.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _print_summary(title: str, summary: Summary, report: PatchReport, further: dict[str, str]) -> None:
    first, last = ("not logged" if x is None else f"{x:.4f}" for x in (summary.first_loss, summary.last_loss))
    memory = summary.peak_memory_bytes
    prefixes = ("graphs: ", "loss: ", "offload: ", "prefixes: ", "max_tokens=")
    notes = [note for note in report.notes if note.startswith(prefixes)]
    notes += [f"loss: not fused: {reason}" for what, reason in report.skipped if what == "loss"]
    rows = {
        "steps": f"{summary.steps:,}",
        "loss, first to last": f"{first} to {last}",
        **further,
        "real tokens": f"{summary.real_tokens:,}",
        "real tokens/s": f"{summary.tokens_per_second:,.0f}",
        "slots that were padding": f"{summary.padding_share:.1%} of {summary.slots:,}",
        "peak memory": "not known" if memory is None else f"{memory / 2**30:.2f} GiB ({summary.memory_kind})",
        "attention backend": report.backend or "stock",
        "tier": report.tier,
    }
    table = Table(Column(style="bold", no_wrap=True), title=title, box=box.ROUNDED, show_header=False)
    for name, value in (*rows.items(), *(note.split(": ", 1) for note in notes)):
        table.add_row(name, value)
    Console().print(table)
