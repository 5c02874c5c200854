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
from datetime import datetime, timedelta
from typing import Self

QUERY = ("timestamp", "power.draw.instant", "clocks.sm", "power.limit", "clocks.max.sm")
EVERY_MS = 100
PATIENCE = 10.0
"""Seconds that nvidia-smi has to end."""


@dataclass(frozen=True)
class Drawn:
    """Means over the timed steps, and what they may be at most: power in W, the multiprocessors' clock in MHz.

    Attributes:
        unknown: why there are none; or None.
    """

    watts: float = 0.0
    mhz: float = 0.0
    watts_limit: float | None = None
    mhz_limit: float | None = None
    unknown: str | None = None


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
        self._span = timedelta(0)
        self._until = datetime.min

    def __enter__(self) -> Self:
        # over a pipe, so that it ends with this process, whatever ends that
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._lines.extend, args=[self._process.stdout], daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def end(self, seconds: float) -> None:
        """The time that counts has ended on the device just now, and took so long."""
        self._until, self._span = datetime.now(), timedelta(seconds=seconds)

    def drawn(self) -> Drawn:
        """The means of that time, once the meter was left."""
        return mean_of(self._lines, self._until - self._span, self._until)


def mean_of(lines: Sequence[str], since: datetime, until: datetime) -> Drawn:
    """From nvidia-smi's lines, those of that time; lines that were cut off, and limits it can't tell, are left out."""
    samples: list[tuple[float, float]] = []
    watts_limit = mhz_limit = None
    said = f"nvidia-smi told nothing in the {(until - since).total_seconds():.1f} s that count"
    for line in lines:
        when, *rest = (part.strip() for part in line.split(","))
        told, values = _moment(when), [_number(part) for part in rest]
        if told is None or len(values) != len(QUERY) - 1 or values[0] is None or values[1] is None:
            said = line.strip() or said
        elif since <= told <= until:
            samples.append((values[0], values[1]))
            watts_limit, mhz_limit = values[2:]
    if not samples:
        return Drawn(unknown=said)
    watts, mhz = map(statistics.fmean, zip(*samples, strict=True))
    return Drawn(watts, mhz, watts_limit, mhz_limit)


def _moment(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y/%m/%d %H:%M:%S.%f")
    except ValueError:
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
