"""The memory that this process may still take from its host."""

from __future__ import annotations

from pathlib import Path

import psutil

SPARE = 8
"""The eighth of all memory that is left to others."""
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""The limit, the statistics and the use of a container's memory, in Linux' control groups of version 2 and 1."""


def available_bytes() -> int:
    """Return how many bytes may still be taken: what the machine and its container have left, less a spare eighth."""
    memory = psutil.virtual_memory()
    left = memory.available - memory.total // SPARE
    for limit, statistics, used in CGROUPS:
        left = min(left, _left_in_group(Path(limit), Path(statistics), Path(used), memory.total))
    return max(0, left)


def _left_in_group(limit: Path, statistics: Path, used: Path, total: int) -> int:
    """Return what a control group has left; all of the machine's memory if there is no such group, or no limit."""
    try:
        most = int(limit.read_text())
        files = dict(line.split() for line in statistics.read_text().splitlines()).get("inactive_file", 0)
        taken = int(used.read_text()) - int(files)  # the cache of files is given back when memory is short
    except (OSError, ValueError):  # no such group, or "max"
        return total
    return most - taken - most // SPARE if most < total else total
