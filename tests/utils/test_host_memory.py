"""The memory that a process may still take from its host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fastpack.utils import host_memory
from fastpack.utils.host_memory import available_bytes

GIB = 2**30


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a control group on a machine of 64 GiB, of which 48 are left."""
    memory = SimpleNamespace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: memory)
    files = tuple(str(tmp_path / name) for name in ("limit", "statistics", "used"))
    monkeypatch.setattr(host_memory, "CGROUPS", (files,))
    return tmp_path


def write(group: Path, limit: str, used: int, cache: int = 0) -> None:
    (group / "limit").write_text(f"{limit}\n")
    (group / "used").write_text(f"{used}\n")
    (group / "statistics").write_text(f"anon 5\ninactive_file {cache}\n")


def test_a_machine_without_a_group(group: Path) -> None:
    assert available_bytes() == 40 * GIB


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_a_group_without_a_limit(limit: str, group: Path) -> None:
    write(group, limit, 10 * GIB)
    assert available_bytes() == 40 * GIB


def test_a_container_has_less_than_its_machine(group: Path) -> None:
    write(group, str(32 * GIB), 20 * GIB, cache=8 * GIB)
    assert available_bytes() == (32 - 12 - 4) * GIB
    write(group, str(32 * GIB), 30 * GIB)
    assert available_bytes() == 0


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
