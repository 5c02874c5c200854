"""Copies between a device and pinned host memory that overlap with the device's computation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor

from fastpack.utils.host_memory import available_bytes

BLOCK = 2**23
"""The bytes of a block of host memory: so few that little of a tensor's last block is wasted, and enough for copies at
the full rate."""
SIDE, REPEATS = 4096, 5
"""The side of the square matrices that are copied and multiplied to measure a device, and the number of repetitions."""


@dataclass(frozen=True)
class Rates:
    """A device's measured rates, per second.

    Attributes:
        bytes: bytes copied to the host, or from it.
        operations: floating-point operations of matmuls.
    """

    bytes: float
    operations: float


class Link(Protocol):
    """Copies between one device and the host, which run one after the other."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return uint8 ``[nbytes]`` on the host."""

    def room(self) -> int:
        """Return how many bytes the host can still give."""

    def record_event(self) -> Any:
        """Return an event at this point of the device's computation."""

    def send(self, source: Tensor, blocks: Sequence[Tensor], ready: Any) -> Any:
        """Copy uint8 ``source`` to blocks, once the event ``ready`` has passed; return the event at the copy's end."""

    def copy_back(self, blocks: Sequence[Tensor], nbytes: int) -> tuple[Tensor, Any]:
        """Return uint8 ``[nbytes]`` on the device, in memory of its own, and the event at the copy's end."""

    def wait(self, event: Any) -> None:
        """Let the device's computation wait for an event of the copies."""

    def abandon(self, tensor: Tensor) -> None:
        """Hold the device memory of a tensor, which is about to be freed, until the copies under way are done."""

    def drain(self) -> None:
        """Wait on the host until the device has finished all of its work."""

    def rates(self, dtype: torch.dtype) -> Rates | None:
        """Return the rates of copies, and of matmuls in this dtype; None if they can't be measured now."""


class CudaLink:
    """Copies on a separate stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Make the copy stream of a device."""
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._rates: dict[torch.dtype, Rates] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """Return uint8 ``[nbytes]`` in pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def room(self) -> int:
        """Return how many bytes the host can still give."""
        return available_bytes()

    def record_event(self) -> torch.cuda.Event:
        """Return an event at this point of the current stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def send(self, source: Tensor, blocks: Sequence[Tensor], ready: torch.cuda.Event) -> torch.cuda.Event:
        """Copy uint8 ``source`` to blocks, once the event ``ready`` has passed; return the event at the copy's end."""
        self.stream.wait_event(ready)
        with torch.cuda.stream(self.stream):
            for part, block in zip(source.split(BLOCK), blocks, strict=True):
                block[: len(part)].copy_(part, non_blocking=True)
        return self.stream.record_event()

    def copy_back(self, blocks: Sequence[Tensor], nbytes: int) -> tuple[Tensor, torch.cuda.Event]:
        """Return uint8 ``[nbytes]`` on the device, in memory of its own, and the event at the copy's end."""
        # The memory comes from the computing stream, so the copy waits for whatever that stream still does there.
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for part, block in zip(tensor.split(BLOCK), blocks, strict=True):
                part.copy_(block[: len(part)], non_blocking=True)
        return tensor, self.stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait for an event of the copies."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def abandon(self, tensor: Tensor) -> None:
        """Hold the device memory of a tensor, which is about to be freed, until the copies under way are done."""
        tensor.record_stream(self.stream)

    def drain(self) -> None:
        """Wait on the host until the device has finished all of its work."""
        # During a capture only garbage collection calls this, for buffers that are long unused.
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)

    def rates(self, dtype: torch.dtype) -> Rates | None:
        """Return the rates of copies, and of matmuls in this dtype; None if they can't be measured now."""
        if dtype not in self._rates:
            if torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() == 2:
                return None
            self._rates[dtype] = self._measure(dtype)
        return self._rates[dtype]

    def _measure(self, dtype: torch.dtype) -> Rates:
        """Measure the rates with square matrices."""
        # Random numbers, since zeros multiply faster; from a generator of our own, to leave the model's alone.
        generator = torch.Generator(self.device).manual_seed(0)
        a, b = (torch.rand(SIDE, SIDE, generator=generator, device=self.device).to(dtype) for _ in range(2))
        out, host = torch.empty_like(a), torch.empty(a.shape, dtype=dtype, pin_memory=True)
        copy_seconds = self._seconds(lambda: host.copy_(a, non_blocking=True))
        matmul_seconds = self._seconds(lambda: torch.mm(a, b, out=out))
        return Rates(a.nbytes / copy_seconds, 2 * SIDE**3 / matmul_seconds)

    def _seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds that a call takes on the device."""
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
    """Return a link to a CUDA device; None for any other device."""
    return CudaLink(device) if device.type == "cuda" else None


class HostPool:
    """The host memory of one link, in blocks of one size, which are reused.

    A copy under way may still read blocks that were given back. The next copy into them runs after that copy, since
    both belong to the same link. So the pool neither waits nor queries events, as torch's own cache of pinned memory
    has to. That cache rounds sizes up to powers of two, which blocks are.

    Args:
        link: the link whose copies use the blocks.
        keep: whether to free the blocks only after the device is done. Recordings read and write the addresses with
            which they were recorded, on streams that torch's cache does not know.

    Attributes:
        count: the number of blocks, in use or free.
    """

    def __init__(self, link: Link, *, keep: bool = False) -> None:
        """Start without blocks."""
        self._link = link
        if keep:
            weakref.finalize(self, link.drain).atexit = False  # before the blocks are freed
        self._free: list[Tensor] = []
        self.count = 0

    @property
    def nbytes(self) -> int:
        """The size of all blocks together."""
        return self.count * BLOCK

    def take(self, nbytes: int) -> list[Tensor]:
        """Return uninitialised uint8 blocks of at least ``nbytes`` bytes together."""
        needed = ceil(nbytes / BLOCK)
        for _ in range(needed - len(self._free)):
            self._free.append(self._link.allocate(BLOCK))
            self.count += 1
        taken, self._free = self._free[:needed], self._free[needed:]
        return taken

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Return whether there are free blocks for tensors of these sizes, or host memory for missing ones."""
        missing = sum(ceil(size / BLOCK) for size in sizes) - len(self._free)
        return missing <= 0 or missing * BLOCK <= self._link.room()

    def give(self, blocks: Sequence[Tensor]) -> None:
        """Take blocks back, for the next copy to overwrite."""
        self._free.extend(blocks)


class HostChannel:
    """A link and its host buffers."""

    def __init__(self, link: Link, *, keep: bool = False) -> None:
        """Set up the buffers of a link."""
        self.link = link
        self.pool = HostPool(link, keep=keep)
