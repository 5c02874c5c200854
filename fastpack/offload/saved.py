"""What autograd keeps in place of a tensor: hooks that let layer inputs leave the device and bring them back."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastpack.errors import PatchError
from fastpack.offload.transfer import Lane

KEEP = 2
"""How many of the tensors saved last stay on the device: the final norm's input and the last layer's."""
IN_FLIGHT = 2
"""How many are on their way to the host at most; the device waits for the oldest before there are more."""


class Contents:
    """What one storage held when it was saved: on the device, on the host, or on its way.

    Lives as long as autograd needs it. Where it is read on the device, PatchError is raised if it was changed in place
    since.
    """

    def __init__(self, lane: Lane, tensor: Tensor, previous: weakref.ref[Contents] | None) -> None:
        self._lane, self._previous = lane, previous
        self.fetched_before = False
        self._buffer: Tensor | None = None
        self._fetched: tuple[Tensor, Any] | None = None
        self._done: Any = None
        self._device: Tensor | None = tensor.detach().view(-1)
        self._version = tensor._version
        self._since = lane.link.mark()

    def is_in(self, tensor: Tensor) -> bool:
        """True if a tensor over the same storage still holds this."""
        return self._version == tensor._version

    def send(self) -> None:
        """Start the copy to the host."""
        source = self._on_device()
        assert source is not None
        self._buffer = self._lane.pool.take(source.nbytes)
        host = self._buffer[: source.nbytes].view(source.dtype)
        self._done = (host, self._lane.link.send(source, host, self._since))

    def leave(self) -> None:
        """Free the device's memory, for what the device computes after the copy to the host."""
        self._on_device()
        self._lane.link.wait(self._done[1])
        self._device = None

    def prefetch(self) -> None:
        """Start the copy back, if it is not on the device."""
        if self._device is None and self._fetched is None:
            self._fetched = self._lane.link.bring(self._done[0])

    def fetch(self) -> Tensor:
        """Flat, on the device. What was brought back belongs to the caller: asked again, it is brought again."""
        self.fetched_before = True
        there = self._on_device()
        if there is not None:
            return there
        self.prefetch()
        assert self._fetched is not None
        (tensor, done), self._fetched = self._fetched, None
        self._lane.link.wait(done)
        return tensor

    @property
    def is_here(self) -> bool:
        """True while the device's memory is not freed: what :meth:`fetch` gives then is not the caller's own."""
        return self._device is not None

    def next_needed(self) -> Contents | None:
        """Those that a backward needs after these, saved before them: None, too, where all were asked for before."""
        contents: Contents | None = self
        while contents is not None and contents.fetched_before:
            contents = None if contents._previous is None else contents._previous()
        return contents

    def _on_device(self) -> Tensor | None:
        if self._device is not None:
            check_version(self._device, self._version)
        return self._device

    def __del__(self) -> None:
        link = self._lane.link
        if self._fetched is not None:  # brought and not asked for: only a part of the graph ran backward
            link.abandon(self._fetched[0])
        if self._buffer is not None:
            if self._device is not None:  # an exception came before it left
                link.abandon(self._device)
            self._lane.pool.give(self._buffer)


@dataclass(frozen=True, eq=False)
class Offloaded:
    """In place of a tensor that may leave: contents of dtype and shape."""

    contents: Contents
    dtype: torch.dtype
    shape: torch.Size

    def unpack(self) -> Tensor:
        tensor = self.contents.fetch()
        following = self.contents.next_needed()
        if following is not None:
            following.prefetch()
        return tensor.view(self.dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class Kept:
    """In place of a tensor that stays: itself, and the check that autograd leaves out where there are hooks."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        check_version(self.tensor, self.version)
        return self.tensor


class Leaves(Protocol):
    def leave(self) -> None:
        """Free the device's memory, for what the device computes after the copy to the host."""


class Departures:
    """What is on its way to the host.

    Args:
        most: how much of it at most; the device waits for the oldest before there is more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._under_way: deque[Leaves] = deque()

    def add(self, sent: Leaves) -> None:
        """One more, whose copy has begun."""
        self._under_way.append(sent)
        while len(self._under_way) > self._most:
            self._under_way.popleft().leave()

    def finish(self) -> None:
        """All leave."""
        while self._under_way:
            self._under_way.popleft().leave()

    def clear(self) -> None:
        """Hold on to nothing: from here on the graph alone does."""
        self._under_way.clear()


class Pass:
    """The hooks around one forward.

    Args:
        lane: the lane of a device, or None.
        min_bytes: smaller tensors stay.
    """

    def __init__(self, lane: Callable[[torch.device], Lane | None], min_bytes: int) -> None:
        self._lane, self._min_bytes = lane, min_bytes
        self._waiting: deque[Contents] = deque()
        self._leaving = Departures(IN_FLIGHT)
        # by the address of a storage, which is not used again while there is a weak reference to it
        self._seen: dict[int, tuple[StorageWeakRef, weakref.ref[Contents]]] = {}
        self._last: weakref.ref[Contents] | None = None
        self.sent = 0

    def pack(self, tensor: Tensor) -> Offloaded | Kept:
        """The hook for a tensor that is saved."""
        lane = self._lane(tensor.device) if self._may_leave(tensor) else None
        if lane is None:
            return Kept(tensor.detach(), tensor._version)  # an output as it is would keep its own graph alive
        contents = self._find(tensor)
        if contents is None:
            contents = Contents(lane, tensor, self._last)
            storage, self._last = tensor.untyped_storage(), weakref.ref(contents)
            self._seen[storage._cdata] = (StorageWeakRef(storage), self._last)
            self._waiting.append(contents)
            self._advance()
        return Offloaded(contents, tensor.dtype, tensor.shape)

    def _may_leave(self, tensor: Tensor) -> bool:
        # Part of a storage would not free it. A leaf with a gradient is a parameter, or held by the graph itself.
        return (
            type(tensor) is Tensor
            and tensor.layout == torch.strided
            and tensor.is_floating_point()
            and tensor.is_contiguous()
            and not (tensor.is_leaf and tensor.requires_grad)
            and tensor.nbytes >= self._min_bytes
            and tensor.nbytes == tensor.untyped_storage().nbytes()
        )

    def _find(self, tensor: Tensor) -> Contents | None:
        """The contents of the tensor's storage, if they were saved before and are still the same."""
        _, found = self._seen.get(tensor.untyped_storage()._cdata, (None, None))
        contents = None if found is None else found()
        return contents if contents is not None and contents.is_in(tensor) else None

    def _advance(self) -> None:
        while len(self._waiting) > KEEP:
            contents = self._waiting.popleft()
            contents.send()
            self.sent += 1
            self._leaving.add(contents)

    def finish(self) -> None:
        """All that was sent leaves."""
        self._leaving.finish()

    def clear(self) -> None:
        """Hold on to nothing: from here on the graph alone does."""
        self._waiting.clear()
        self._leaving.clear()
        self._seen.clear()


def check_version(tensor: Tensor, version: int) -> None:
    """Raise where a tensor was changed in place since it had this version, as autograd does without hooks.

    Raises:
        PatchError: it was.
    """
    if tensor._version != version:
        raise PatchError(
            f"a tensor {tuple(tensor.shape)} that was saved for the backward was changed in place afterwards (version "
            f"{tensor._version}, saved at {version}). Change a copy of it; with offload=None autograd says which "
            "operation saved it."
        )
