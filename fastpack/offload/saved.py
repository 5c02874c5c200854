"""Saved-tensor hooks that offload layer inputs to the host and copy them back for the backward."""

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
from fastpack.offload.transfer import HostChannel

KEEP = 2
"""The number of last saved tensors that stay on the device: the inputs of the last layer and of the final norm."""
IN_FLIGHT = 2
"""The largest number of tensors that are being copied to the host; the device waits for the oldest copy."""


class SavedStorage:
    """The contents of one storage when it was saved: on the device, on the host, or being copied.

    It lives as long as autograd needs it. Reading it on the device raises PatchError if it was changed in place since.
    """

    def __init__(self, channel: HostChannel, tensor: Tensor, previous: weakref.ref[SavedStorage] | None) -> None:
        """Save a contiguous tensor that fills its storage."""
        self._channel, self._previous = channel, previous
        self.fetched_before = False
        self._blocks: list[Tensor] = []
        self._fetched: tuple[Tensor, Any] | None = None
        self._sent: Any = None
        self._device: Tensor | None = tensor.detach().view(-1).view(torch.uint8)
        self._nbytes = tensor.nbytes
        self._version = tensor._version
        self._ready = channel.link.record_event()

    def is_in(self, tensor: Tensor) -> bool:
        """Return whether a tensor over the same storage still holds these contents."""
        return self._version == tensor._version

    def send(self) -> bool:
        """Start the copy to the host; return False if the host has no memory for it."""
        source = self._on_device()
        assert source is not None
        if not self._channel.pool.has_room([self._nbytes]):
            return False
        self._blocks = self._channel.pool.take(self._nbytes)
        self._sent = self._channel.link.send(source, self._blocks, self._ready)
        return True

    def release_device_memory(self) -> None:
        """Free the device memory for computation that runs after the copy to the host, if there is such a copy."""
        self._on_device()
        if self._blocks:
            self._channel.link.wait(self._sent)
            self._device = None

    def prefetch(self) -> None:
        """Start the copy back, if the contents are not on the device."""
        if self._device is None and self._fetched is None:
            self._fetched = self._channel.link.copy_back(self._blocks, self._nbytes)

    def fetch(self) -> Tensor:
        """Return the contents, flat bytes, on the device.

        A tensor that was copied back belongs to the caller; another call copies it back again.
        """
        self.fetched_before = True
        on_device = self._on_device()
        if on_device is not None:
            return on_device
        self.prefetch()
        assert self._fetched is not None
        (tensor, done), self._fetched = self._fetched, None
        self._channel.link.wait(done)
        return tensor

    @property
    def is_here(self) -> bool:
        """True while the device memory is not freed; :meth:`fetch` then returns memory that the caller doesn't own."""
        return self._device is not None

    def next_needed(self) -> SavedStorage | None:
        """Return the contents that a backward needs next, or None if all of them were fetched before.

        A backward needs contents in the reverse order of their saving, so the search goes from these to earlier ones.
        """
        contents: SavedStorage | None = self
        while contents is not None and contents.fetched_before:
            contents = None if contents._previous is None else contents._previous()
        return contents

    def _on_device(self) -> Tensor | None:
        """Return the contents if they are on the device, after checking that they did not change."""
        if self._device is not None:
            check_version(self._device, self._version)
        return self._device

    def __del__(self) -> None:
        """Give the host buffer back, and hold device memory until its copies are done."""
        link = self._channel.link
        if self._fetched is not None:  # prefetched but not used: only a part of the graph ran backward
            link.abandon(self._fetched[0])
        if self._blocks:
            if self._device is not None:  # the forward has raised before the memory was freed
                link.abandon(self._device)
            self._channel.pool.give(self._blocks)


