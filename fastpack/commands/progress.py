"""The progress bar of a training run; plain lines where the output is not a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from fastpack.commands.meter import Meter, evaluation_losses

LINES = 20
"""How many lines a run writes to a file or a pipe, about."""


class ProgressBar(TrainerCallback):
    """Steps, the last loss and the speed so far."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._loss = ""
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar."""
        self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move on."""
        self._bar.update(self._task, completed=state.global_step, total=state.max_steps, description=self._loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the loss, and what evaluations gave."""
        if not logs:
            return
        if found := evaluation_losses(logs):
            said = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
            self._console.print(f"step {state.global_step}/{state.max_steps}  {said}", highlight=False)
        if "loss" not in logs:
            return
        self._loss = f"loss {logs['loss']:.4f}"
        self._bar.update(self._task, description=self._loss)
        every = max(1, state.max_steps // LINES)
        if not self._console.is_terminal and (state.global_step % every == 0 or state.global_step == 1):
            self._console.print(f"step {state.global_step}/{state.max_steps}  {self._loss}", highlight=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the finished bar behind."""
        self._bar.stop()
