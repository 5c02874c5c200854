"""Deciding, forward by forward, whether there are layer inputs to offload; and what the report says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack.layers.stock import bound_with
from fastpack.offload.saved import Kept, Offloaded, Pass
from fastpack.offload.transfer import Lane, Link, connect_cuda

MIN_BYTES = 4 * 2**20
"""Smaller tensors stay: there is little to gain, and launching the copies would show."""


@dataclass
class OffloadStats:
    """What happened so far.

    Attributes:
        forwards: forwards with the hooks around them.
        tensors: how many tensors were copied to the host.
        idle: training forwards without, by reason.
    """

    forwards: int = 0
    tensors: int = 0
    idle: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class CheckpointOffload:
    """Offloading for one patched model; lives as long as the patch. A copy or a pickle of it starts empty.

    Attributes:
        connect: makes the link to a device, or None where there can't be one; another one in tests.
        min_bytes: smaller tensors stay on the device.
    """

    connect: Callable[[torch.device], Link | None] = connect_cuda
    min_bytes: int = MIN_BYTES
    stats: OffloadStats = field(default_factory=OffloadStats)

    def __post_init__(self) -> None:
        self._lanes: dict[torch.device, Lane | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"connect": self.connect, "min_bytes": self.min_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, stats=OffloadStats())
        self.__post_init__()

    def around(self, backbone: nn.Module, device: torch.device) -> AbstractContextManager[None]:
        """The context for a forward of the backbone on a device; does nothing where there is nothing to offload."""
        if not (torch.is_grad_enabled() and backbone.training):
            return nullcontext()
        reason = self.why_not(backbone, device)
        if reason is not None:
            self.stats.idle[reason] += 1
            return nullcontext()
        return self.saving()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Offload what is saved for backward inside, whatever saves it."""
        hooks = Pass(self.lane, self.min_bytes)
        self.stats.forwards += 1
        try:
            with saved_tensors_hooks(hooks.pack, _unpack):
                yield
            hooks.finish()
        finally:
            self.stats.tensors += hooks.sent
            hooks.clear()

    def why_not(self, backbone: nn.Module, device: torch.device) -> str | None:
        """Why a training forward on a device has nothing to offload, or None."""
        if self.lane(device) is None:
            return f"the model is on {device.type}, and copies beside the computation need CUDA"
        layers = [layer for found in backbone.children() if isinstance(found, nn.ModuleList) for layer in found]
        checkpointed = [on for on in map(_checkpointing, layers) if on is not None]
        if not any(checkpointed):
            return "gradient checkpointing is off"
        if not all(checkpointed):
            return f"{sum(checkpointed)} of {len(checkpointed)} layers are checkpointed, and the others save much more"
        if torch._C._current_graph_task_id() != -1:
            return "it runs inside a backward pass (checkpointing around the model)"
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return "saved tensors are packed by someone else (checkpointing around the model, TRL's offloading)"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        return None

    def lane(self, device: torch.device) -> Lane | None:
        """The lane of a device, made when it is first asked for; None where there can't be one."""
        if device not in self._lanes:
            link = self.connect(device)
            self._lanes[device] = None if link is None else Lane(link)
        return self._lanes[device]

    @property
    def host_bytes(self) -> int:
        """Size of the host buffers."""
        return sum(lane.pool.nbytes for lane in self._lanes.values() if lane is not None)

    def describe(self, backbone: nn.Module) -> str:
        """One line for a report."""
        stats = self.stats
        if stats.forwards:
            size = f"{self.host_bytes / 2**30:.2f} GiB"
            parts = [f"{stats.tensors} layer inputs of {stats.forwards} forwards waited in {size} of host memory"]
        else:
            device = next(backbone.parameters()).device
            reason = None if device.type == "meta" else self.why_not(backbone, device)
            parts = ["on" if reason is None else f"nothing to do, {reason}"]
        parts += [f"{count} forwards without: {why}" for why, count in stats.idle.most_common()]
        return f"offload: {'; '.join(parts)}"


def offload_of(backbone: nn.Module) -> CheckpointOffload | None:
    """The offloading of a patched backbone, None where it was patched without."""
    return bound_with(backbone, CheckpointOffload)


def _checkpointing(layer: nn.Module) -> bool | None:
    """Whether a layer is checkpointed; None for what is no decoder layer."""
    if hasattr(layer, "_checkpoint_wrapped_module"):  # torch's CheckpointWrapper, which accelerate puts under FSDP
        return True
    return getattr(layer, "gradient_checkpointing", None)


def _unpack(saved: Offloaded | Kept) -> Tensor:
    return saved.unpack()
