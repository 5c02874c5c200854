"""Decide, batch by batch, whether a decoder stack is replayed, recorded or run eagerly."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack.cuda_graphs.gradients import ROUTER_LOGITS
from fastpack.cuda_graphs.recorder import CaptureRefusedError, CudaRecorder, Recorder
from fastpack.cuda_graphs.recordings import GraphSettings, Recordings, StackState
from fastpack.cuda_graphs.stack import Stack
from fastpack.cuda_graphs.step import PendingBackward, RecordedStep, Request
from fastpack.packing.buckets import Bucket
from fastpack.packing.mask import mask_placeholder
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.console import counted
from fastpack.utils.hooks import has_hooks
from fastpack.utils.protocols import ModelLike
from fastpack.utils.replacement import Forward

WAITING = "an earlier forward still waits for its backward"
ENOUGH_WORK = "its layers have enough work to hide their launches"

ForwardContext = Callable[..., AbstractContextManager[None]]
"""A function of ``(backbone, device, recording=)`` that returns the context of a forward."""

_SET_BY_PATCH = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "packed_seq_lens",
    "use_cache",
    "return_dict",
)
"""Arguments that the patched forward sets itself."""
_ROUTED = f"output_{ROUTER_LOGITS}"
"""The argument, and the config's setting, that requests the routers' logits."""
_FOR_THE_LOSS = ("num_items_in_batch", "shift_labels", "labels")
"""Arguments that heads pass on to the backbone, which does not read them."""


@dataclass
class GraphStats:
    """Counts of forwards so far.

    Attributes:
        recordings: forward and backward passes recorded.
        replays: forwards replayed.
        eager: forwards that ran eagerly, by reason.
    """

    recordings: int = 0
    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)


class StackSnapshot(NamedTuple):
    """A stack and its state, read ahead of a call: for the batch ``packed`` or, if that is None, for the next batch."""

    stack: Stack
    state: Hashable
    packed: PackedSeqLens | None = None


@dataclass(eq=False)
class GraphRunner:
    """Runs the backbone of one patched model from CUDA graphs, if that is possible and pays.

    It lives as long as the patch. Its copies and pickles, which are made when the model is copied, start empty.

    Attributes:
        settings: when to record.
        recorder: records and replays passes; tests use another one.
        stats: counts of forwards.
    """

    settings: GraphSettings = field(default_factory=GraphSettings)
    recorder: Recorder = field(default_factory=CudaRecorder)
    stats: GraphStats = field(default_factory=GraphStats)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a runner of the same settings, without recordings."""
        return _new_runner, (self.settings, type(self.recorder))

    def __post_init__(self) -> None:
        """Start without recordings."""
        self._stack: Stack | None = None
        self._changes = self._since_change = 0
        self._pending: weakref.ref[PendingBackward] | None = None
        self._given_up: str | None = None
        self._snapshot: StackSnapshot | None = None
        self._drop()

    def _drop(self) -> None:
        """Drop all recordings and their memory."""
        self._states: dict[Hashable, StackState] = {}
        self._recordings = Recordings()
        self.recorder.clear()

    @contextmanager
    def early_snapshot(self, backbone: ModelLike) -> Iterator[None]:
        """Read the stack's state before the lengths are waited for.

        With PEFT this takes 2 ms, in which the device still works. A :meth:`run` inside the context uses this state,
        unless the backbone has hooks of its own, which may change modules.
        """
        self._snapshot = self.take_snapshot(backbone)
        try:
            yield
        finally:
            self._snapshot = None

    def take_snapshot(self, backbone: ModelLike) -> StackSnapshot | None:
        """Return the stack's state for :meth:`use_snapshot`; None if it would not be used.

        This is for callers that don't see the end of the call. Code that runs before :meth:`run` must not change the
        modules: the change would go unnoticed.
        """
        hooked = has_hooks(backbone) or "_hf_hook" in backbone.__dict__
        return None if hooked or not torch.is_grad_enabled() or self._given_up else self._take_snapshot(backbone)

    def use_snapshot(self, snapshot: StackSnapshot | None, packed: PackedSeqLens) -> None:
        """Let :meth:`run` use this state if it gets this batch next, without reading the stack again."""
        self._snapshot = None if snapshot is None else snapshot._replace(packed=packed)

    def _take_snapshot(self, backbone: ModelLike) -> StackSnapshot:
        stack = self._current_stack(backbone)
        return StackSnapshot(stack, stack.state())

    def run(
        self, backbone: ModelLike, stock: Forward, arguments: dict[str, Any], forward_context: ForwardContext | None
    ) -> Any:
        """Return the backbone's outputs for a packed batch.

        Args:
            backbone: the module.
            stock: its forward from before the patch.
            arguments: the keyword arguments of the stock forward.
            forward_context: makes a context for the forward, recorded or not; it may copy on streams of its own.
        """
        packed: PackedSeqLens = arguments["packed_seq_lens"]
        snapshot, self._snapshot = self._snapshot, None
        reason = (
            self._given_up or self.recorder.rejects(packed.cu_seqlens.device) or why_not_this_call(backbone, arguments)
        )
        if reason is None:
            if arguments.get("inputs_embeds") is None:
                # The embedding stays outside the recording, so its gradient, hooks and NEFTune's noise are unchanged.
                embeddings = backbone.get_input_embeddings()(arguments["input_ids"])
                arguments = {**arguments, "input_ids": None, "inputs_embeds": embeddings}
            reason, step, request = self._find_step(backbone, stock, arguments, packed, snapshot, forward_context)
            if step is not None:
                pending = PendingBackward()
                self._pending = weakref.ref(pending)
                self.stats.replays += 1
                return step.replay(request, pending)
        assert reason is not None
        self.stats.eager[reason] += 1
        with nullcontext() if forward_context is None else forward_context(backbone, packed.cu_seqlens.device):
            return stock(**arguments)

    def _find_step(
        self,
        backbone: ModelLike,
        stock: Forward,
        arguments: Mapping[str, Any],
        packed: PackedSeqLens,
        snapshot: StackSnapshot | None,
        forward_context: ForwardContext | None,
    ) -> tuple[str | None, RecordedStep | None, Request]:
        """Return the recording to replay, after making it if it is worth making; or why there is none."""
        if snapshot is None or (snapshot.packed is not None and snapshot.packed is not packed):
            snapshot = self._take_snapshot(backbone)
        stack, state = snapshot.stack, snapshot.state
        embeddings: Tensor = arguments["inputs_embeds"]
        bucket = Bucket.of(packed.lengths)
        extras = {
            name: value
            for name, value in arguments.items()
            if value is not None and name not in _SET_BY_PATCH and name not in _FOR_THE_LOSS
        }
        runner = _runner(backbone, stock, extras, forward_context)
        request = Request(stack, runner, embeddings, packed, bucket, in_pieces=forward_context is None)
        cache_key = (
            state,
            embeddings.dtype,
            embeddings.requires_grad,
            _process(embeddings.device),
            tuple(sorted(extras.items())),
            bool(extras.get(_ROUTED, getattr(backbone.config, _ROUTED, False))),
        )
        stack_state = self._states.get(cache_key)
        if stack_state is None:
            stack_state = self._states[cache_key] = StackState(
                why_not_this_stack(stack, embeddings), stack.work(backbone)
            )
        reason = self._given_up or stack_state.reason
        if reason is None and stack_state.work * bucket.tokens > self.settings.max_work:
            reason = ENOUGH_WORK
        if reason is None and self._backward_pending():
            reason = WAITING
        if reason is not None:
            return reason, None, request
        try:
            lookup = self._recordings.serve(request, stack_state, self.settings, self.recorder)
        except CaptureRefusedError as error:
            self._states[cache_key] = StackState(str(error), stack_state.work)
            self._recordings.forget(stack_state, self.recorder)
            return str(error), None, request
        self.stats.recordings += lookup.new
        return lookup.reason, lookup.step, request

    def _current_stack(self, backbone: ModelLike) -> Stack:
        """Return the stack as it is now; drop every recording if modules or weights were replaced."""
        stack = self._stack
        self._since_change += 1
        if stack is not None and stack.unchanged():
            return stack
        if stack is not None:
            soon = self._since_change < 10 * self.settings.max_changes
            self._changes = self._changes + 1 if soon else 1
            if self._changes >= self.settings.max_changes:
                self._given_up = f"modules or weights were replaced {self._changes} times in a short while"
        self._since_change = 0
        self._drop()
        self._stack = Stack(backbone)
        return self._stack

    def _backward_pending(self) -> bool:
        """Return whether the last replayed forward still waits for its backward."""
        pending = None if self._pending is None else self._pending()
        return pending is not None and not pending.done

    def describe(self, device: torch.device) -> str:
        """Return one line for a report."""
        reason = self._given_up or (self.recorder.rejects(device) if device.type != "meta" else None)
        if reason is not None:
            return f"graphs: off, {reason}"
        replays = counted(self.stats.replays, "step")
        parts = [f"{self.stats.recordings} recorded, {replays} replayed"] if self.stats.replays else []
        parts += [f"{count} run eagerly: {why}" for why, count in self.stats.eager.most_common()]
        return "; ".join(["graphs: on", *parts])


