"""The callback: it watches a trainer's models, its steps and its loader, and speaks when the trainer logs."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from fastpack.errors import FastpackWarning, PatchError, UnsupportedModelError
from fastpack.metrics.counting import BatchCounts, Count, batch_shape, count_batch, peak_memory, predicted_positions
from fastpack.metrics.peaks import peak_of
from fastpack.metrics.plan import ModelPlan, read_plan
from fastpack.metrics.stopwatch import Stopwatch
from fastpack.metrics.tally import Kind, Plans, Tally
from fastpack.metrics.totals import NANO, Totals, cumulative, figures
from fastpack.model.checks import has_cache
from fastpack.model.unwrap import STATE, refuse_wrapped
from fastpack.patching.options import PatchOptions

PREFIX = "fastpack/"


@dataclass(frozen=True)
class _Call:
    """A call of a model that has not ended."""

    kind: Kind
    counts: BatchCounts


class MetricsCallback(TrainerCallback):
    """See :mod:`fastpack.metrics`; made by :func:`attach`.

    Attributes:
        totals: the run so far, over all ranks, as of the last time that the trainer logged, evaluated or saved.
        latest: what was logged last, without the prefix.
        plans: what the models compute; None before training begins.
    """

    def __init__(self, trainer: Any, peak_flops: float | None) -> None:
        self.totals = Totals()
        self.latest: dict[str, float] = {}
        self.plans: Plans | None = None
        self.saved = MetricsState()
        self._trainer = trainer
        self._peak = peak_flops
        self._planned = Plans(*(None if m is None else _read(m) for m in _models(trainer)))
        self._undo: list[Callable[[], None]] = []
        self._calls: list[_Call | None] = []
        self._switches: list[Any] = []
        self._in_step = False
        self._pending = 0
        self._interval = Totals()
        self._memory = 0

    # what the trainer tells

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the models as they now stand, and begin to watch."""
        self.close()
        trainer, device = self._trainer, args.device
        policy, reference = _models(trainer)
        self.plans = Plans(
            _reread(policy, self._planned.policy, args),
            None if reference is None else _reread(reference, self._planned.reference, args),
        )
        for plan in (self.plans.policy, self.plans.reference):
            if plan is not None and plan.uncounted:
                warnings.warn(
                    f"{PREFIX}mfu leaves out {', '.join(plan.uncounted)}: there is no formula here.",
                    FastpackWarning,
                    stacklevel=2,
                )
        options = _options(policy)
        self._fused_loss = options is not None and options.loss == "fused"
        self._tally = Tally(device, self.plans, patched=options is not None)
        self._inside, self._loading, self._elapsed = (Stopwatch(device) for _ in range(3))
        self._switches = [module for module in policy.modules() if hasattr(module, "_disable_adapters")][:1]
        self._calls.clear()
        self._in_step, self._pending, self._interval, self._memory = False, 0, Totals(), 0
        self.totals = _restored(state)
        self._keep_state(state)
        for model in (policy, reference):
            if model is not None:
                self._watch(model)
        self._watch_loader()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._elapsed.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and count from here on."""
        self._in_step = True
        self._inside.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop both."""
        self._inside.stop()
        self._in_step = False
        self._calls.clear()
        self._pending += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the figures to what the trainer logs of its steps, and of the run at its end."""
        if not logs:
            return
        if "loss" in logs and "learning_rate" in logs:  # as the trainer itself logs them, on every rank
            self.collect()
            found = self._figures()
        elif "train_runtime" in logs:
            self.collect()
            found = cumulative(self.totals)
        else:
            return
        self.latest = found
        named = {f"{PREFIX}{name}": value for name, value in found.items()}
        logs.update(named)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(named)  # a copy of logs, made before callbacks are told

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sum up what is left, and take everything off."""
        self.collect()
        self.close()

    def collect(self) -> None:
        """Sum over ranks what has been counted since the last time. All ranks have to call it at once."""
        if not self._pending:
            return
        self._elapsed.stop()
        self._tally.add(
            steps=self._pending,
            inside=round(self._inside.take() * NANO),
            loading=round(self._loading.take() * NANO),
            elapsed=round(self._elapsed.take() * NANO),
            memory=peak_memory(self._trainer.args.device)[0] or 0,
        )
        self._elapsed.start()
        self._pending = 0
        found, memory = self._tally.take(self._trainer.accelerator)
        self._interval += found
        self.totals += found
        self._memory = max(self._memory, memory)

    def close(self) -> None:
        """Take the hooks off the models and the loader."""
        while self._undo:
            self._undo.pop()()

    @property
    def pending_elsewhere(self) -> bool:
        """True where steps were counted of which other ranks know a part."""
        return bool(self._pending) and self._ranks > 1

    # what happens in between

    @property
    def _ranks(self) -> int:
        return int(self._trainer.accelerator.num_processes)

    def _figures(self) -> dict[str, float]:
        found = figures(self._interval, ranks=self._ranks, peak=self._peak) if self._interval.steps else {}
        self._interval = Totals()
        if self.plans is None or self.plans.policy is None:
            for name in ("tflops_per_gpu", "mfu"):
                found.pop(name, None)
        if self._memory:
            found["peak_memory_gib"] = self._memory / 2**30
        return found | cumulative(self.totals)

    def _keep_state(self, state: Any) -> None:
        """Our own keeper of the totals, last among the callbacks, where a restored one may have taken its place."""
        callbacks = self._trainer.callback_handler.callbacks
        self.saved.bind(self)
        found = [at for at, callback in enumerate(callbacks) if isinstance(callback, MetricsState)]
        for at in found[:1]:
            callbacks[at] = self.saved
        # a checkpoint of a run without metrics has no entry, and the trainer does not make one
        state.stateful_callbacks.setdefault(type(self.saved).__name__, self.saved.state())

    def _watch(self, model: nn.Module) -> None:
        # compiled, they would be traced with the model, and it would be compiled anew for other counts
        begin, end = torch.compiler.disable(self._begin), torch.compiler.disable(self._end)
        handles = [
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.register_forward_hook(end, with_kwargs=True),
        ]
        self._undo.extend(handle.remove for handle in handles)

    def _watch_loader(self) -> None:
        trainer: Any = self._trainer
        stock, own = trainer.get_batch_samples, trainer.__dict__.get("get_batch_samples")
        trainer.get_batch_samples = functools.partial(_timed_batches, self._loading, stock)

        def undo() -> None:
            if own is None:
                del trainer.get_batch_samples
            else:
                trainer.get_batch_samples = own

        self._undo.append(undo)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._in_step:
            return
        kind = self._kind(model)
        batch = {**kwargs, "input_ids": args[0]} if args else kwargs
        decodes = has_cache(batch) or bool(batch.get("use_cache"))
        has_tokens = batch.get("input_ids") is not None or batch.get("inputs_embeds") is not None
        if not has_tokens or (decodes and kind != "train"):
            self._calls.append(None)
            return
        self._calls.append(_Call(kind, count_batch(batch, self._tally.spans)))

    def _end(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = self._calls.pop() if self._in_step and self._calls else None
        if call is not None:
            batch = {**kwargs, "input_ids": args[0]} if args else kwargs
            positions = _head_positions(batch, output)
            if self._fused_loss and call.kind == "train" and getattr(output, "logits", None) is None:
                positions = call.counts.trained  # our own loss computes no others
            self._tally.add_batch(call.kind, call.counts, positions)

    def _kind(self, model: nn.Module) -> Kind:
        if model is not self._trainer.model:
            return "reference"
        if torch.is_grad_enabled() and model.training:
            return "train"
        return "bare" if any(module._disable_adapters for module in self._switches) else "forward"


class MetricsState(TrainerCallback, ExportableState):
    """Keeps the run's totals in checkpoints. The last callback: it knows what all others have asked for.

    With several ranks totals are summed before the trainer saves; a checkpoint that is asked for by a callback added
    later, or outside a step's end, lacks what was counted since the last time that it logged, evaluated or saved.
    """

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self._owner: MetricsCallback | None = None

    def bind(self, owner: MetricsCallback) -> None:
        """From now on these are the totals of that callback."""
        self._owner = owner

    def state(self) -> dict[str, Any]:
        """For the trainer's checkpoint; called on the rank that writes it."""
        if self._owner is not None:
            if not self._owner.pending_elsewhere:
                self._owner.collect()
            self.totals = asdict(self._owner.totals)
        return {"args": {}, "attributes": {"totals": self.totals}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sum over ranks what a checkpoint is to hold."""
        if self._owner is not None and (control.should_save or control.should_evaluate):
            self._owner.collect()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As at a step's end."""
        self.on_step_end(args, state, control)


def attach(trainer: Any, *, peak_flops: float | Literal["measured"] | None = None) -> MetricsCallback:
    """Have a trainer log what it does with its tokens and its time; see :mod:`fastpack.metrics`.

    Args:
        trainer: of transformers or TRL, built and not yet training. Patch it before or after.
        peak_flops: what one device can do, in operations a second, for ``fastpack/mfu``. By default what its maker
            promises for bfloat16 (:mod:`fastpack.metrics.peaks`), and no ``mfu`` for one that is not in the table or
            for a CPU. ``"measured"`` takes the rate of a large product on this device, measured now, for some seconds.

    Returns:
        The callback, which stands before all others, so that reporters are told what it adds. ``close()`` and
        ``trainer.remove_callback`` take it off.

    Raises:
        TypeError: not a trainer.
        PatchError: it has metrics already, or it trains on several GPUs in one process.
        ValueError: ``peak_flops`` is not a positive number.

    Warns:
        FastpackWarning: the model is not one of transformers, or computes what has no formula here.
    """
    handler = getattr(trainer, "callback_handler", None)
    if handler is None or not isinstance(getattr(trainer, "model", None), nn.Module):
        raise TypeError(f"attach takes a Trainer of transformers or TRL, not {type(trainer).__name__}.")
    if any(isinstance(callback, MetricsCallback) for callback in handler.callbacks):
        raise PatchError("this trainer has metrics already; trainer.remove_callback(MetricsCallback) takes them off.")
    if trainer.args.n_gpu > 1:
        raise PatchError("this trainer splits each batch over several GPUs of one process; start it with torchrun.")
    callback = MetricsCallback(trainer, _peak(peak_flops, trainer.args.device))
    handler.callbacks.insert(0, callback)
    handler.callbacks.append(callback.saved)
    return callback


def _peak(given: float | str | None, device: torch.device) -> float | None:
    if given is None:
        return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if given == "measured":
        from fastpack.bench.ceiling import measure

        return measure().flops
    if isinstance(given, str) or not math.isfinite(given) or given <= 0:
        raise ValueError(f"peak_flops is {given!r}; pass operations a second, such as 989e12, or 'measured'.")
    return float(given)


def _models(trainer: Any) -> tuple[nn.Module, nn.Module | None]:
    """The policy, and a reference model of its own."""
    reference = getattr(trainer, "ref_model", None)
    return trainer.model, reference if isinstance(reference, nn.Module) and reference is not trainer.model else None


def _options(model: nn.Module) -> PatchOptions | None:
    """Those of the patch in force; found in a wrapped model too."""
    return next((vars(module)[STATE].options for module in model.modules() if STATE in vars(module)), None)


def _read(model: nn.Module) -> ModelPlan | None:
    try:
        return read_plan(model)
    except UnsupportedModelError as error:
        warnings.warn(f"{PREFIX}mfu is left out: {error}", FastpackWarning, stacklevel=4)
        return None


def _reread(model: nn.Module, before: ModelPlan | None, args: Any) -> ModelPlan | None:
    """As it stands when training begins; as it stood before where it has been wrapped meanwhile."""
    if before is None:
        return None
    try:
        refuse_wrapped(model)
        return read_plan(model)
    except PatchError:
        on = bool(getattr(args, "gradient_checkpointing", False))
        layers = tuple(replace(layer, checkpointed=on and bool(layer.attentions)) for layer in before.layers)
        return replace(before, layers=layers)


def _restored(state: Any) -> Totals:
    """The totals of the checkpoint from which training goes on."""
    saved = state.stateful_callbacks.get(MetricsState.__name__) if state.global_step else None
    if isinstance(saved, list):
        saved = saved[-1]
    values = {} if saved is None else saved["attributes"]["totals"]
    return Totals(**{f.name: values[f.name] for f in fields(Totals) if f.name in values})


def _timed_batches(loading: Stopwatch, stock: Callable[..., Any], batches: Iterator[Any], *args: Any, **kw: Any) -> Any:
    """``Trainer.get_batch_samples`` over an iterator that is timed."""
    return stock(_timed(loading, batches), *args, **kw)


def _timed(loading: Stopwatch, batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        loading.start()
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            loading.stop()
        yield batch


def _head_positions(batch: dict[str, Any], output: Any) -> Count | None:
    """On how many positions the head was computed; None where nothing tells."""
    rows, columns = batch_shape(batch)
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, tuple) and len(output):
        logits = output[0]  # of a value head's wrapper
    if isinstance(logits, torch.Tensor):
        # a classifier's scores of each position, of which it picks one
        return logits.shape[0] * logits.shape[1] if logits.ndim == 3 else rows * columns
    needed = predicted_positions(batch)
    if needed is None:
        return None
    shifted = batch.get("shift_labels")
    if batch.get("fused_lm_head"):
        # TRL: on a device with Triton the positions with a label, elsewhere all that have a next one
        compact = isinstance(needed, torch.Tensor) and needed.device.type in ("cuda", "xpu")
        return needed if compact else rows * (columns - 1) if shifted is None else shifted.numel()
    return rows * columns  # Liger's loss computes all
