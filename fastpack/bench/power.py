"""What a GPU draws, and how fast it is clocked, while contestants train: ``fastpack bench --power``.

A chip at its limit of power lowers its clocks, and the faster its work is done, the sooner: then a millisecond saved
beside the matrix products is half lost again in them. nvidia-smi tells, from a process of its own.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

QUERY = ("timestamp", "power.draw", "power.limit", "clocks.sm", "clocks.max.sm")
EVERY_MS = 100


@dataclass(frozen=True)
class Drawn:
    """Means over the timed steps, and what they may be at most: power in W, the multiprocessors' clock in MHz."""

    watts: float
    watts_limit: float
    mhz: float
    mhz_limit: float


def unavailable() -> str | None:
    """Why nothing can be asked here, or None."""
    return None if shutil.which("nvidia-smi") else "--power asks nvidia-smi, which is not on the PATH"


class PowerMeter:
    """Asks ten times a second, from when it is entered until it is left.

    Args:
        gpu: the UUID that CUDA gives the device, without ``GPU-``; of a part of a GPU (MIG) nothing can be told.
    """

    def __init__(self, gpu: str) -> None:
        self._command = ["nvidia-smi", f"--id=GPU-{gpu}", f"--query-gpu={','.join(QUERY)}"]
        self._command += ["--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"]
        self._lines: list[str] = []
        self._since = self._until = datetime.max

    def __enter__(self) -> Self:
        # over a pipe, so that it ends with this process, whatever ends that
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._lines.extend, args=[self._process.stdout], daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def begin(self) -> None:
        """The time that counts begins."""
        self._since = datetime.now()

    def end(self) -> None:
        """It has ended."""
        self._until = datetime.now()

    @property
    def drawn(self) -> Drawn | None:
        """The means of that time, once the meter was left; None where nothing was told in it."""
        return mean_of(self._lines, self._since, self._until)


def mean_of(lines: Sequence[str], since: datetime, until: datetime) -> Drawn | None:
    """From nvidia-smi's lines, those of that time; a line that was cut off, or tells nothing, is left out."""
    samples: list[tuple[float, ...]] = []
    for line in lines:
        when, *rest = (part.strip() for part in line.split(","))
        try:
            told, values = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f"), tuple(map(float, rest))
        except ValueError:
            continue
        if since <= told <= until and len(values) == len(QUERY) - 1:
            samples.append(values)
    return Drawn(*map(statistics.fmean, zip(*samples, strict=True))) if samples else None
