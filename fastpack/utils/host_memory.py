"""The memory that this process may still take from its host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

SPARE = 8
"""The eighth of all memory that is left to others."""
OWN_GROUP = Path("/proc/self/cgroup")
"""The file that names this process's control groups in Linux, one a line: ``id:controllers:path``."""
MOUNTS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""The folders of control groups of version 2 and 1, and the names of the files with a group's limit and use."""
LOCAL_RANKS = "LOCAL_WORLD_SIZE"
"""The variable with which launchers tell a process how many of its kind share the machine."""


def available_bytes() -> int:
    """Return how many bytes this process may still take.

    These are what the machine and the control groups around the process have left, less a spare eighth, divided among
    the ranks on this machine.
    """
    memory = psutil.virtual_memory()
    left = memory.available - memory.total // SPARE
    for mount, limit, used in MOUNTS:
        left = min([left, *(_left_in_group(group, limit, used, memory.total) for group in _groups_in(mount))])
    return max(0, left) // max(1, int(os.environ.get(LOCAL_RANKS, 1)))


def _groups_in(mount: Path) -> Iterator[Path]:
    """Yield the mount of a kind of control groups, and the groups below it around this process."""
    yield mount
    try:
        paths = [line.split(":", 2)[2].strip("/") for line in OWN_GROUP.read_text().splitlines()]
    except OSError:  # not Linux
        return
    for path in paths:
        yield from (mount / "/".join(path.split("/")[: depth + 1]) for depth in range(len(path.split("/"))) if path)


def _left_in_group(group: Path, limit: str, used: str, total: int) -> int:
    """Return what a control group has left; all of the machine's memory if there is no such group, or no limit."""
    try:
        most = int((group / limit).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # the cache of files is given back when memory is short
        taken = int((group / used).read_text()) - int(statistics.get("inactive_file", 0))
    except (OSError, ValueError):  # no such group, or "max"
        return total
    return most - taken - most // SPARE if most < total else total
