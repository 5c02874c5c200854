"""Deciding, forward by forward, whether there are layer inputs to offload; and what the report says of it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack.offload.products import Journey, with_slots
from fastpack.offload.saved import Kept, Offloaded, Pass
from fastpack.offload.transfer import Lane, Link, connect_cuda
from fastpack.utils.modules import decoder_layers

MIN_BYTES = 4 * 2**20
"""Smaller tensors stay: there is little to gain, and launching the copies would show."""


@dataclass
class OffloadStats:
    """What happened so far.

    Attributes:
        forwards: forwards with the hooks around them.
        tensors: how many layer inputs they copied to the host.
        products: of how many layers gate and up were copied.
        recorded: the last two of the forward that was recorded last, which each replay of it does again.
        made_again: layers of the last of all these whose gate and up are made again nevertheless, by reason.
        idle: training forwards without, by reason.
    """

    forwards: int = 0
    tensors: int = 0
    products: int = 0
    recorded: tuple[int, int] | None = None
    made_again: Counter[str] = field(default_factory=Counter)
    idle: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class CheckpointOffload:
    """Offloading for one patched model; lives as long as the patch. A copy or a pickle of it starts empty.

    Attributes:
        connect: makes the link to a device, or None where there can't be one; another one in tests.
        min_bytes: smaller tensors stay on the device.
        products: gate and up leave too, as far as there is time for it.
    """

    connect: Callable[[torch.device], Link | None] = connect_cuda
    min_bytes: int = MIN_BYTES
    products: bool = False
    stats: OffloadStats = field(default_factory=OffloadStats)
    _lanes: dict[tuple[torch.device, bool], Lane | None] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointOffload, (self.connect, self.min_bytes, self.products)

    def around(
        self, backbone: nn.Module, device: torch.device, *, recording: bool = False
    ) -> AbstractContextManager[None]:
        """The context for a forward of the backbone on a device; does nothing where there is nothing to offload.

        Args:
            recording: the forward is recorded, or warms up for it: its host buffers are kept for the recording.
        """
        if not (torch.is_grad_enabled() and backbone.training):
            return nullcontext()
        reason = self.why_not(backbone, device, recording=recording)
        if reason is not None:
            if not recording:  # which is tried several times, and replayed more often
                self.stats.idle[reason] += 1
            return nullcontext()
        return self.saving(decoder_layers(backbone) if self.products else (), recording=recording)

    @contextmanager
    def saving(self, layers: Sequence[nn.Module] = (), *, recording: bool = False) -> Iterator[None]:
        """Offload what is saved for backward inside, whatever saves it; and products of these layers."""
        lane = functools.partial(self.lane, recording=recording)
        hooks, journey = Pass(lane, self.min_bytes), Journey(lane, len(layers), self.min_bytes)
        try:
            with saved_tensors_hooks(hooks.pack, _unpack), with_slots(layers, journey):
                yield
            hooks.finish()
            journey.finish()
        finally:
            if recording:
                self.stats.recorded = (hooks.sent, journey.sent)
            else:
                self.stats.forwards += 1
                self.stats.tensors += hooks.sent
                self.stats.products += journey.sent
            self.stats.made_again = journey.made_again
            hooks.clear()
            journey.clear()

    def why_not(self, backbone: nn.Module, device: torch.device, *, recording: bool = False) -> str | None:
        """Why a training forward on a device has nothing to offload, or None."""
        if self.lane(device, recording=recording) is None:
            return f"copies beside the computation need a CUDA device, not {device.type}"
        layers = decoder_layers(backbone)
        checkpointed = [on for on in map(_checkpointing, layers) if on is not None]
        if not any(checkpointed):
            return "gradient checkpointing is off"
        if not all(checkpointed):
            return f"{sum(checkpointed)} of {len(checkpointed)} layers are checkpointed, and the others save much more"
        if torch._C._current_graph_task_id() != -1:
            return "it runs inside a backward pass (checkpointing around the model)"
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return "saved tensors are packed by someone else (checkpointing around the model, TRL's offloading)"
        if not recording and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "someone else is capturing a CUDA graph"
        return None

    def lane(self, device: torch.device, *, recording: bool = False) -> Lane | None:
        """The lane of a device, made when it is first asked for; None where there can't be one."""
        key = (device, recording)
        if key not in self._lanes:
            link = self.connect(device)
            self._lanes[key] = None if link is None else Lane(link, keep=recording)
        return self._lanes[key]

    @property
    def host_bytes(self) -> int:
        """Size of the host buffers."""
        return sum(lane.pool.nbytes for lane in self._lanes.values() if lane is not None)

    def describe(self, backbone: nn.Module) -> str:
        """One line for a report."""
        stats = self.stats
        if stats.forwards or stats.recorded:
            parts = []
            if stats.forwards:
                parts += [f"{self._what(stats.tensors, stats.products)} of {stats.forwards} forwards waited"]
            if stats.recorded is not None:
                parts += [f"{self._what(*stats.recorded)} of each recorded step wait"]
            parts[-1] += f" in {self.host_bytes / 2**30:.2f} GiB of host memory"
            parts += [f"gate and up of {n} layers are made again: {why}" for why, n in stats.made_again.most_common()]
        else:
            device = next(backbone.parameters()).device
            reason = None if device.type == "meta" else self.why_not(backbone, device)
            parts = ["on"] if reason is None else [f"nothing to do, {reason}"] if reason not in stats.idle else []
        parts += [f"{count} forwards without: {why}" for why, count in stats.idle.most_common()]
        return f"offload: {'; '.join(parts)}"

    def _what(self, tensors: int, products: int) -> str:
        return f"{tensors} layer inputs" + (f", and gate and up of {products} layers," if self.products else "")


def _checkpointing(layer: nn.Module) -> bool | None:
    """Whether a layer is checkpointed; None for what is no decoder layer."""
    if hasattr(layer, "_checkpoint_wrapped_module"):  # torch's CheckpointWrapper, which accelerate puts under FSDP
        return True
    return getattr(layer, "gradient_checkpointing", None)


def _unpack(saved: Offloaded | Kept) -> Tensor:
    return saved.unpack()
