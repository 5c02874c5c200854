"""What a process may do instead of its work on a family; in a module of their own, since processes import it."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

from fastpack.testing.record import Row
from fastpack.testing.worker import Task


def send(sent: Path, row: Row | None) -> None:
    with sent.open("a") as lines:
        lines.write(json.dumps(row and asdict(row)) + "\n")


def hang(family: str, task: Task, sent: Path, words: Path) -> None:
    """After the first row."""
    send(sent, Row(family, task.modes[0]))
    time.sleep(600)


def fail(family: str, task: Task, sent: Path, words: Path) -> None:
    """After the first row, with a few words."""
    send(sent, Row(family, task.modes[0]))
    words.write_text("Traceback\nValueError: no good\n\n")
    raise SystemExit(1)


def die(family: str, task: Task, sent: Path, words: Path) -> None:
    """At once."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave(family: str, task: Task, sent: Path, words: Path) -> None:
    """After the first row, as if nothing were wrong."""
    send(sent, Row(family, task.modes[0]))
    os._exit(0)


def leave_before_anything(family: str, task: Task, sent: Path, words: Path) -> None:
    """As if nothing were wrong."""
    os._exit(0)


def forget(family: str, task: Task, sent: Path, words: Path) -> None:
    """Say that the first row was all."""
    send(sent, Row(family, task.modes[0]))
    send(sent, None)
