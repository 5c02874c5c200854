"""Decide for each forward whether there are activations to offload, and report what was offloaded."""

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

from fastpack.offload.activations import NO_HOST_MEMORY, ActivationOffload, slots_installed
from fastpack.offload.saved import OffloadedTensor, SavedTensorHooks, UnmovedTensor
from fastpack.offload.transfer import HostChannel, Link, connect_cuda
from fastpack.utils.modules import decoder_layers

MIN_BYTES = 4 * 2**20
"""Smaller tensors stay on the device: there is little to gain, and launching the copies would cost time."""


@dataclass
class OffloadStats:
    """Counts of forwards and offloaded tensors so far.

    Attributes:
        forwards: forwards with offloading.
        tensors: layer inputs copied to the host in these forwards.
        products: layers whose gate and up were copied in these forwards.
        attention: layers whose attention was copied in these forwards.
        recorded: ``(tensors, products, attention)`` of the forward that was recorded last, which each of its replays
            copies again.
        left: layer inputs of the last forward that stay on the device, since the host had no memory for them.
        made_again: counts of layers of the last forward by what is recomputed nevertheless, and why.
        idle: training forwards without offloading, by reason.
    """

    forwards: int = 0
    tensors: int = 0
    products: int = 0
    attention: int = 0
    recorded: tuple[int, int, int] | None = None
    left: int = 0
    made_again: Counter[tuple[str, str]] = field(default_factory=Counter)
    idle: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class CheckpointOffload:
    """Offloading for one patched model; lives as long as the patch. A copy or a pickle of it starts empty.

    Attributes:
        connect: makes the link to a device, or returns None if there can't be one; tests replace it.
        min_bytes: smaller tensors stay on the device.
        activations: whether gate and up are offloaded too, as far as copy time allows.
        stats: counts of forwards and offloaded tensors.
    """

    connect: Callable[[torch.device], Link | None] = connect_cuda
    min_bytes: int = MIN_BYTES
    activations: bool = False
    stats: OffloadStats = field(default_factory=OffloadStats)
    _channels: dict[tuple[torch.device, bool], HostChannel | None] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return an offload of the same settings, without buffers."""
        return CheckpointOffload, (self.connect, self.min_bytes, self.activations)

    def forward_context(
        self, backbone: nn.Module, device: torch.device, *, recording: bool = False
    ) -> AbstractContextManager[None]:
        """Return the context for a forward of the backbone; it does nothing if there is nothing to offload.

        Args:
            backbone: the module whose forward runs inside.
            device: the device on which it runs.
            recording: whether the forward is recorded, or warms up for it; its host buffers then live as long as the
                recording.
        """
        if not (torch.is_grad_enabled() and backbone.training):
            return nullcontext()
        reason = self.why_not(backbone, device, recording=recording)
        if reason is not None:
            if not recording:  # one recording warms up several times and is replayed more often
                self.stats.idle[reason] += 1
            return nullcontext()
        return self.saving(decoder_layers(backbone), recording=recording)

    @contextmanager
    def saving(self, layers: Sequence[nn.Module] = (), *, recording: bool = False) -> Iterator[None]:
        """Offload tensors that are saved for backward inside the context, and activations of layers.

        Args:
            layers: the layers whose activations are offloaded.
            recording: whether the forward is recorded, or warms up for it.
        """
        channel = functools.partial(self.channel, recording=recording)
        hooks, activations = (
            SavedTensorHooks(channel, self.min_bytes),
            ActivationOffload(channel, len(layers), self.min_bytes, of_mlps=self.activations),
        )
        try:
            with saved_tensors_hooks(hooks.pack, _unpack), slots_installed(layers, activations):
                yield
            hooks.finish()
            activations.finish()
        finally:
            products, attention = activations.sent
            if recording:
                self.stats.recorded = (hooks.sent, products, attention)
            else:
                self.stats.forwards += 1
                self.stats.tensors += hooks.sent
                self.stats.products += products
                self.stats.attention += attention
            self.stats.left, self.stats.made_again = hooks.left, activations.made_again
            hooks.clear()
            activations.clear()

    def why_not(self, backbone: nn.Module, device: torch.device, *, recording: bool = False) -> str | None:
        """Return why a training forward on a device has nothing to offload, or None."""
        if self.channel(device, recording=recording) is None:
            return f"copies that overlap with the computation need a CUDA device, not {device.type}"
        layers = decoder_layers(backbone)
        checkpointed = [on for on in map(_checkpointing, layers) if on is not None]
        if not any(checkpointed):
            return "gradient checkpointing is off"
        if not all(checkpointed):
            return f"{sum(checkpointed)} of {len(checkpointed)} layers are checkpointed, and the others save much more"
        if torch._C._current_graph_task_id() != -1:
            return "it runs inside a backward pass (checkpointing around the model)"
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return "other code packs saved tensors (checkpointing around the model, TRL's offloading)"
        if not recording and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "other code is capturing a CUDA graph"
        return None

    def channel(self, device: torch.device, *, recording: bool = False) -> HostChannel | None:
        """Return a device's channel, made at first use; None if there can't be one."""
        key = (device, recording)
        if key not in self._channels:
            link = self.connect(device)
            self._channels[key] = None if link is None else HostChannel(link, keep=recording)
        return self._channels[key]

    @property
    def host_bytes(self) -> int:
        """Size of the host buffers."""
        return sum(channel.pool.nbytes for channel in self._channels.values() if channel is not None)

    def describe(self, backbone: nn.Module) -> str:
        """Return one line for a report."""
        stats = self.stats
        if stats.forwards or stats.recorded:
            parts = []
            if stats.forwards:
                counts = self._counts_text(stats.tensors, stats.products, stats.attention)
                parts += [f"{counts} of {stats.forwards} forwards waited"]
            if stats.recorded is not None:
                parts += [f"{self._counts_text(*stats.recorded)} of each recorded step wait"]
            parts[-1] += f" in {self.host_bytes / 2**30:.2f} GiB of host memory"
            parts += [f"{stats.left} layer inputs stay on the device: {NO_HOST_MEMORY}"] if stats.left else []
            parts += [f"{what} of {n} layers: recomputed, {why}" for (what, why), n in stats.made_again.most_common()]
        else:
            device = next(backbone.parameters()).device
            reason = None if device.type == "meta" else self.why_not(backbone, device)
            parts = ["on"] if reason is None else [f"nothing to do, {reason}"] if reason not in stats.idle else []
        parts += [f"{count} forwards without: {why}" for why, count in stats.idle.most_common()]
        return f"offload: {'; '.join(parts)}"

    def _counts_text(self, tensors: int, products: int, attention: int) -> str:
        """Return counts of offloaded layer inputs and activations as text."""
        parts = [f"{tensors} layer inputs"]
        parts += [f"attention of {attention} layers"] if attention else []
        parts += [f"gate and up of {products} layers"] if self.activations else []
        return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]},"


def _checkpointing(layer: nn.Module) -> bool | None:
    """Return whether a layer is checkpointed; None for a module that is no decoder layer."""
    if hasattr(layer, "_checkpoint_wrapped_module"):  # torch's CheckpointWrapper, which accelerate puts under FSDP
        return True
    return getattr(layer, "gradient_checkpointing", None)


def _unpack(saved: OffloadedTensor | UnmovedTensor) -> Tensor:
    """Return the tensor that autograd saved."""
    return saved.unpack()
