"""The bytes that torch's CPU allocator gives out while a function runs, with kernels that compute nothing.

Memory doesn't depend on values, so Triton's kernels need not run: what is allocated around them is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from fastpack.backends import triton_packed
from fastpack.offload.transfer import BLOCK, Rates


def peak_of(run: Callable[[], Any]) -> int:
    """Run a function, and return the most bytes at a time that were allocated in it and not freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler
    assert results is not None
    waiting = list(results.kineto_results.experimental_event_tree())
    events: list[tuple[int, int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    live: dict[int, int] = {}
    now = most = 0
    for _, address, size in sorted(events, key=lambda event: event[0]):
        if size > 0:
            live[address] = size
            now += size
        else:
            now -= live.pop(address, 0)  # memory from before is not counted when it is freed either
        most = max(most, now)
    return most


@pytest.fixture
def empty_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run no kernel, and let its attention serve a CPU."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: None)
    monkeypatch.setattr(triton_packed, "rejects", lambda shape: None)


class OutsideLink:
    """A link to host memory that torch's allocator doesn't know; copies end at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> Tensor:
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))

    def room(self) -> int:
        return 2**40

    def record_event(self) -> None: ...

    def send(self, source: Tensor, blocks: Sequence[Tensor], ready: None) -> None:
        for part, block in zip(source.split(BLOCK), blocks, strict=True):
            block[: len(part)] = part

    def copy_back(self, blocks: Sequence[Tensor], nbytes: int) -> tuple[Tensor, None]:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        for part, block in zip(tensor.split(BLOCK), blocks, strict=True):
            part.copy_(block[: len(part)])
        return tensor, None

    def wait(self, event: None) -> None: ...

    def abandon(self, tensor: Tensor) -> None: ...

    def drain(self) -> None: ...

    def rates(self, dtype: torch.dtype) -> Rates:
        return Rates(bytes=1.0, operations=1.0)
