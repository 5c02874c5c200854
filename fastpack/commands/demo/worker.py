"""One run of the demo, in a process of its own, so that its peak memory is its own.

Two such processes take turns, a step each: the parent says which may go on. What else the machine does meanwhile
falls on both alike.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpack.commands import quiet
from fastpack.errors import FastpackError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Settings:
    """What both runs have in common.

    Attributes:
        folder: holds the data, tokenizer and config, and is where a trainer may write.
        threads: of torch, in each process; only one of the two works at a time.
    """

    folder: Path
    steps: int
    batch_size: int
    seed: int
    threads: int


class WorkerError(FastpackError, RuntimeError):
    """A run of the demo broke off."""


class Run:
    """The parent's end of a run."""

    def __init__(self, settings: Settings, *, patched: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=work, args=(theirs, settings, patched), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self) -> Any:
        """What the run says next: None once it is ready, its last step's record after a step, its result at the end.

        Raises:
            WorkerError: the process has ended; what went wrong stands in its own traceback.
        """
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            raise WorkerError(f"a run of the demo ended with exit code {self._process.exitcode}, see above") from None

    def step(self) -> Any:
        """Let it train one step and wait until it has."""
        self._pipe.send("go")
        return self.wait()

    def close(self) -> None:
        """End the process, if it is still there."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


@contextmanager
def runs(settings: Settings) -> Iterator[tuple[Run, Run]]:
    """The stock and the patched run, both loaded and ready."""
    both = Run(settings, patched=False), Run(settings, patched=True)
    try:
        for run in both:
            run.wait()
        yield both
    finally:
        for run in both:
            run.close()


def work(pipe: Connection, settings: Settings, patched: bool) -> None:
    """The body of the process: train, a step whenever told to, then send the result."""
    quiet()
    import datasets
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    import fastpack
    from fastpack.commands.demo.data import read_rows
    from fastpack.commands.meter import read_records
    from fastpack.metrics import attach
    from fastpack.metrics.counting import peak_memory

    torch.set_num_threads(settings.threads)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()

    transformers.set_seed(settings.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings.folder))
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(settings.folder / "trainer"),
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=2e-3,
            warmup_steps=2,
            lr_scheduler_type="cosine",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            use_cpu=True,
            seed=settings.seed,
        ),
        train_dataset=datasets.Dataset.from_list(read_rows(settings.folder)),
        processing_class=AutoTokenizer.from_pretrained(settings.folder),
    )
    if patched:
        fastpack.patch(trainer)
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)

    class Turns(TrainerCallback):
        """Waits for the parent's word before each step; stands before the metrics, so that no waiting is measured."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pipe.send(read_records(metrics)[-1] if state.global_step else None)
            pipe.recv()

    metrics = attach(trainer)
    trainer.callback_handler.callbacks.insert(0, Turns())
    trainer.train()
    memory, kind = peak_memory(torch.device("cpu"))
    pipe.send(
        {
            "records": read_records(metrics),
            "peak_memory_bytes": memory,
            "memory_kind": kind,
            "report": fastpack.report(trainer).to_dict(),
            "parameters": sum(p.numel() for p in model.parameters()),
        }
    )
