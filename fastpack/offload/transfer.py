"""Copies between a device and pinned host memory, beside the device's computation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

SIDE, REPEATS = 4096, 5
"""Of the square matrices that are copied and multiplied to find the rates of a device, and how often."""


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        bytes: copied to the host, or from it.
        operations: floating-point operations of matrix products.
    """

    bytes: float
    operations: float


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

    def drain(self) -> None:
        """Wait for all that was asked of the device."""

    def rates(self, dtype: torch.dtype) -> Rates | None:
        """Of copies, and of products in this dtype; None where they can't be measured now."""


class CudaLink:
    """A side stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._rates: dict[torch.dtype, Rates] = {}

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

    def drain(self) -> None:
        if not torch.cuda.is_current_stream_capturing():  # a collection of garbage: what it found was long let go
            torch.cuda.synchronize(self.device)

    def rates(self, dtype: torch.dtype) -> Rates | None:
        if dtype not in self._rates:
            if torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() == 2:
                return None
            self._rates[dtype] = self._measure(dtype)
        return self._rates[dtype]

    def _measure(self, dtype: torch.dtype) -> Rates:
        # no zeros, which multiply faster, and random numbers that are not the model's
        draw = torch.Generator(self.device).manual_seed(0)
        a, b = (torch.rand(SIDE, SIDE, generator=draw, device=self.device).to(dtype) for _ in range(2))
        out, host = torch.empty_like(a), torch.empty(a.shape, dtype=dtype, pin_memory=True)
        copying = self._seconds(lambda: host.copy_(a, non_blocking=True))
        multiplying = self._seconds(lambda: torch.mm(a, b, out=out))
        return Rates(a.nbytes / copying, 2 * SIDE**3 / multiplying)

    def _seconds(self, run: Callable[[], Any]) -> float:
        run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        start.record(stream)
        for _ in range(REPEATS):
            run()
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) / 1000 / REPEATS


def connect_cuda(device: torch.device) -> Link | None:
    """A link to a CUDA device, None to any other."""
    return CudaLink(device) if device.type == "cuda" else None


class HostPool:
    """Host buffers of one link: handed out, given back, and handed out again.

    A buffer given back may still be read by a copy under way; the next copy into it comes after that one, being of the
    same link. So nothing has to be waited for or asked, as torch's own cache of pinned memory has to.

    Sizes are rounded up to powers of two, which that cache does anyway, so that batches of similar T share buffers. A
    free buffer that is too small gives way to a larger one: there are never more than were in use at once.

    Args:
        keep: let no buffer go while the pool lives, nor then before the device is done: recordings read from and
            write to the addresses that they were given, on streams that nobody here knows.

    Attributes:
        count: how many buffers there are, handed out or not.
        nbytes: their size together.
    """

    def __init__(self, link: Link, *, keep: bool = False) -> None:
        self._link, self._keep = link, keep
        if keep:
            weakref.finalize(self, link.drain).atexit = False  # before the buffers go
        self._free: list[Tensor] = []
        self.count = self.nbytes = 0

    def take(self, nbytes: int) -> Tensor:
        """uint8, at least ``nbytes`` of it, uninitialised."""
        sizes = [buffer.numel() for buffer in self._free]
        fitting = [size for size in sizes if size >= nbytes]
        if fitting:
            return self._free.pop(sizes.index(min(fitting)))
        if sizes and not self._keep:
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

    def __init__(self, link: Link, *, keep: bool = False) -> None:
        self.link = link
        self.pool = HostPool(link, keep=keep)
