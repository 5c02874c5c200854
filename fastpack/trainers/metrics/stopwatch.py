"""Spans of time as the device reaches them, read without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Adds up spans.

    On a GPU their ends are events in the stream: what hides behind the device's work takes no time, and what the host
    prepares long before takes what it takes there. Elsewhere they are moments of the host.
    """

    def __init__(self, device: torch.device) -> None:
        """Set up for a device, not running."""
        self._device = device
        self._begin: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Begin a span; one that had begun is forgotten."""
        self._begin = self._now()

    def stop(self) -> None:
        """End the span. Nothing happens where none had begun."""
        if self._begin is not None:
            self._spans.append((self._begin, self._now()))
        self._begin = None

    def take(self) -> float:
        """Return the seconds of all spans that have ended since the last call, once the device has reached them."""
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