@dataclass(frozen=True, eq=False)
class OffloadedTensor:
    """A saved tensor that may leave the device: its contents, dtype and shape."""

    contents: SavedStorage
    dtype: torch.dtype
    shape: torch.Size

    def unpack(self) -> Tensor:
        """Return the tensor, and start copying back the one needed next."""
        tensor = self.contents.fetch()
        following = self.contents.next_needed()
        if following is not None:
            following.prefetch()
        return tensor.view(self.dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class UnmovedTensor:
    """A saved tensor that stays on the device, and its version, which autograd does not check if there are hooks."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        """Return the tensor, after checking that it did not change."""
        check_version(self.tensor, self.version)
        return self.tensor


class Transfer(Protocol):
    """A copy to the host that has begun."""

    def release_device_memory(self) -> None:
        """Free the device memory for computation that runs after the copy to the host."""


class PendingTransfers:
    """Copies to the host that are under way.

    Args:
        limit: the largest number of copies; before one more begins, the device waits for the oldest.
    """

    def __init__(self, limit: int) -> None:
        """Start without transfers."""
        self._limit = limit
        self._transfers: deque[Transfer] = deque()

    def add(self, sent: Transfer) -> None:
        """Add a transfer that has begun, and finish the oldest ones above the limit."""
        self._transfers.append(sent)
        while len(self._transfers) > self._limit:
            self._transfers.popleft().release_device_memory()

    def finish(self) -> None:
        """Free the device memory of all transfers, oldest first."""
        while self._transfers:
            self._transfers.popleft().release_device_memory()

    def clear(self) -> None:
        """Drop all references, so that only the autograd graph holds the contents."""
        self._transfers.clear()


class SavedTensorHooks:
    """The saved-tensor hooks around one forward.

    Args:
        channel: returns the channel of a device, or None.
        min_bytes: smaller tensors stay on the device.

    Attributes:
        sent: the number of tensors copied to the host.
        left: the number of tensors that stay on the device, since the host had no memory for them.
    """

    def __init__(self, channel: Callable[[torch.device], HostChannel | None], min_bytes: int) -> None:
        """Set up the hooks of one forward."""
        self._channel, self._min_bytes = channel, min_bytes
        self._unsent: deque[SavedStorage] = deque()
        self._pending = PendingTransfers(IN_FLIGHT)
        # By the address of a storage. The address is not reused while a weak reference to the storage exists.
        self._saved_storages: dict[int, tuple[StorageWeakRef, weakref.ref[SavedStorage]]] = {}
        self._last: weakref.ref[SavedStorage] | None = None
        self.sent = self.left = 0

    def pack(self, tensor: Tensor) -> OffloadedTensor | UnmovedTensor:
        """Return what autograd keeps in place of a saved tensor."""
        channel = self._channel(tensor.device) if self._can_offload(tensor) else None
        if channel is None:
            return UnmovedTensor(
                tensor.detach(), tensor._version
            )  # without detach, an output would keep its own graph alive
        contents = self._find(tensor)
        if contents is None:
            contents = SavedStorage(channel, tensor, self._last)
            storage, self._last = tensor.untyped_storage(), weakref.ref(contents)
            self._saved_storages[storage._cdata] = (StorageWeakRef(storage), self._last)
            self._unsent.append(contents)
            self._advance()
        return OffloadedTensor(contents, tensor.dtype, tensor.shape)

    def _can_offload(self, tensor: Tensor) -> bool:
        """Return whether a tensor may leave the device, and whether that would free its memory."""
        # Offloading a part of a storage would not free it. A leaf with a gradient is a parameter or held by the graph.
        return (
            type(tensor) is Tensor
            and tensor.layout == torch.strided
            and tensor.is_floating_point()
            and tensor.is_contiguous()
            and not (tensor.is_leaf and tensor.requires_grad)
            and tensor.nbytes >= self._min_bytes
            and tensor.nbytes == tensor.untyped_storage().nbytes()
        )

    def _find(self, tensor: Tensor) -> SavedStorage | None:
        """Return the saved contents of the tensor's storage, if they are still the same; or None."""
        _, reference = self._saved_storages.get(tensor.untyped_storage()._cdata, (None, None))
        contents = None if reference is None else reference()
        return contents if contents is not None and contents.is_in(tensor) else None

    def _advance(self) -> None:
        """Start copies to the host until only the tensors that stay on the device are left."""
        while len(self._unsent) > KEEP:
            contents = self._unsent.popleft()
            if contents.send():
                self.sent += 1
                self._pending.add(contents)
            else:
                self.left += 1

    def finish(self) -> None:
        """Free the device memory of everything that is still being copied to the host."""
        self._pending.finish()

    def clear(self) -> None:
        """Drop all references, so that only the autograd graph holds the contents."""
        self._unsent.clear()
        self._pending.clear()
        self._saved_storages.clear()


def check_version(tensor: Tensor, version: int) -> None:
    """Raise if a tensor was changed in place since it had this version, as autograd does without hooks.

    Args:
        tensor: the saved tensor.
        version: its version when it was saved.

    Raises:
        PatchError: the tensor was changed.
    """
    if tensor._version != version:
        raise PatchError(
            f"a tensor {tuple(tensor.shape)} that was saved for the backward was changed in place afterwards (version "
            f"{tensor._version}, saved at {version}). Change a copy of the tensor instead. With offload=None, autograd "
            "names the operation that saved it."
        )
