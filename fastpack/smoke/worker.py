"""What runs in a family's own process: its rows, one after the other, down a pipe."""

from __future__ import annotations

import faulthandler
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import fastpack
from fastpack.coverage import too_old
from fastpack.errors import BackendUnavailableError, UnsupportedModelError
from fastpack.families import FAMILIES, REFUSED
from fastpack.smoke.row import Row
from fastpack.smoke.setting import Setting
from fastpack.exactness.special import NOT_BUILT
from fastpack.smoke.sweep import Oracle, oracle_of, sweep
from fastpack.smoke.verified import verified

EXACT, VERIFY = "exact", "verify"
TRAINED = ("plain", "lora", "packed")
MODES = (EXACT, VERIFY, *TRAINED)
USUAL = (EXACT, *TRAINED)
"""What is tried where nothing is asked for: a model is verified before it is trained, too."""
EACH = "each"


@dataclass(frozen=True)
class Task:
    """What is asked of every family.

    Attributes:
        modes: of :data:`MODES`; backends: ``each`` that can serve, or the name of one, or ``auto``.
    """

    modes: Sequence[str]
    backends: str
    setting: Setting


def work(family: str, task: Task, pipe: Connection, words: Path) -> None:
    """Send every row of this family down the pipe, and None behind them; what is printed goes to the file ``words``."""
    with words.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable(2)
    warnings.simplefilter("ignore")
    if task.setting.device == "cpu":
        torch.set_num_threads(1)  # tensors are small: a second thread only waits for the first
    else:
        torch.backends.cudnn.allow_tf32 = False  # convolutions in float32, or 1e-4 can't hold
    for row in rows(family, task):
        pipe.send(row)
    pipe.send(None)  # that was all: what libraries do while the interpreter ends is no family's fault
    pipe.close()


def rows(family: str, task: Task) -> Iterator[Row]:
    """Of every mode and backend; for a family that is refused, one that says why.

    Raises what building, patching or running it raises, but for the refusal of one that the list of them has.
    """
    if family in NOT_BUILT:
        yield Row(family, EXACT, refused=NOT_BUILT[family])
        return
    outdated = too_old(FAMILIES[family]) if family in FAMILIES else None
    if outdated is not None:
        yield Row(family, EXACT, refused=outdated)
        return
    if family in REFUSED:
        yield _refused(family, task.setting)
        return
    if VERIFY in task.modes:
        yield from _verify(family, task)
    if set(task.modes) == {VERIFY}:
        return
    oracle = oracle_of(family, task.setting)
    backends = _backends(family, task.backends, oracle.setting)
    if EXACT in task.modes:
        yield from _exact(family, oracle, backends)
    trained = [mode for mode in task.modes if mode in TRAINED]
    if trained:
        from fastpack.smoke.train import train_rows  # TRL takes seconds to import

        yield from train_rows(family, trained, oracle, backends)


def _refused(family: str, setting: Setting) -> Row:
    try:
        fastpack.patch(setting.build(family))
    except UnsupportedModelError:
        return Row(family, EXACT, refused=REFUSED[family])
    return Row(family, EXACT, problem="it is in the list of those that are refused, and was not")


def _exact(family: str, oracle: Oracle, backends: Sequence[str]) -> Iterator[Row]:
    for backend in backends:
        found = sweep(family, oracle, backend)
        yield Row(
            family,
            EXACT,
            found.rung,
            found.backend or "",
            oracle.setting.dtype,
            error=found.errors[found.worst],
            bound=found.bound,
            kinds=dict(found.errors),
            problem=found.problem,
        )


def _verify(family: str, task: Task) -> Iterator[Row]:
    for backend in _backends(family, task.backends, task.setting):
        model = fastpack.patch(task.setting.build(family), attention=backend)
        report = fastpack.report(model)
        names = (family, VERIFY, report.rung, report.backend or "", task.setting.dtype)
        yield Row(*names, **verified(model))


def _backends(family: str, which: str, setting: Setting) -> list[str]:
    """Those that can serve every layer, or the one that was asked for; ``auto`` where layers differ or none attends."""
    if which != EACH:
        return [which]
    model = setting.build(family)
    with fastpack.patched(model):
        able = [name for name, why in fastpack.report(model).backends.items() if why is None]
    alone = []
    for name in able:
        try:
            with fastpack.patched(model, attention=name):
                alone.append(name)
        except BackendUnavailableError:
            continue  # it serves some of the layers
    return alone if alone == able and able else [*alone, "auto"]
