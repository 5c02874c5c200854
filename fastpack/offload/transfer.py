"""Copies between a device and pinned host memory, beside the device's computation."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Link(Protocol):
    """Copies between one device and the host, which run one after the other."""

    def allocate(self, nbytes: int) -> Tensor:
        """uint8 ``[nbytes]`` on the host."""

    def mark(self) -> Any:
        """This moment of the device's computation."""

    def send(self, source: Tensor, host: Tensor, since: Any) -> Any:
        """Copy to the host what ``source`` holds from the moment ``since`` on. Returns the moment when it is done."""

    def bring(self, host: Tensor) -> tuple[Tensor, Any]:
        """A copy on the device, in memory of its own, and the moment when it is done."""

    def wait(self, moment: Any) -> None:
        """Let the device's computation wait for a moment of the copies."""

    def abandon(self, tensor: Tensor) -> None:
        """Keep the device memory of a tensor, which is about to be freed, until the copies under way are done."""


class CudaLink:
    """A side stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def send(self, source: Tensor, host: Tensor, since: torch.cuda.Event) -> torch.cuda.Event:
        self.stream.wait_event(since)
        with torch.cuda.stream(self.stream):
            host.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def bring(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        # The memory is the computing stream's: the copy comes after whatever that stream still does there.
        tensor = torch.empty_like(host, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            tensor.copy_(host, non_blocking=True)
        return tensor, self.stream.record_event()

    def wait(self, moment: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(moment)

    def abandon(self, tensor: Tensor) -> None:
        tensor.record_stream(self.stream)


def connect_cuda(device: torch.device) -> Link | None:
    """A link to a CUDA device, None to any other."""
    return CudaLink(device) if device.type == "cuda" else None


class HostPool:
    """Host buffers of one link: handed out, given back, and handed out again.

    A buffer given back may still be read by a copy under way; the next copy into it comes after that one, being of the
    same link. So nothing has to be waited for or asked, as torch's own cache of pinned memory has to.

    Sizes are rounded up to powers of two, which that cache does anyway, so that batches of similar T share buffers. A
    free buffer that is too small gives way to a larger one: there are never more than were in use at once.

    Attributes:
        count: how many buffers there are, handed out or not.
        nbytes: their size together.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free: list[Tensor] = []
        self.count = self.nbytes = 0

    @property
    def in_use(self) -> int:
        """How many are handed out."""
        return self.count - len(self._free)

    def take(self, nbytes: int) -> Tensor:
        """uint8, at least ``nbytes`` of it, uninitialised."""
        sizes = [buffer.numel() for buffer in self._free]
        fitting = [size for size in sizes if size >= nbytes]
        if fitting:
            return self._free.pop(sizes.index(min(fitting)))
        if sizes:
            del self._free[sizes.index(min(sizes))]
            self.count -= 1
            self.nbytes -= min(sizes)
        buffer = self._link.allocate(1 << (nbytes - 1).bit_length())
        self.count += 1
        self.nbytes += buffer.numel()
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Back, for the next copy to overwrite."""
        self._free.append(buffer)


class Lane:
    """A link and its buffers."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.pool = HostPool(link)
