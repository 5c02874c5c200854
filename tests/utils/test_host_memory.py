"""The memory that a process may still take from its host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fastpack.utils import host_memory
from fastpack.utils.host_memory import available_bytes

GIB = 2**30


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the mount of the control groups on a machine of 64 GiB, of which 48 are left; ours is ``jobs/7``."""
    memory = SimpleNamespace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host_memory, "MOUNTS", ((tmp_path, "limit", "used"),))
    own = tmp_path / "own"
    own.write_text("0::/jobs/7\n")
    monkeypatch.setattr(host_memory, "OWN_GROUP", own)
    monkeypatch.delenv(host_memory.LOCAL_RANKS, raising=False)
    (tmp_path / "jobs" / "7").mkdir(parents=True)
    return tmp_path


def write(group: Path, limit: str, used: int, cache: int = 0) -> None:
    (group / "limit").write_text(f"{limit}\n")
    (group / "used").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_a_machine_without_a_group(mount: Path) -> None:
    assert available_bytes() == 40 * GIB


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_a_group_without_a_limit(limit: str, mount: Path) -> None:
    write(mount, limit, 10 * GIB)
    assert available_bytes() == 40 * GIB


@pytest.mark.parametrize("group", ["", "jobs", "jobs/7"])
def test_the_groups_around_a_process_limit_it(group: str, mount: Path) -> None:
    write(mount, "max", 10 * GIB)
    write(mount / group, str(32 * GIB), 20 * GIB, cache=8 * GIB)
    assert available_bytes() == (32 - 12 - 4) * GIB
    write(mount / group, str(32 * GIB), 30 * GIB)
    assert available_bytes() == 0


def test_another_group_does_not(mount: Path) -> None:
    (mount / "jobs" / "8").mkdir()
    write(mount / "jobs" / "8", str(GIB), 0)
    assert available_bytes() == 40 * GIB


def test_ranks_share_a_machine(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_memory.LOCAL_RANKS, "8")
    assert available_bytes() == 5 * GIB


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
