"""What runs in a family's own process: its rows, one after the other, into a file."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import fastpack
from fastpack.errors import BackendUnavailableError, UnsupportedModelError
from fastpack.exactness.oracle import Oracle
from fastpack.exactness.special import NOT_BUILT
from fastpack.families.refused import REFUSED
from fastpack.families.registry import FAMILIES
from fastpack.patching.support import too_old
from fastpack.testing.record import Row, Setting
from fastpack.testing.train import train_rows, verified

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


def work(family: str, task: Task, sent: Path, words: Path) -> None:
    """Write every row of this family to the file ``sent``, a line of JSON each, and null behind them; what is printed
    goes to the file ``words``."""
    with words.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable(2)
    warnings.simplefilter("ignore")
    if task.setting.device == "cpu":
        torch.set_num_threads(1)  # tensors are small: a second thread only waits for the first
    else:
        torch.backends.cudnn.allow_tf32 = False  # convolutions in float32, or 1e-4 can't hold
    with sent.open("w") as lines:
        for row in rows(family, task):
            print(json.dumps(asdict(row)), file=lines, flush=True)
        print("null", file=lines)  # that was all: what libraries do while the interpreter ends is no family's fault


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
    setting = replace(task.setting, dtype=str(oracle.dtype).removeprefix("torch."))
    backends = _backends(family, task.backends, setting)
    if EXACT in task.modes:
        yield from _exact(family, oracle, setting, backends)
    yield from train_rows(family, [mode for mode in task.modes if mode in TRAINED], setting, backends)


def oracle_of(family: str, setting: Setting) -> Oracle:
    """Return what this family's tiny model gives for each sequence alone, with experts held to where a row names them.

    Raises what building or running the stock model in float32 raises.
    """
    routers = FAMILIES[family].routers if family in FAMILIES else ()
    return Oracle.of(functools.partial(setting.build, family), getattr(torch, setting.dtype), routers)


def _refused(family: str, setting: Setting) -> Row:
    try:
        fastpack.patch(setting.build(family))
    except UnsupportedModelError:
        return Row(family, EXACT, refused=REFUSED[family])
    return Row(family, EXACT, problem="it is in the list of those that are refused, and was not")


def _exact(family: str, oracle: Oracle, setting: Setting, backends: Sequence[str]) -> Iterator[Row]:
    for backend in backends:
        model = fastpack.patch(setting.build(family), attention=backend)
        found = oracle.prove(model)
        kinds = {check.what: check.error for check in found.checks if not check.at_least}
        yield Row.of(family, EXACT, setting, model, found, kinds=kinds)


def _verify(family: str, task: Task) -> Iterator[Row]:
    for backend in _backends(family, task.backends, task.setting):
        model = fastpack.patch(task.setting.build(family), attention=backend)
        yield Row.of(family, VERIFY, task.setting, model, verified(model))


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
