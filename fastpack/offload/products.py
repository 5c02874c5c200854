"""What checkpointing would multiply again: gate and up of a layer wait in host memory for its backward instead.

A checkpointed layer runs twice. The products of its gated MLP are the larger part of the second run, and H operations
for each byte of their results; where copies beside the computation keep pace, bringing these back costs nothing. Each
layer carries a :class:`Slot` while it runs, in which :func:`fastpack.ops.linear.gated_mlp.gated_mlp` puts them the
first time and finds them the second. The bits are the same.

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

from fastpack.offload import KEPT
from fastpack.offload.saved import Contents, Departures
from fastpack.offload.transfer import Lane, Rates

CHECKPOINTING = "_gradient_checkpointing_func"

LAYER = 2.25
"""How many times as long as gate's and up's products at full rate a decoder layer's forward takes at least: 1.9 times
their operations (Llama 8B), and some time beside the products. On an H200 it is 2.6 times; copies that take all of that
are late in the end."""
KEEP = 2
"""The products of how many layers stay on the device: of the last ones, which the backward needs first."""
IN_FLIGHT = 1
"""How many layers' products are on their way to the host at most; the device waits for the oldest before there are
more."""
ELSEWHERE = "they have no gated MLP that runs as one op, or something else than transformers checkpoints them"


class Parcel:
    """One layer's products, on the device, on the host or on their way."""

    def __init__(self, lane: Lane, tensors: Sequence[Tensor], previous: weakref.ref[Parcel] | None) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtype = tensors[0].dtype
        self._contents = [Contents(lane, tensor, None) for tensor in tensors]
        self._previous = previous
        self._fetched_before = False
        for contents in self._contents:
            contents.send()

    def leave(self) -> None:
        """Free the device's memory, for what the device computes after the copies."""
        for contents in self._contents:
            contents.leave()

    def prefetch(self) -> None:
        """Start the copies back, if they are not on the device."""
        for contents in self._contents:
            contents.prefetch()

    def fetch(self) -> list[Tensor]:
        """The products, in memory of the caller's own; the copies back of those needed next begin."""
        self._fetched_before = True
        found: list[Tensor] = []
        for contents, shape in zip(self._contents, self._shapes, strict=True):
            tensor = contents.fetch().view(self._dtype).view(shape)
            found.append(tensor.clone() if contents.is_here else tensor)  # an exception came before it left
        following = None if self._previous is None else self._previous()
        if following is not None and not following._fetched_before:
            following.prefetch()
        return found


