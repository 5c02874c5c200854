"""Measure training steps by the time that a user waits, and calls without the host's time to launch them.

On a GPU, a batch of calls is queued behind a pause, so that the calls run one after the other without waiting for the
host. Their mean is one sample, and the median of the samples is the result. Calls take turns over several sets of
inputs, and the latest results are kept, one for each set, so that no data is in the cache already.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

CYCLES = 2e9
"""The most cycles of a device in a second."""
QUEUED_SECONDS = 1.2e-3
"""How long the host may take for one batch of more than one call."""
PAUSES = 2
"""The device waits for this many times as long as the host takes for a batch."""
SAMPLE_SECONDS = 5e-3
"""The longest work on the device for one sample."""
TOTAL_SECONDS = 1.0
"""The longest time for all samples; at least :data:`FEWEST` samples are taken."""
FEWEST = 5


class StepTimer:
    """A timer of the steps after the warm-up, which doesn't wait for the device.

    A step's time runs from the end of the previous step to its own end, as the device reaches them. Work in between
    (fetching, logging, cleaning up) counts, as it does for users. Host work that overlaps with the device's work does
    not count.

    Args:
        warmup: the number of steps that are not timed.
    """

    def __init__(self, warmup: int) -> None:
        """Set up the timer with the number of steps that are not timed."""
        self._warmup = warmup
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Begin the first step; in later calls, end a step and begin the next."""
        if torch.cuda.is_available():
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds of each timed step."""
        marks = self._marks[self._warmup :]
        if not torch.cuda.is_available():
            return [end - begin for begin, end in pairwise(marks)]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]


def begin_peaks() -> None:
    """Let the peaks of a GPU's memory begin now: building a model may take more than training it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def gpu_peaks() -> tuple[float, float] | None:
    """Return the peak GiB in tensors and the peak GiB that the allocator held, or None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device, *, repeats: int = 30) -> float:
    """Return the median seconds of one call, taken in turn from ``calls``.

    Args:
        calls: functions that do the same work on different data; outputs are kept until a call's turn comes again.
        device: the device that they run on.
        repeats: the number of samples.
    """
    outputs: deque[Any] = deque(maxlen=len(calls))
    turns = itertools.cycle(calls)
    for _ in range(min(len(calls), 4)):  # warm up: compile, tune, plan
        outputs.append(next(turns)())
    if device.type != "cuda":
        return statistics.median(_seconds(next(turns), outputs)[0] for _ in range(repeats))
    host, alone = (
        statistics.median(times) for times in zip(*(_seconds(next(turns), outputs) for _ in range(5)), strict=True)
    )
    batch = max(1, min(len(calls) * 4, 64, int(QUEUED_SECONDS / host), int(SAMPLE_SECONDS / alone) + 1))
    repeats = max(min(repeats, FEWEST), min(repeats, int(TOTAL_SECONDS / (batch * alone))))
    pause = int(CYCLES * PAUSES * max(QUEUED_SECONDS, batch * host))
    samples: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(pause)
        begin.record()
        for call in itertools.islice(turns, batch):
            outputs.append(call())
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / batch)
    return statistics.median(samples)


def _seconds(call: Callable[[], Any], outputs: deque[Any]) -> tuple[float, float]:
    """Return the seconds until the host has launched a call, and until the call is done; both above 0."""
    began = time.perf_counter()
    outputs.append(call())
    queued = time.perf_counter()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return max(queued - began, 1e-9), max(time.perf_counter() - began, 1e-9)


def peak_extra_memory(call: Callable[[], Sequence[torch.Tensor]], device: torch.device) -> int | None:
    """Return the peak bytes of a call beyond what was allocated before and what it returns; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    returned = call()  # the allocator counts memory when it is requested, not when the device uses it
    return torch.cuda.max_memory_allocated() - before - sum(tensor.nbytes for tensor in returned)
