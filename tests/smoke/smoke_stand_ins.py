"""What a process may do instead of its work on a family; in a module of their own, since processes import it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from fastpack.smoke.row import Row
from fastpack.smoke.worker import Task


def hang(family: str, task: Task, pipe: Any, words: Path) -> None:
    """After the first row."""
    pipe.send(Row(family, task.modes[0]))
    time.sleep(600)


def fail(family: str, task: Task, pipe: Any, words: Path) -> None:
    """After the first row, with a few words."""
    pipe.send(Row(family, task.modes[0]))
    words.write_text("Traceback\nValueError: no good\n\n")
    raise SystemExit(1)


def die(family: str, task: Task, pipe: Any, words: Path) -> None:
    """At once."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave(family: str, task: Task, pipe: Any, words: Path) -> None:
    """After the first row, as if nothing were wrong."""
    pipe.send(Row(family, task.modes[0]))
    os._exit(0)


def leave_before_anything(family: str, task: Task, pipe: Any, words: Path) -> None:
    """As if nothing were wrong."""
    os._exit(0)


def forget(family: str, task: Task, pipe: Any, words: Path) -> None:
    """Say that the first row was all."""
    pipe.send(Row(family, task.modes[0]))
    pipe.send(None)