class Journey:
    """The parcels of one forward, which the layers that are checkpointed in it keep alive.

    Args:
        lane: the lane of a device, or None.
        layers: how many layers will run.
        min_bytes: smaller products are made again.

    Attributes:
        sent: of how many layers products were sent to the host.
        made_again: layers whose products will be made again, by reason.
    """

    def __init__(self, lane: Callable[[torch.device], Lane | None], layers: int, min_bytes: int) -> None:
        self._lane, self._layers, self._min_bytes = lane, layers, min_bytes
        self._begun = self._decided = 0
        self._leaving = Departures(IN_FLIGHT)
        self._last: weakref.ref[Parcel] | None = None
        self._turned = False
        self.sent = 0
        self.made_again: Counter[str] = Counter()

    def checkpointed(self, layer: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        """What checkpoints a layer as ``function`` does, and gives it a slot."""

        def call(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            slot = Slot(self, self._begun)
            self._begun += 1
            if not _has_backward(layer, args):
                self._decided += 1
                return function(run, *args, **kwargs)
            return function(partial(_run_with, slot, layer, run), *args, **kwargs)

        return call

    def save(self, index: int, tensors: Sequence[Tensor], x: Tensor) -> Parcel | list[Tensor] | None:
        """A layer's products on their way to the host, or those that stay; None where they will be made again."""
        self._decided += 1
        lane = self._lane(x.device)
        if torch._C._len_torch_dispatch_stack():
            why = "somebody watches every operation (selective checkpointing, a dispatch mode)"
        elif lane is None or sum(tensor.nbytes for tensor in tensors) < self._min_bytes:
            why = f"they have less than {self._min_bytes:,} bytes"
        elif index >= self._layers - KEEP:
            return list(tensors)
        elif (rates := lane.link.rates(x.dtype)) is None:
            why = "the rates of copies and products could not be measured then"
        elif not all(tensor.is_contiguous() for tensor in tensors):
            why = "they are parts of something wider"
        elif not is_sent(index, self._layers, pace(rates, tensors, x)):
            why = "there is no time to copy them"
        else:
            return self._send(lane, tensors)
        self.made_again[why] += 1
        return None

    def _send(self, lane: Lane, tensors: Sequence[Tensor]) -> Parcel:
        parcel = Parcel(lane, tensors, self._last)
        self._last = weakref.ref(parcel)
        self.sent += 1
        self._leaving.add(parcel)
        return parcel

    def turn_back(self) -> None:
        """The backward has begun: what it needs first is brought."""
        last = None if self._last is None or self._turned else self._last()
        self._turned = True
        if last is not None:
            last.prefetch()

    def finish(self) -> None:
        """All that was sent leaves."""
        self._leaving.finish()
        if self._layers > self._decided:
            self.made_again[ELSEWHERE] += self._layers - self._decided

    def clear(self) -> None:
        """Hold on to nothing: from here on the graph alone does."""
        self._leaving.clear()


class Slot:
    """What one checkpointed call of a layer keeps: :class:`fastpack.ops.linear.gated_mlp.Kept`."""

    def __init__(self, journey: Journey, index: int) -> None:
        self._journey, self._index = journey, index
        self._runs = 0
        self._saved: Parcel | list[Tensor] | None = None

    def begin(self) -> None:
        """The layer runs: once forward, then for each backward."""
        self._runs += 1
        if self._runs > 1:
            self._journey.turn_back()

    def save(self, made: Sequence[Tensor], x: Tensor) -> None:
        if self._runs == 1:
            self._saved = self._journey.save(self._index, made, x)

    def load(self) -> list[Tensor] | None:
        saved = self._saved
        if self._runs == 1 or saved is None:
            return None
        retained = torch._C._autograd._get_current_graph_task_keep_graph()
        if not retained:
            self._saved = None
        if isinstance(saved, Parcel):
            return saved.fetch()
        # gradients will take the memory of what is handed out
        return [tensor.clone() for tensor in saved] if retained else saved


def _has_backward(layer: nn.Module, args: Sequence[Any]) -> bool:
    """Whether a layer will run again at all."""
    if any(isinstance(given, Tensor) and given.requires_grad for given in args):
        return True
    return any(parameter.requires_grad for parameter in layer.parameters())


def _run_with(slot: Slot, layer: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    slot.begin()
    layer.__dict__[KEPT] = slot
    try:
        return run(*args)
    finally:
        del layer.__dict__[KEPT]


@contextmanager
def with_slots(layers: Sequence[nn.Module], journey: Journey) -> Iterator[None]:
    """While inside, each of these layers carries a slot when it is checkpointed."""
    before = [(layer, layer.__dict__[CHECKPOINTING]) for layer in layers if CHECKPOINTING in layer.__dict__]
    try:
        for layer, function in before:
            layer.__dict__[CHECKPOINTING] = journey.checkpointed(layer, function)
        yield
    finally:
        for layer, function in before:
            layer.__dict__[CHECKPOINTING] = function


def pace(rates: Rates, tensors: Sequence[Tensor], x: Tensor) -> float:
    """The share of layers whose products a link can copy while the layers run, with every layer's input.

    Args:
        rates: of the link and of its device.
        tensors: a layer's products ``[T, I]`` of x ``[T, H]``; its input has the size of x.
    """
    work = 2 * x.numel() * sum(tensor.shape[-1] for tensor in tensors)
    left = LAYER * work / rates.operations - x.nbytes / rates.bytes
    return max(0.0, min(1.0, left * rates.bytes / sum(tensor.nbytes for tensor in tensors)))


def is_sent(index: int, layers: int, share: float) -> bool:
    """Whether a layer is one of those whose products leave: evenly spread, and over before the last layer is."""
    return int((index + 1) * share) > int(index * share) and index + 1 / share <= layers - 1
