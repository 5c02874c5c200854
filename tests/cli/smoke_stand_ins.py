"""Functions that replace the work on a family; they have their own module, since processes import it."""

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


def hang(family: str, task: Task, sent: Path, log: Path) -> None:
    """Send the first row, then hang."""
    send(sent, Row(family, task.modes[0]))
    time.sleep(600)


def fail(family: str, task: Task, sent: Path, log: Path) -> None:
    """Send the first row, print an error, and exit."""
    send(sent, Row(family, task.modes[0]))
    log.write_text("Traceback\nValueError: no good\n\n")
    raise SystemExit(1)


def die(family: str, task: Task, sent: Path, log: Path) -> None:
    """Kill the process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave(family: str, task: Task, sent: Path, log: Path) -> None:
    """Send the first row, then exit with code 0."""
    send(sent, Row(family, task.modes[0]))
    os._exit(0)


def leave_before_anything(family: str, task: Task, sent: Path, log: Path) -> None:
    """Exit with code 0 without a row."""
    os._exit(0)


def forget(family: str, task: Task, sent: Path, log: Path) -> None:
    """Send the first row, then the mark of the end."""
    send(sent, Row(family, task.modes[0]))
    send(sent, None)
