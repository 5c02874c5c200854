"""Deciding, batch by batch, whether a decoder stack is replayed, recorded or run as it is."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack.cuda_graphs.recorder import CaptureRefusedError, CudaRecorder, Recorder
from fastpack.cuda_graphs.recordings import Circumstances, GraphSettings, Recordings
from fastpack.cuda_graphs.stack import Stack
from fastpack.cuda_graphs.step import RecordedStep, Request, Ticket
from fastpack.packing.buckets import Bucket
from fastpack.packing.mask import mask_placeholder
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.utils.console import counted
from fastpack.utils.hooks import has_hooks
from fastpack.utils.protocols import ModelLike
from fastpack.utils.replacement import Forward

WAITING = "the forward before still waits for its backward"
ENOUGH_WORK = "its layers have enough work to hide their launches"

Around = Callable[..., AbstractContextManager[None]]
"""Makes the context for a forward of ``(backbone, device, recording=)``."""

_OURS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "packed_seq_lens", "use_cache", "return_dict")
"""What the door sets itself."""
_FOR_THE_LOSS = ("num_items_in_batch", "shift_labels", "labels")
"""What heads hand on to the backbone, where nothing reads it."""


@dataclass
class GraphStats:
    """What happened so far.

    Attributes:
        recordings: forward and backward passes recorded.
        replays: forwards replayed.
        eager: forwards that ran as they are, by reason.
    """

    recordings: int = 0
    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)


class Seen(NamedTuple):
    """A look at the modules, for the one ``packed`` batch, or for whichever comes next."""

    stack: Stack
    state: Hashable
    packed: PackedSeqLens | None = None


@dataclass(eq=False)
class GraphRunner:
    """Runs the backbone of one patched model, from CUDA graphs where that is possible and pays.

    It lives as long as the patch. A copy or a pickle of it, which a copy of the model brings along, starts empty.

    Attributes:
        recorder: what records; another one in tests.
    """

    settings: GraphSettings = field(default_factory=GraphSettings)
    recorder: Recorder = field(default_factory=CudaRecorder)
    stats: GraphStats = field(default_factory=GraphStats)

    def __reduce__(self) -> tuple[Any, ...]:
        return _started_empty, (self.settings, type(self.recorder))

    def __post_init__(self) -> None:
        self._stack: Stack | None = None
        self._changes = self._since_change = 0
        self._pending: weakref.ref[Ticket] | None = None
        self._given_up: str | None = None
        self._seen: Seen | None = None
        self._drop()

    def _drop(self) -> None:
        self._known: dict[Hashable, Circumstances] = {}
        self._recordings = Recordings()
        self.recorder.clear()

    @contextmanager
    def looking_ahead(self, backbone: ModelLike) -> Iterator[None]:
        """Look at the modules before the lengths are waited for: 2 ms with PEFT, in which the device has work.

        A :meth:`run` inside believes what was seen, unless hooks of the backbone itself come in between.
        """
        self._seen = self.look_ahead(backbone)
        try:
            yield
        finally:
            self._seen = None

    def look_ahead(self, backbone: ModelLike) -> Seen | None:
        """The same for who does not see the call end: what was seen, for :meth:`believe`; None where that is idle.

        Whoever runs in between must not touch the modules: it would not be noticed.
        """
        hooked = has_hooks(backbone) or "_hf_hook" in backbone.__dict__
        return None if hooked or not torch.is_grad_enabled() or self._given_up else self._look(backbone)

    def believe(self, seen: Seen | None, packed: PackedSeqLens) -> None:
        """Let the run of this very batch, if it comes next, do without a look of its own."""
        self._seen = None if seen is None else seen._replace(packed=packed)

    def _look(self, backbone: ModelLike) -> Seen:
        stack = self._current_stack(backbone)
        return Seen(stack, stack.state())

    def run(self, backbone: ModelLike, stock: Forward, arguments: dict[str, Any], around: Around | None) -> Any:
        """The backbone's outputs for a packed batch.

        Args:
            backbone: the module.
            stock: its forward from before the patch.
            arguments: what the stock forward is to be called with.
            around: what goes around it, recorded or not; it may copy on streams of its own.
        """
        packed: PackedSeqLens = arguments["packed_seq_lens"]
        seen, self._seen = self._seen, None
        reason = (
            self._given_up or self.recorder.rejects(packed.cu_seqlens.device) or why_not_this_call(backbone, arguments)
        )
        if reason is None:
            if arguments.get("inputs_embeds") is None:
                # outside the recording: its gradient, its hooks and NEFTune's noise are as ever
                embeddings = backbone.get_input_embeddings()(arguments["input_ids"])
                arguments = {**arguments, "input_ids": None, "inputs_embeds": embeddings}
            reason, step, request = self._find_step(backbone, stock, arguments, packed, seen, around)
            if step is not None:
                ticket = Ticket()
                self._pending = weakref.ref(ticket)
                self.stats.replays += 1
                return step.replay(request, ticket)
        assert reason is not None
        self.stats.eager[reason] += 1
        with nullcontext() if around is None else around(backbone, packed.cu_seqlens.device):
            return stock(**arguments)

    def _find_step(
        self,
        backbone: ModelLike,
        stock: Forward,
        arguments: Mapping[str, Any],
        packed: PackedSeqLens,
        seen: Seen | None,
        around: Around | None,
    ) -> tuple[str | None, RecordedStep | None, Request]:
        """The recording to replay, made now if it is time to; or why there is none."""
        if seen is None or (seen.packed is not None and seen.packed is not packed):
            seen = self._look(backbone)
        stack, state = seen.stack, seen.state
        embeddings: Tensor = arguments["inputs_embeds"]
        bucket = Bucket.of(packed.lengths)
        extras = {
            name: value
            for name, value in arguments.items()
            if value is not None and name not in _OURS and name not in _FOR_THE_LOSS
        }
        runner = _runner(backbone, stock, extras, around)
        request = Request(stack, runner, embeddings, packed, bucket, in_pieces=around is None)
        like = (
            state,
            embeddings.dtype,
            embeddings.requires_grad,
            _process(embeddings.device),
            tuple(sorted(extras.items())),
        )
        known = self._known.get(like)
        if known is None:
            known = self._known[like] = Circumstances(why_not_this_stack(stack, embeddings), stack.work(backbone))
        reason = self._given_up or known.reason
        if reason is None and known.work * bucket.tokens > self.settings.max_work:
            reason = ENOUGH_WORK
        if reason is None and self._waiting():
            reason = WAITING
        if reason is not None:
            return reason, None, request
        try:
            found = self._recordings.serve(request, known, self.settings, self.recorder)
        except CaptureRefusedError as error:
            self._known[like] = Circumstances(str(error), known.work)
            self._recordings.forget(known, self.recorder)
            return str(error), None, request
        self.stats.recordings += found.made
        return found.reason, found.step, request

    def _current_stack(self, backbone: ModelLike) -> Stack:
        """The modules as they are, with every recording dropped if they are not what they were."""
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

    def _waiting(self) -> bool:
        ticket = None if self._pending is None else self._pending()
        return ticket is not None and not ticket.done

    def describe(self, device: torch.device) -> str:
        """One line for a report."""
        reason = self._given_up or (self.recorder.rejects(device) if device.type != "meta" else None)
        if reason is not None:
            return f"graphs: off, {reason}"
        replays = counted(self.stats.replays, "step")
        parts = [f"{self.stats.recordings} recorded, {replays} replayed"] if self.stats.replays else []
        parts += [f"{count} run as they are: {why}" for why, count in self.stats.eager.most_common()]
        return "; ".join(["graphs: on", *parts])


def _started_empty(settings: GraphSettings, recorder: type[Recorder]) -> GraphRunner:
    return GraphRunner(settings, recorder())


def why_not_this_call(backbone: ModelLike, arguments: Mapping[str, Any]) -> str | None:
    """Why a call can't be served from a recording, whatever the model; or None."""
    if not torch.is_grad_enabled():
        return "no gradient is wanted"
    if torch._C._current_graph_task_id() != -1:
        return "it runs inside a backward pass (checkpointing around the model)"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "saved tensors are packed by someone (checkpointing around the model, offloading)"
    if torch.is_anomaly_enabled() or torch._C._len_torch_dispatch_stack():
        return "someone watches every operation (anomaly detection, a dispatch mode)"
    for name in ("output_hidden_states", "output_router_logits"):
        if arguments.get(name) is None and getattr(backbone.config, name, False):
            return f"the config sets {name}"
    for name, value in arguments.items():
        if name in _OURS or name in _FOR_THE_LOSS or value is None or value is False:
            continue
        if name.startswith("output_") or not isinstance(value, (int, float, str)):
            return f"{name} came with the batch"
    return None


def why_not_this_stack(stack: Stack, embeddings: Tensor) -> str | None:
    """Why a stack in this state can't be recorded; or None."""
    reason = stack.refusal()
    if reason is not None:
        return reason
    if stack.checkpoints_reentrantly and not embeddings.requires_grad:
        return "reentrant checkpointing has no gradient to start from (call model.enable_input_require_grads())"
    return None


def _runner(
    backbone: ModelLike, stock: Forward, settings: Mapping[str, Any], around: Around | None
) -> Callable[[Tensor, PackedSeqLens], Any]:
    """What is recorded: the stock forward from embeddings on."""

    def run(embeddings: Tensor, packed: PackedSeqLens) -> Any:
        with nullcontext() if around is None else around(backbone, embeddings.device, recording=True):
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
    """What of the process changes which kernels run."""
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return autocast, torch.are_deterministic_algorithms_enabled()
