"""Wall time of each training step, and one more step under the profiler."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fastpack.bench.power import PowerMeter

LAUNCHES = ("LaunchKernel", "GraphLaunch")
"""What calls of the CUDA runtime and driver that put work on the device have in their names."""


class Clock:
    """Told when a step begins and ends. Times those after the warm-up, and makes nobody wait for it.

    A step's time runs from the end of the one before to its own end, both as the device reaches them: what is fetched,
    logged and tidied up in between counts, as it does for users, and what hides behind the device's work does not.

    Args:
        warmup, steps: how many are not timed, and how many are.
        profile: whether a step more follows, which is profiled and not timed.
        power: told when the timed steps have ended.
        on_step: called after each step.
    """

    def __init__(
        self,
        warmup: int,
        steps: int,
        *,
        profile: bool,
        power: PowerMeter | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self.kernels: int | None = None
        self.launches: int | None = None
        self.busy: float | None = None
        self.total_steps = warmup + steps + profile
        self.peak_memory = self.held_memory = 0
        self._warmup = warmup
        self._timed = warmup + steps
        self._marks: list[Any] = []
        self._profiler: Any = None
        self._power = power
        self._on_step = on_step

    @property
    def seconds(self) -> list[float]:
        """Of each timed step."""
        marks = self._marks[self._warmup : self._timed + 1]
        _synchronize()
        return [_seconds_between(*pair) for pair in pairwise(marks)]

    def begin(self) -> None:
        """A step begins."""
        if not self._marks:
            self._mark()
        if len(self._marks) == self._timed + 1:
            _synchronize()
            # whatever the profiler takes must not count
            self.peak_memory = torch.cuda.max_memory_allocated()
            self.held_memory = torch.cuda.max_memory_reserved()
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()

    def end(self) -> None:
        """It has ended."""
        self._mark()
        if self._profiler is not None:
            _synchronize()
            self._profiler.stop()
            self.kernels, self.launches, self.busy = count_kernels(_trace(self._profiler))
            self._profiler = None
        if self._on_step is not None:
            self._on_step()

    def _mark(self) -> None:
        self._marks.append(_now())
        if self._power is not None and len(self._marks) == self._timed + 1:
            self._power.end(sum(self.seconds))  # which waits for the device, behind the last step that is timed


def _now() -> Any:
    """This moment; on a GPU that in which the device reaches it."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


def count_kernels(events: list[dict[str, Any]]) -> tuple[int, int, float]:
    """From the events of a trace: kernels, calls that launched one or a graph of them, seconds in which any ran."""
    spans: list[tuple[float, float]] = []
    launches = 0
    for event in events:
        category = event.get("cat")
        if category == "kernel":
            spans.append((event["ts"], event["ts"] + event["dur"]))
        elif category in ("cuda_runtime", "cuda_driver") and any(name in event["name"] for name in LAUNCHES):
            launches += 1
    busy, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return len(spans), launches, busy / 1e6


def _trace(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
