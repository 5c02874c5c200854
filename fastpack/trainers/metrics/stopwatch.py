"""Measure spans of time on the device without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """A stopwatch that adds up spans of time.

    On a GPU, a span starts and ends with an event in the current stream. Host work that overlaps with the device's work
    adds no time. Work that the host enqueues far ahead counts with its time on the device. On a CPU, a span is measured
    by the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        """Set up a stopwatch for a device; it isn't running yet."""
        self._device = device
        self._begin: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Start a span; a span that is running is dropped."""
        self._begin = self._now()

    def stop(self) -> None:
        """End the running span, if there is one."""
        if self._begin is not None:
            self._spans.append((self._begin, self._now()))
        self._begin = None

    def take(self) -> float:
        """Wait for the device to end the last span, and return the seconds of all spans since the last call."""
        spans, self._spans = self._spans, []
        if self._device.type != "cuda":
            return sum(end - begin for begin, end in spans)
        if spans:
            spans[-1][1].synchronize()
        return sum(begin.elapsed_time(end) / 1e3 for begin, end in spans)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
