"""``fastpack sft``: fine-tune with TRL's own SFTTrainer, patched.

Every flag of TRL's ``sft`` works: the arguments are parsed by TRL's parser into its ``ScriptArguments``,
``SFTConfig`` and ``ModelConfig``; ours are added beside them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastpack
from fastpack.commands import UsageError, quiet, require, require_trl_on_cpu

if TYPE_CHECKING:
    from fastpack.commands.meter import Feeding, Meter, Summary
    from fastpack.commands.sft_arguments import SftArguments


def main(arguments: Sequence[str]) -> int:
    """Train, and print what the run did."""
    require("sft", "trl", "datasets", extra="trl")
    quiet()
    from fastpack.commands.sft_arguments import parse

    given = parse(arguments)
    try:
        trainer = make_trainer(given)
        if given.ours.patch:
            fastpack.patch(trainer, **given.ours.patch_keywords())
    except (OSError, ValueError, ImportError) as error:
        # Until training begins, these are the messages of TRL, transformers and the hub about what they were given.
        raise UsageError(str(error)) from error
    if given.training.device.type == "cpu":
        require_trl_on_cpu("sft")
    meter = train(trainer, given)
    return _finish(trainer, meter, given)


def make_trainer(given: SftArguments) -> Any:
    """The unmodified ``SFTTrainer`` that TRL's own script would build, on local files too."""
    from transformers import set_seed
    from trl import SFTTrainer, get_peft_config, get_quantization_config  # type: ignore[attr-defined]

    from fastpack.commands.loading import load_dataset, load_tokenizer, random_model

    script, training, model, ours = given.script, given.training, given.model, given.ours
    tokenizer = load_tokenizer(given)
    train_dataset, eval_dataset = load_dataset(script, training)
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
        trainer: Any = SFTTrainer(
            model=source,
            args=training,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            quantization_config=quantization if isinstance(source, str) else None,
            peft_config=get_peft_config(model),
        )
    ids, rows = len(tokenizer), trainer.model.get_input_embeddings().weight.shape[0]
    if ids > rows:
        raise UsageError(
            f"the tokenizer has {ids:,} ids, the model embeds {rows:,}: take the model's own tokenizer"
            + (", or set vocab_size in the config of --random_init" if ours.random_init else "")
        )
    return trainer


def train(trainer: Any, given: SftArguments) -> Meter:
    """Train under a progress bar; save unless ``--save_strategy no``."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from fastpack.commands.meter import Meter
    from fastpack.commands.progress import ProgressBar

    meter = Meter(trainer)
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if trainer.is_world_process_zero() and not given.training.disable_tqdm:
        trainer.add_callback(ProgressBar(meter))
    trainer.train(resume_from_checkpoint=given.training.resume_from_checkpoint)
    if given.training.save_strategy != "no":
        trainer.save_model(given.training.output_dir)
    return meter


def _finish(trainer: Any, meter: Meter, given: SftArguments) -> int:
    from fastpack.commands.meter import Feeding, hint

    summary = meter.summary(trainer.accelerator)
    args = given.training
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    feeding = Feeding(
        patched=given.ours.patch,
        packing=args.packing,
        full_step=per_step * given.max_length if given.max_length else None,
    )
    advice = hint(summary, feeding)
    report = fastpack.report(trainer)
    if not trainer.is_world_process_zero():
        return 0
    _print_summary(summary, report, feeding)
    if advice is not None:
        print(advice)
    if given.ours.json is not None:
        figures = {
            "steps": [vars(record) for record in meter.records],
            "summary": {**summary.to_dict(), "backend": report.backend, "rung": report.rung},
            "hint": advice,
            "report": report.to_dict(),
        }
        Path(given.ours.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _print_summary(summary: Summary, report: fastpack.PatchReport, feeding: Feeding) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def loss(value: float | None) -> str:
        return "not logged" if value is None else f"{value:.4f}"

    memory = summary.peak_memory_bytes
    table = Table(title="fastpack sft", title_justify="left", box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("steps", f"{summary.steps:,}")
    table.add_row("loss, first to last", f"{loss(summary.first_loss)} to {loss(summary.last_loss)}")
    table.add_row("real tokens", f"{summary.real_tokens:,}")
    table.add_row("real tokens/s", f"{summary.tokens_per_second:,.0f}")
    table.add_row("slots that were padding", f"{summary.padding_share:.1%} of {summary.slots:,}")
    if memory is not None:
        table.add_row("peak memory", f"{memory / 2**30:.2f} GiB ({summary.memory_kind})")
    table.add_row("attention backend", report.backend or "stock")
    table.add_row("rung", report.rung if feeding.patched else "stock (--no_patch)")
    Console().print(table)
