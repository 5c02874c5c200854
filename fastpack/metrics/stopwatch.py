"""Spans of time as the device reaches them, read without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch


class Stopwatch:
    """Adds up spans.

    On a GPU their ends are events in the stream: what hides behind the device's work takes no time, and what the host
    prepares long before takes what it takes there. Elsewhere they are moments of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._begin: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0

    def start(self) -> None:
        """A span begins; one that had begun is forgotten."""
        self._begin = self._now()

    def stop(self) -> None:
        """The span ends. Nothing happens where none had begun."""
        if self._begin is None:
            return
        self._pending.append((self._begin, self._now()))
        self._begin = None
        while self._pending and self._reached(self._pending[0][1]):
            self._add()

    def take(self) -> float:
        """Seconds of all spans that have ended since the last call. Waits until the device has reached their ends."""
        while self._pending:
            if self._on_gpu:
                self._pending[0][1].synchronize()
            self._add()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _reached(self, end: Any) -> bool:
        return not self._on_gpu or bool(end.query())

    def _add(self) -> None:
        begin, end = self._pending.popleft()
        self._seconds += begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
