"""The callback that counts a trainer's tokens and time, and adds metrics when the trainer logs."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback

from fastpack.errors import FastpackWarning, PatchError, UnsupportedModelError
from fastpack.patching.state import CONTEXT_PARALLEL, trainer_record
from fastpack.trainers.metrics.counting import Count, batch_of, count_batch, peak_memory
from fastpack.trainers.metrics.flops import ModelFlops, read_flops
from fastpack.trainers.metrics.peaks import peak_of
from fastpack.trainers.metrics.stopwatch import Stopwatch
from fastpack.utils.protocols import TrainerLike

PREFIX = "fastpack/"
_STATE = "fastpack.metrics"
"""The key under which a checkpoint's trainer state has the totals."""
_SUMMED = ("steps", "inside", "waiting", "memory", "real", "slots", "trained", "unlabelled")
_NANO = 1_000_000_000
_LONGEST = 1000
"""The number of steps after which counts are summed up even if nothing is logged, so that CUDA events don't pile up."""


class MetricsCallback(TrainerCallback):
    """A callback that logs tokens, time and MFU; :func:`attach` makes it, :mod:`fastpack.trainers.metrics` explains it.

    Attributes:
        totals: sums over the run so far and over all ranks, as of the last time that the trainer logged, evaluated or
            saved: ``steps``; ``real`` and ``trained`` tokens; ``slots`` with tokens or padding; ``unlabelled``
            micro-batches without a label for each token; ``flops``; nanoseconds ``inside`` steps and ``waiting``
            between them.
        history: the metrics of each log, without the prefix, with its ``step``, the number of ``steps`` that it covers,
            and its ``loss``. If training ends between two logs, the last entry has no loss.
        logs: whether the trainer logs the metrics. If set to False, they are in ``history`` only.
    """

    def __init__(self, trainer: TrainerLike, peak_flops: float | None) -> None:
        """Set up the callback for a trainer; see :func:`attach`."""
        self.totals = Counter[str]()
        self.history: list[dict[str, float]] = []
        self.logs = True
        self._trainer = trainer
        self._peak = peak_flops
        self._flops = ModelFlops(0, {}) if peak_flops is None else _read(trainer.model)
        self._hook: Any = None
        self._counts: list[Count] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the totals of the checkpoint that the run resumes, and hook the model."""
        self.close()
        self.totals = Counter(state.stateful_callbacks.get(_STATE))
        self.history.clear()
        self._interval, self._memory = Counter[str](), 0
        self._inside, self._waiting = Stopwatch(args.device), Stopwatch(args.device)
        self._clear()
        # not compiled: it would be traced with the model, and each new count would compile the model again
        count = torch.compiler.disable(self._count)
        self._hook = self._trainer.model.register_forward_pre_hook(count, with_kwargs=True)
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)
        self._waiting.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of the step."""
        self._waiting.stop()
        self._inside.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock of the step, and sum up the totals if the trainer is about to save or evaluate."""
        self._inside.stop()
        self._steps += 1
        self.on_epoch_end(args, state, control)
        self._waiting.start()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sum up the totals for a checkpoint, which an evaluation may cause too."""
        if control.should_save or control.should_evaluate or self._steps == _LONGEST:
            self._collect()
            state.stateful_callbacks[_STATE] = dict(self.totals)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restart the clock of waiting, so that evaluating and saving don't count."""
        self._waiting.start()

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the metrics to the trainer's log of steps, and the totals also to its log at the end."""
        logs = {} if logs is None else logs
        of_steps = "loss" in logs and "learning_rate" in logs  # the trainer's own log, on every rank
        if not of_steps and "train_runtime" not in logs:
            return
        self._collect()
        metrics = self._interval_metrics(state.global_step, logs["loss"]) if of_steps else {}
        metrics |= {f"total_{name}": value for name, value in _tokens(self.totals, 1).items()}
        if self.logs:
            named = {f"{PREFIX}{name}": value for name, value in metrics.items()}
            logs.update(named)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(named)  # the trainer copied logs before it called us
        self._waiting.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sum up the last steps, and remove the hook."""
        self._collect()
        self._interval_metrics(state.global_step)
        self.close()

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._hook is not None:
            self._hook.remove()

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the counts of a batch that a backward may follow, without waiting for the device."""
        batch = batch_of(args, kwargs)
        has_tokens = batch.get("input_ids") is not None or batch.get("inputs_embeds") is not None
        if not (has_tokens and model.training and torch.is_grad_enabled()):
            return
        batch_counts = count_batch(batch, tuple(self._flops.per_pair))
        trained: Count = 0 if batch_counts.trained is None else batch_counts.trained
        counts = (
            batch_counts.real,
            batch_counts.slots,
            trained,
            int(batch_counts.trained is None),
            *batch_counts.pairs,
        )
        self._counts = [before + new for before, new in zip(self._counts, counts, strict=True)]

    def _clear(self) -> None:
        self._steps = 0
        self._counts = [0] * (4 + len(self._flops.per_pair))

    def _collect(self) -> None:
        """Add the counts since the last call to the totals, with one collective: all ranks have to call this."""
        if not self._steps:
            return
        device = self._trainer.args.device
        nanoseconds = (round(watch.take() * _NANO) for watch in (self._inside, self._waiting))
        mine = (self._steps, *nanoseconds, peak_memory(device)[0] or 0, *self._counts)
        vector = torch.stack([torch.as_tensor(value, device=device) for value in mine])
        rows: list[list[int]] = self._trainer.accelerator.gather(vector[None]).tolist()
        self._clear()
        columns = list(zip(*rows, strict=True))
        sums = list(map(sum, columns))
        counts = Counter(dict(zip(_SUMMED, sums, strict=False)))
        self._memory = max(self._memory, *columns[_SUMMED.index("memory")])
        del counts["memory"]
        state = trainer_record(self._trainer, CONTEXT_PARALLEL)
        if state is not None:  # ranks that share batches count the same tokens
            for name in counts.keys() - {"steps", "inside", "waiting"}:
                counts[name] //= state.ranks
            sums[len(_SUMMED) :] = [count // state.ranks for count in sums[len(_SUMMED) :]]
        counts["steps"] //= len(rows)
        counts["flops"] = self._flops.of(counts["real"], sums[len(_SUMMED) :])
        self._interval.update(counts)
        self.totals.update(counts)

    def _interval_metrics(self, step: int, loss: float | None = None) -> dict[str, float]:
        """Return the metrics of the steps since the last call, and add them to the history; empty without a step."""
        sums, self._interval = self._interval, Counter()
        steps, ranks = sums["steps"], self._trainer.accelerator.num_processes
        if not steps:
            return {}
        training = (sums["inside"] + sums["waiting"]) / _NANO
        metrics = _tokens(sums, steps)
        metrics["step_seconds"] = sums["inside"] / _NANO / ranks / steps
        metrics["tokens_per_second_per_gpu"] = sums["real"] / training
        if self._peak is not None and sums["flops"]:
            metrics["mfu"] = sums["flops"] / training / self._peak
        if self._memory:
            metrics["peak_memory_gib"] = self._memory / 2**30
        self.history.append({"step": step, "steps": steps, **metrics} | ({} if loss is None else {"loss": loss}))
        return metrics


def attach(trainer: Any, *, peak_flops: float | None = None) -> MetricsCallback:
    """Add metrics of tokens, time and MFU to a trainer's logs; see :mod:`fastpack.trainers.metrics`.

    Args:
        trainer: a trainer of transformers or TRL that is built and not yet training. Patch it before or after. MFU
            counts the parameters that train at the time of this call.
        peak_flops: the operations a second that one device can do, for ``fastpack/mfu``. By default, the maker's number
            for bfloat16 (:mod:`~.peaks`); there is no ``mfu`` for a CPU or for a device without a number there.
            ``fastpack.bench.ceiling.measure().flops`` is the rate of a large matmul on this device.

    Returns:
        The callback. It runs before all callbacks except the trainer's own, so that reporters see its metrics. To
        remove it, call ``close()`` and ``trainer.remove_callback``.

    Raises:
        TypeError: ``trainer`` is not a trainer.
        PatchError: the trainer has metrics already, or it trains on several GPUs in one process.
        ValueError: ``peak_flops`` is not a positive number.

    Warns:
        FastpackWarning: there is no ``mfu``, since fastpack has no formula for a part of the model.

    Example:
        >>> callback = fastpack.metrics.attach(trainer)
        >>> trainer.train()
        >>> callback.history[-1]["tokens_per_second_per_gpu"]
    """
    handler = getattr(trainer, "callback_handler", None)
    if handler is None or not isinstance(getattr(trainer, "model", None), nn.Module):
        raise TypeError(f"attach takes a Trainer of transformers or TRL, not {type(trainer).__name__}.")
    if any(isinstance(callback, MetricsCallback) for callback in handler.callbacks):
        raise PatchError("this trainer has metrics already; trainer.remove_callback(MetricsCallback) removes them.")
    if trainer.args.n_gpu > 1:
        raise PatchError("this trainer splits each batch over several GPUs of one process; start it with torchrun.")
    device = trainer.args.device
    if peak_flops is None and device.type == "cuda":
        peak_flops = peak_of(torch.cuda.get_device_name(device))
    elif peak_flops is not None and not (0 < peak_flops < math.inf):
        raise ValueError(f"peak_flops is {peak_flops!r}; pass operations a second, above 0, such as 989e12.")
    callback = MetricsCallback(trainer, peak_flops)
    # after the callback that decides when to save
    at = next((at for at, each in enumerate(handler.callbacks, 1) if isinstance(each, DefaultFlowCallback)), 0)
    handler.callbacks.insert(at, callback)
    return callback


def _read(model: nn.Module) -> ModelFlops:
    try:
        return read_flops(model)
    except UnsupportedModelError as error:
        warnings.warn(f"{PREFIX}mfu is left out: {error}", FastpackWarning, stacklevel=4)
        return ModelFlops(0, {})


def _tokens(sums: Mapping[str, int], steps: int) -> dict[str, float]:
    """Return the counts of tokens a step, and the share of padding."""
    counts: dict[str, float] = {"real_tokens": sums["real"]}
    if not sums["unlabelled"]:
        counts["trained_tokens"] = sums["trained"]
    counts["padding_tokens"] = sums["slots"] - sums["real"]
    if steps > 1:
        counts = {name: count / steps for name, count in counts.items()}
    return counts | {"padding_share": 1 - sums["real"] / sums["slots"] if sums["slots"] else 0.0}
