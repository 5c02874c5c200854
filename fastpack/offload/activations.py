"""Offload activations of checkpointed layers, instead of recomputing them in the backward.

A checkpointed layer runs twice. The gate and up matmuls of its gated MLP are the larger part of the second run, and
take H operations for each byte of their results. In long sequences attention is: it takes two operations for each byte
of its result and each key that a query sees. If the copies keep pace with the computation, copying the results back
costs no time. Each layer carries a :class:`Slot` while it runs. :func:`fastpack.ops.linear.gated_mlp.gated_mlp` and an
attention backend save the results there in the first run and load them in the second. They are the same bits.

Shape suffixes: T tokens, H hidden size, I size inside.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastpack.offload import ACTIVATION_SLOT
from fastpack.offload.saved import PendingTransfers, SavedStorage
from fastpack.offload.transfer import HostChannel, Rates
from fastpack.utils.hooks import WrappedCheckpointing

CHECKPOINTING = "_gradient_checkpointing_func"

LAYER_TIME = 2.25
"""The shortest time of a decoder layer's forward, in multiples of the time of its gate and up matmuls at full rate.

A layer has 1.9 times their operations (Llama 8B) and takes some time outside of matmuls. On an H200 it takes 2.6 times
as long as they do; but copies that take all of that time end after the last layer.
"""
ATTENTION_RATE = 0.5
"""The rate of attention's operations, as a share of the rate of matmuls."""
LEAST_OPERATIONS = 1000
"""Attention that takes fewer operations for each byte of its result is computed again, whatever the rates are."""
KEEP = 2
"""The number of last layers whose activations stay on the device, since the backward needs them first."""
IN_FLIGHT = 1
"""The largest number of layers whose activations are being copied to the host; the device waits for the oldest copy."""
NO_HOST_MEMORY = "the host has no memory left"
NO_GATED_MLP = "they have no gated MLP that runs as one op, or code other than transformers checkpoints them"


class LayerActivations:
    """Activations of one layer, which are needed together: on the device, on the host, or being copied."""

    def __init__(
        self, channel: HostChannel, tensors: Sequence[Tensor], previous: weakref.ref[LayerActivations] | None
    ) -> None:
        """Start copying tensors to the host."""
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._storages = [SavedStorage(channel, tensor, None) for tensor in tensors]
        self._previous = previous
        self._fetched_before = False
        for storage in self._storages:
            storage.send()

    def release_device_memory(self) -> None:
        """Free the device memory for computation that runs after the copies."""
        for storage in self._storages:
            storage.release_device_memory()

    def prefetch(self) -> None:
        """Start the copies back, if the activations are not on the device."""
        for storage in self._storages:
            storage.prefetch()

    def fetch(self) -> list[Tensor]:
        """Return the activations in memory that the caller owns, and start copying back the ones needed next."""
        self._fetched_before = True
        outputs: list[Tensor] = []
        for storage, shape, dtype in zip(self._storages, self._shapes, self._dtypes, strict=True):
            tensor = storage.fetch().view(dtype).view(shape)
            outputs.append(tensor.clone() if storage.is_here else tensor)  # still here if the forward has raised
        following = None if self._previous is None else self._previous()
        if following is not None and not following._fetched_before:
            following.prefetch()
        return outputs


class _Sent:
    """The activations of one kind that one forward sent to the host.

    Attributes:
        pending: the copies that are under way.
        count: the number of layers whose activations were copied.
    """

    def __init__(self) -> None:
        """Start without any."""
        self.pending = PendingTransfers(IN_FLIGHT)
        self.count = 0
        self._last: weakref.ref[LayerActivations] | None = None

    def send(self, channel: HostChannel, tensors: Sequence[Tensor]) -> LayerActivations:
        """Start copying a layer's activations to the host."""
        saved_layer = LayerActivations(channel, tensors, self._last)
        self._last = weakref.ref(saved_layer)
        self.count += 1
        self.pending.add(saved_layer)
        return saved_layer

    def prefetch_last(self) -> None:
        """Start copying back the activations that the backward needs first."""
        last = None if self._last is None else self._last()
        if last is not None:
            last.prefetch()


