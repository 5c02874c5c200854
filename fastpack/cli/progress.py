"""The progress bar of a training run; where the output is not a terminal, a plain line for each log."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from fastpack.cli.meter import evaluation_losses
from fastpack.trainers.metrics import MetricsCallback


class ProgressBar(TrainerCallback):
    """Steps, the last loss, and the speed and padding since the log before."""

    def __init__(self, metrics: MetricsCallback) -> None:
        self._metrics = metrics
        self._console = Console(stderr=True)
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
        self._bar = Progress("training", *columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar."""
        self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move on."""
        self._bar.update(self._task, completed=state.global_step, total=state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the loss and what was counted with it, and what evaluations gave."""
        logs, step = logs or {}, f"step {state.global_step}/{state.max_steps}"
        if found := evaluation_losses(logs):
            said = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
            self._console.print(f"{step}  {said}", highlight=False)
        if "loss" in logs and self._metrics.history:
            latest = self._metrics.history[-1]
            speed, padding = latest["tokens_per_second_per_gpu"], latest["padding_share"]
            said = f"loss {logs['loss']:.4f}  {speed:,.0f} tokens/s a device  {padding:.0%} padding"
            self._bar.update(self._task, description=said)
            if not self._console.is_terminal:
                self._console.print(f"{step}  {said}", highlight=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the finished bar behind."""
        self._bar.stop()