def _new_runner(settings: GraphSettings, recorder: type[Recorder]) -> GraphRunner:
    return GraphRunner(settings, recorder())


def why_not_this_call(backbone: ModelLike, arguments: Mapping[str, Any]) -> str | None:
    """Return why a call can't be served from a recording, whatever the model; or None."""
    if not torch.is_grad_enabled():
        return "gradients are disabled"
    if torch._C._current_graph_task_id() != -1:
        return "it runs inside a backward pass (checkpointing around the model)"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "other code packs saved tensors (checkpointing around the model, offloading)"
    if torch.is_anomaly_enabled() or torch._C._len_torch_dispatch_stack():
        return "other code watches every operation (anomaly detection, a dispatch mode)"
    positions = arguments.get("position_ids")
    if positions is not None and positions.ndim == 3:
        return "position_ids of several axes came with the batch"
    if arguments.get("output_hidden_states") is None and getattr(backbone.config, "output_hidden_states", False):
        return "the config sets output_hidden_states"
    if arguments["packed_seq_lens"].two_way is not None:
        return "the batch has image blocks"
    for name, value in arguments.items():
        if name in _SET_BY_PATCH or name in _FOR_THE_LOSS or value is None or value is False:
            continue
        if name == _ROUTED:
            continue
        if name.startswith("output_") or not isinstance(value, (int, float, str)):
            return f"{name} came with the batch"
    return None


def why_not_this_stack(stack: Stack, embeddings: Tensor) -> str | None:
    """Return why a stack in this state can't be recorded; or None."""
    reason = stack.refusal()
    if reason is not None:
        return reason
    if stack.checkpoints_reentrantly and not embeddings.requires_grad:
        return "reentrant checkpointing has no gradient to start from (call model.enable_input_require_grads())"
    return None


def _runner(
    backbone: ModelLike, stock: Forward, settings: Mapping[str, Any], forward_context: ForwardContext | None
) -> Callable[[Tensor, PackedSeqLens], Any]:
    """Return the function to record: the stock forward, from embeddings on."""

    def run(embeddings: Tensor, packed: PackedSeqLens) -> Any:
        with nullcontext() if forward_context is None else forward_context(backbone, embeddings.device, recording=True):
            return stock(
                **settings,
                input_ids=None,
                inputs_embeds=embeddings,
                attention_mask=mask_placeholder(packed),
                position_ids=packed.position_ids,
                packed_seq_lens=packed,
                use_cache=False,
                return_dict=True,
            )

    return run


def _process(device: torch.device) -> Hashable:
    """Return the settings of the process that change which kernels run."""
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return autocast, torch.are_deterministic_algorithms_enabled()
