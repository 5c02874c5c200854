"""The shell scripts: they parse, keep what is installed, and say what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="no bash here")


def bash(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    assert BASH is not None
    environment = dict(os.environ) if path is None else {"PATH": path}
    return subprocess.run([BASH, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "script", ["gists/setup.sh", "gists/quickstart.sh", "gists/smoke.sh", "gists/test.sh", ".ci/run"]
)
def test_scripts_parse(script: str) -> None:
    done = bash("-n", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_installed_is_kept() -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = bash("-euo", "pipefail", "-c", "source gists/setup.sh; satisfied torch; satisfied trl,plot", path=path)
    assert done.returncode == 0, done.stderr


def test_an_old_or_missing_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "")
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = bash("-euo", "pipefail", "-c", "source gists/setup.sh; make_venv", path=str(tmp_path))
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
