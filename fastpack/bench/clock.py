"""Wall time of each training step."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Told when a step begins and ends. Times those after the warm-up, and makes nobody wait for it.

    A step's time runs from the end of the one before to its own end, both as the device reaches them: what is fetched,
    logged and tidied up in between counts, as it does for users, and what hides behind the device's work does not.

    Args:
        warmup: how many steps are not timed.
    """

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._marks: list[Any] = []

    def begin(self) -> None:
        """A step begins."""
        if not self._marks:
            self.end()

    def end(self) -> None:
        """It has ended."""
        if not torch.cuda.is_available():
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds of each timed step."""
        marks = self._marks[self._warmup :]
        if not torch.cuda.is_available():
            return [end - begin for begin, end in pairwise(marks)]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
