"""The shell scripts: they parse, keep what is installed, and say what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
BASH = shutil.which("bash")
OURS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
"""A PATH on which this very Python comes first."""
pytestmark = pytest.mark.skipif(BASH is None, reason="no bash here")


def installed_from() -> Path | None:
    """The folder of the fastpack that this Python has installed, whatever PYTHONPATH says."""
    code = "from importlib import util; found = util.find_spec('fastpack'); print(found and found.origin)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    origin = done.stdout.strip()
    return None if origin == "None" else Path(origin).parent.parent


prepared = pytest.mark.skipif(
    installed_from() != ROOT,
    reason="THIS FOLDER IS NOT INSTALLED HERE (pip install -e '.[test]'): the scripts would make a .venv and fill it",
)


def bash(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    assert BASH is not None
    environment = dict(os.environ) if path is None else {"PATH": path}
    return subprocess.run([BASH, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "script", ["gists/ddp.sh", "gists/setup.sh", "gists/quickstart.sh", "gists/smoke.sh", "gists/test.sh", ".ci/run"]
)
def test_scripts_parse(script: str) -> None:
    done = bash("-n", script)
    assert (done.returncode, done.stderr) == (0, "")


@prepared
def test_installed_packages_are_kept() -> None:
    done = bash("-euo", "pipefail", "-c", "source gists/setup.sh; satisfied torch; satisfied trl,plot", path=OURS)
    assert done.returncode == 0, done.stderr


def test_another_folder_is_not_what_is_installed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "gists", tmp_path / "gists")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = f"source '{tmp_path}/gists/setup.sh'; satisfied torch || exit 3; satisfied trl"
    assert bash("-uo", "pipefail", "-c", script, path=OURS).returncode == 1


@pytest.mark.parametrize("satisfied", [True, False])
def test_an_environment_that_has_everything_is_used(satisfied: bool, tmp_path: Path) -> None:
    """Nothing is made or installed then; else a .venv is, and everything goes there."""
    script = f"""source gists/setup.sh; ROOT='{tmp_path}'
        satisfied() {{ {"true" if satisfied else "false"}; }}
        make_venv() {{ mkdir -p .venv/bin; echo 'echo active' > .venv/bin/activate; }}
        quiet_pip() {{ echo "pip $*"; }}
        prepare trl"""
    done = bash("-euo", "pipefail", "-c", script, path=OURS)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".venv").exists() is not satisfied
    assert ("active" in done.stdout) is not satisfied
    assert ("pip install -e .[trl]" in done.stdout) is not satisfied


def test_an_old_or_missing_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "")
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = bash("-euo", "pipefail", "-c", "source gists/setup.sh; make_venv", path=str(tmp_path))
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "train"], "after --, pass sft or dpo"),
        (["two"], "not 'two'"),
        pytest.param(["3"], "splits 8 rows", marks=prepared),
        pytest.param(["--fsdp"], "needs GPUs", marks=prepared),
    ],
)
def test_a_launch_that_can_not_work_is_refused(arguments: list[str], message: str) -> None:
    if torch.cuda.is_available() and arguments[0] in ("3", "--fsdp"):
        pytest.skip("how many GPUs there are decides")
    done = bash("gists/ddp.sh", *arguments, path=OURS)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@prepared
@pytest.mark.slow
def test_the_losses_of_two_processes_are_those_of_one() -> None:
    done = bash("gists/ddp.sh", path=OURS)
    assert done.returncode == 0, done.stderr
    assert "the losses are the same as in one process" in done.stdout
    assert done.stdout.count("fastpack sft") == 2, "each run has one summary, however many take part"
