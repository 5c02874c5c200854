"""The callback: it watches a trainer's model and its steps, and speaks when the trainer logs."""

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
from fastpack.trainers.metrics.counting import Count, count_batch, peak_memory
from fastpack.trainers.metrics.flops import ModelFlops, read_flops
from fastpack.trainers.metrics.peaks import peak_of
from fastpack.trainers.metrics.stopwatch import Stopwatch
from fastpack.utils.protocols import TrainerLike

PREFIX = "fastpack/"
_STATE = "fastpack.metrics"
"""Under which a checkpoint's trainer state keeps the totals."""
_SUMMED = ("steps", "inside", "waiting", "memory", "real", "slots", "trained", "unlabelled")
_NANO = 1_000_000_000
_LONGEST = 1000
"""Steps after which counts are summed up where nothing is logged, so that moments on the device don't pile up."""


class MetricsCallback(TrainerCallback):
    """See :mod:`fastpack.trainers.metrics`; made by :func:`attach`.

    Attributes:
        totals: sums over the run so far and over all ranks, as of the last time that the trainer logged, evaluated or
            saved: ``steps``; ``real`` and ``trained`` tokens; ``slots`` with tokens or padding; ``unlabelled``
            micro-batches without a label for each token; ``flops``; nanoseconds ``inside`` steps and ``waiting``
            between them.
        history: the figures of each log, without the prefix, and beside them its ``step``, how many ``steps`` it is
            of, and its ``loss``; a last entry without a loss where training ended between two logs.
        logs: whether the trainer is to log them; set to False, they are kept here alone.
    """

    def __init__(self, trainer: TrainerLike, peak_flops: float | None) -> None:
        """Set up for a trainer; see :func:`attach`."""
        self.totals = Counter[str]()
        self.history: list[dict[str, float]] = []
        self.logs = True
        self._trainer = trainer
        self._peak = peak_flops
        self._flops = ModelFlops(0, {}) if peak_flops is None else _read(trainer.model)
        self._hook: Any = None
        self._counts: list[Count] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on from the totals of a checkpoint, and begin to watch."""
        self.close()
        self.totals = Counter(state.stateful_callbacks.get(_STATE))
        self.history.clear()
        self._interval, self._memory = Counter[str](), 0
        self._inside, self._waiting = Stopwatch(args.device), Stopwatch(args.device)
        self._clear()
        # compiled, it would be traced with the model, and it would be compiled anew for other counts
        count = torch.compiler.disable(self._count)
        self._hook = self._trainer.model.register_forward_pre_hook(count, with_kwargs=True)
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)
        self._waiting.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._waiting.stop()
        self._inside.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock, and sum up what a checkpoint is to hold."""
        self._inside.stop()
        self._steps += 1
        self.on_epoch_end(args, state, control)
        self._waiting.start()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sum up what a checkpoint is to hold, for which a good evaluation may ask too."""
        if control.should_save or control.should_evaluate or self._steps == _LONGEST:
            self._collect()
            state.stateful_callbacks[_STATE] = dict(self.totals)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave what came since the step's end out of the time."""
        self._waiting.start()

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the figures to what the trainer logs of its steps, and of the run at its end."""
        logs = {} if logs is None else logs
        of_steps = "loss" in logs and "learning_rate" in logs  # as the trainer itself logs them, on every rank
        if not of_steps and "train_runtime" not in logs:
            return
        self._collect()
        found = self._figures(state.global_step, logs["loss"]) if of_steps else {}
        found |= {f"total_{name}": value for name, value in _tokens(self.totals, 1).items()}
        if self.logs:
            named = {f"{PREFIX}{name}": value for name, value in found.items()}
            logs.update(named)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(named)  # a copy of logs, made before callbacks are told
        self._waiting.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sum up what is left, and take the hook off."""
        self._collect()
        self._figures(state.global_step)
        self.close()

    def close(self) -> None:
        """Take the hook off the model."""
        if self._hook is not None:
            self._hook.remove()

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add what a call with a backward is given; nobody waits for counts that are tensors."""
        batch = {**kwargs, "input_ids": args[0]} if args else kwargs
        has_tokens = batch.get("input_ids") is not None or batch.get("inputs_embeds") is not None
        if not (has_tokens and model.training and torch.is_grad_enabled()):
            return
        found = count_batch(batch, tuple(self._flops.per_pair))
        trained: Count = 0 if found.trained is None else found.trained
        counts = (found.real, found.slots, trained, int(found.trained is None), *found.pairs)
        self._counts = [before + new for before, new in zip(self._counts, counts, strict=True)]

    def _clear(self) -> None:
        self._steps = 0
        self._counts = [0] * (4 + len(self._flops.per_pair))

    def _collect(self) -> None:
        """Sum over ranks what was counted since the last time, with one collective; all ranks have to ask at once."""
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
        found = Counter(dict(zip(_SUMMED, sums, strict=False)))
        self._memory = max(self._memory, *columns[_SUMMED.index("memory")])
        del found["memory"]
        found["steps"] //= len(rows)
        found["flops"] = self._flops.of(found["real"], sums[len(_SUMMED) :])
        self._interval.update(found)
        self.totals.update(found)

    def _figures(self, step: int, loss: float | None = None) -> dict[str, float]:
        """Return the figures of the steps since the last time, and keep them; none where there was no step."""
        sums, self._interval = self._interval, Counter()
        steps, ranks = sums["steps"], self._trainer.accelerator.num_processes
        if not steps:
            return {}
        training = (sums["inside"] + sums["waiting"]) / _NANO
        found = _tokens(sums, steps)
        found["step_seconds"] = sums["inside"] / _NANO / ranks / steps
        found["tokens_per_second_per_gpu"] = sums["real"] / training
        if self._peak is not None and sums["flops"]:
            found["mfu"] = sums["flops"] / training / self._peak
        if self._memory:
            found["peak_memory_gib"] = self._memory / 2**30
        self.history.append({"step": step, "steps": steps, **found} | ({} if loss is None else {"loss": loss}))
        return found


def attach(trainer: Any, *, peak_flops: float | None = None) -> MetricsCallback:
    """Have a trainer log what it does with its tokens and its time; see :mod:`fastpack.trainers.metrics`.

    Args:
        trainer: of transformers or TRL, built and not yet training. Patch it before or after; what trains is read now.
        peak_flops: what one device can do, in operations a second, for ``fastpack/mfu``. By default what its maker
            promises for bfloat16 (:mod:`~.peaks`), and no ``mfu`` for one that is not in the table or
            for a CPU. ``fastpack.bench.ceiling.measure().flops`` is the rate of a large product on this device.

    Returns:
        The callback, which stands before all others but the trainer's own, so that reporters are told what it adds.
        ``close()`` and ``trainer.remove_callback`` take it off.

    Raises:
        TypeError: not a trainer.
        PatchError: it has metrics already, or it trains on several GPUs in one process.
        ValueError: ``peak_flops`` is not a positive number.

    Warns:
        FastpackWarning: there is no ``mfu``, since the model computes what has no formula here.
    """
    handler = getattr(trainer, "callback_handler", None)
    if handler is None or not isinstance(getattr(trainer, "model", None), nn.Module):
        raise TypeError(f"attach takes a Trainer of transformers or TRL, not {type(trainer).__name__}.")
    if any(isinstance(callback, MetricsCallback) for callback in handler.callbacks):
        raise PatchError("this trainer has metrics already; trainer.remove_callback(MetricsCallback) takes them off.")
    if trainer.args.n_gpu > 1:
        raise PatchError("this trainer splits each batch over several GPUs of one process; start it with torchrun.")
    device = trainer.args.device
    if peak_flops is None and device.type == "cuda":
        peak_flops = peak_of(torch.cuda.get_device_name(device))
    elif peak_flops is not None and not (0 < peak_flops < math.inf):
        raise ValueError(f"peak_flops is {peak_flops!r}; pass operations a second, such as 989e12.")
    callback = MetricsCallback(trainer, peak_flops)
    # behind the one that decides when to save
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
    """Return counts a step, and the share of padding."""
    found: dict[str, float] = {"real_tokens": sums["real"]}
    if not sums["unlabelled"]:
        found["trained_tokens"] = sums["trained"]
    found["padding_tokens"] = sums["slots"] - sums["real"]
    if steps > 1:
        found = {name: count / steps for name, count in found.items()}
    return found | {"padding_share": 1 - sums["real"] / sums["slots"] if sums["slots"] else 0.0}