class ActivationOffload:
    """The activations of one forward, which its checkpointed layers keep alive.

    Args:
        channel: returns the channel of a device, or None.
        layers: the number of layers that will run.
        min_bytes: smaller activations are recomputed.
        of_mlps: whether gate and up are offloaded; attention is in any case.

    Attributes:
        of_mlps: as above.
        made_again: counts of layers by what will be recomputed, and why.
    """

    def __init__(
        self, channel: Callable[[torch.device], HostChannel | None], layers: int, min_bytes: int, *, of_mlps: bool
    ) -> None:
        """Set up the offload of one forward."""
        self._channel, self._layers, self._min_bytes, self.of_mlps = channel, layers, min_bytes, of_mlps
        self._layers_begun = self._layers_decided = 0
        self._gate_and_up, self._attention = _Sent(), _Sent()
        self._backward_started = False
        self.made_again: Counter[tuple[str, str]] = Counter()

    def checkpoint(
        self, layer: nn.Module, function: Callable[..., Any], run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Checkpoint a layer as ``function`` does, and give it a slot."""
        slot = Slot(self, self._layers_begun)
        self._layers_begun += 1
        if not _has_backward(layer, args):
            self._layers_decided += 1
            return function(run, *args, **kwargs)
        return function(partial(_run_with_slot, slot, layer, run), *args, **kwargs)

    @property
    def sent(self) -> tuple[int, int]:
        """The number of layers whose gate and up, and whose attention, were copied to the host."""
        return self._gate_and_up.count, self._attention.count

    def save(self, index: int, tensors: Sequence[Tensor], x: Tensor) -> LayerActivations | list[Tensor] | None:
        """Save a layer's gate and up: send them to the host or keep them.

        Args:
            index: the layer's place in the forward.
            tensors: gate and up ``[T, I]``.
            x: the input ``[T, H]`` of their matmuls.

        Returns:
            The activations on their way to the host; or the activations that stay on the device; or None if they will
            be recomputed.
        """
        self._layers_decided += 1
        channel = self._channel(x.device)
        if torch._C._len_torch_dispatch_stack():
            why = "other code watches every operation (selective checkpointing, a dispatch mode)"
        elif channel is None or sum(tensor.nbytes for tensor in tensors) < self._min_bytes:
            why = f"they have less than {self._min_bytes:,} bytes"
        elif index >= self._layers - KEEP:
            return list(tensors)
        elif (rates := channel.link.rates(x.dtype)) is None:
            why = "the rates of copies and matmuls could not be measured then"
        elif not all(tensor.is_contiguous() for tensor in tensors):
            why = "they are not contiguous"
        elif not is_offloaded(index, self._layers, copied_share(rates, tensors, x)):
            why = "there is no time to copy them"
        elif not channel.pool.has_room([tensor.nbytes for tensor in tensors]):
            why = NO_HOST_MEMORY
        else:
            return self._gate_and_up.send(channel, tensors)
        self.made_again["gate and up", why] += 1
        return None

    def save_attention(
        self, index: int, tensors: Sequence[Tensor], operations: int
    ) -> LayerActivations | list[Tensor] | None:
        """Save what a layer's attention computed, if copying it takes no longer than computing it again.

        Args:
            index: the layer's place in the forward.
            tensors: the result ``[T, H, V]`` and the log-sum-exps.
            operations: the number of operations that they took.

        Returns:
            As :meth:`save`.
        """
        nbytes = sum(tensor.nbytes for tensor in tensors)
        channel = self._channel(tensors[0].device)
        if channel is None or nbytes < self._min_bytes or operations < LEAST_OPERATIONS * nbytes:
            return None
        if torch._C._len_torch_dispatch_stack() or not all(tensor.is_contiguous() for tensor in tensors):
            return None
        rates = channel.link.rates(tensors[0].dtype)
        if rates is None or nbytes / rates.bytes > operations / (ATTENTION_RATE * rates.operations):
            return None
        if index >= self._layers - KEEP:
            # without detach, the result, which is an op's output, would keep its own graph alive
            return [x.detach() for x in tensors]
        # the inputs of the layers to come have some result's size, and go first: else they would stay on the device
        to_come = [tensors[0].nbytes] * (self._layers - index)
        if not channel.pool.has_room([*(tensor.nbytes for tensor in tensors), *to_come]):
            self.made_again["attention", NO_HOST_MEMORY] += 1
            return None
        return self._attention.send(channel, tensors)

    def start_backward(self) -> None:
        """Start copying back the activations that the backward needs first, at its beginning."""
        if not self._backward_started:
            self._backward_started = True
            self._attention.prefetch_last()
            self._gate_and_up.prefetch_last()

    def finish(self) -> None:
        """Free the device memory of all activations that are still being copied to the host."""
        self._attention.pending.finish()
        self._gate_and_up.pending.finish()
        if self.of_mlps and self._layers > self._layers_decided:
            self.made_again["gate and up", NO_GATED_MLP] += self._layers - self._layers_decided

    def clear(self) -> None:
        """Drop all references, so that only the autograd graph holds the activations."""
        self._attention.pending.clear()
        self._gate_and_up.pending.clear()


class Slot:
    """The activations that one checkpointed call of a layer saves, as ``gated_mlp`` and attention use them.

    Attributes:
        of_mlps: whether ``gated_mlp`` may save gate and up.
    """

    def __init__(self, activations: ActivationOffload, index: int) -> None:
        """Set up an empty slot."""
        self._offload, self._index, self.of_mlps = activations, index, activations.of_mlps
        self._runs = 0
        self._saved: dict[str, LayerActivations | list[Tensor] | None] = {}

    def begin(self) -> None:
        """Count a run of the layer: the first is the forward, each later one belongs to a backward."""
        self._runs += 1
        if self._runs > 1:
            self._offload.start_backward()

    def save(self, tensors: Sequence[Tensor], x: Tensor) -> None:
        """Save gate and up ``[T, I]`` of x ``[T, H]`` in the first run; do nothing in later runs."""
        if self._runs == 1:
            self._saved["gate and up"] = self._offload.save(self._index, tensors, x)

    def load(self) -> list[Tensor] | None:
        """Return gate and up in a backward's run; None in the first run, or if they have to be recomputed."""
        return self._take("gate and up")

    def save_attention(self, tensors: Sequence[Tensor], operations: int) -> None:
        """Save what attention computed in the first run; do nothing in later runs."""
        if self._runs == 1:
            self._saved["attention"] = self._offload.save_attention(self._index, tensors, operations)

    def load_attention(self) -> list[Tensor] | None:
        """Return what attention computed in a backward's run; None in the first run, or if it has to be recomputed."""
        return self._take("attention")

    def _take(self, kind: str) -> list[Tensor] | None:
        """Return activations in memory that the caller owns; None if there are none, or in the first run."""
        saved = self._saved.get(kind)
        if self._runs == 1 or saved is None:
            return None
        retained = torch._C._autograd._get_current_graph_task_keep_graph()
        if not retained:
            del self._saved[kind]
        if isinstance(saved, LayerActivations):
            return saved.fetch()
        # Gradients are written over the returned tensors.
        return [tensor.clone() for tensor in saved] if retained else saved


def _has_backward(layer: nn.Module, args: Sequence[Any]) -> bool:
    """Return whether a layer will run again in a backward."""
    if any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        return True
    return any(parameter.requires_grad for parameter in layer.parameters())


def _run_with_slot(slot: Slot, layer: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    """Run a layer that carries a slot."""
    slot.begin()
    layer.__dict__[ACTIVATION_SLOT] = slot
    try:
        return run(*args)
    finally:
        del layer.__dict__[ACTIVATION_SLOT]


@contextmanager
def slots_installed(layers: Sequence[nn.Module], activations: ActivationOffload) -> Iterator[None]:
    """Give each of these layers a slot whenever it is checkpointed inside the context."""
    previous_functions = [(layer, layer.__dict__[CHECKPOINTING]) for layer in layers if CHECKPOINTING in layer.__dict__]
    try:
        for layer, function in previous_functions:
            call = partial(activations.checkpoint, layer, function)
            layer.__dict__[CHECKPOINTING] = WrappedCheckpointing(function, call)
        yield
    finally:
        for layer, function in previous_functions:
            layer.__dict__[CHECKPOINTING] = function


def copied_share(rates: Rates, tensors: Sequence[Tensor], x: Tensor) -> float:
    """Return the share of layers whose activations a link can copy, besides each layer's input, while layers run.

    Args:
        rates: the rates of the link and of its device.
        tensors: a layer's gate and up activations ``[T, I]``.
        x: their input ``[T, H]``; the layer's own input has the same size.
    """
    work = 2 * x.numel() * sum(tensor.shape[-1] for tensor in tensors)
    seconds_left = LAYER_TIME * work / rates.operations - x.nbytes / rates.bytes
    return max(0.0, min(1.0, seconds_left * rates.bytes / sum(tensor.nbytes for tensor in tensors)))


def is_offloaded(index: int, layers: int, share: float) -> bool:
    """Return whether a layer's activations are offloaded.

    Such layers are evenly spread, and the last copy ends before the last layer does.

    Args:
        index: the layer's place in the forward.
        layers: the number of layers.
        share: the share of layers to offload.
    """
    return int((index + 1) * share) > int(index * share) and index + 1 / share <= layers - 1
