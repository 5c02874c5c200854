"""Every trainer of TRL in the table: patched equals stock in losses, metrics and weights, or is refused by name."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import trl
import trl.experimental
from async_trainers import async_grpo
from backbone_calls import Calls
from every_trainer import BUILD, SETTINGS, RealTokens, check_logs, check_weights, with_adapters
from oracle import FLOAT32_BOUND
from preferences import logged

import fastpack
from fastpack.cli.main import main
from fastpack.model.unwrap import models_of
from fastpack.trainers.padded_metrics import padded_metrics
from fastpack.trainers.supported import SUPPORTED, TRL_TRIED, trainers_markdown

NO_PADDING = ("AsyncDistillation",)
NO_LORA = {
    "trl.experimental.a2po.A2POTrainer": "TRL refuses adapters",
    "trl.experimental.bema_for_ref_model.DPOTrainer": "TRL's callback builds a model without adapters, and raises",
}
ROWS = {f"{row.module}.{row.name}": row for row in SUPPORTED}
tried = pytest.mark.skipif(not trl.__version__.startswith(f"{TRL_TRIED}."), reason="the table is of another TRL")


@pytest.mark.sample(4)
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("name", BUILD)
def test_equal(
    name: str, lora: bool, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if lora:
        if name in NO_LORA:
            pytest.skip(NO_LORA[name])
        with_adapters(monkeypatch)
    further = {**SETTINGS, "max_steps": 10 if request.config.getoption("--all") else 2}
    stock = BUILD[name](tmp_path, **further)
    theirs = logged(stock)
    assert not calls.all
    ours = fastpack.patch(BUILD[name](tmp_path, **further))
    real = RealTokens(ours)
    mine = logged(ours)

    assert len(mine) == further["max_steps"]
    check_logs(mine, theirs, left_out=padded_metrics(ours))
    assert any(step["grad_norm"] > 0 for step in mine)
    check_weights(ours, stock)
    assert calls.all == real.expected, "only real tokens reach the layers"
    assert (real.padding > 0) is not any(word in name for word in NO_PADDING)
    assert all(real.seen.values()), "every model takes part"
    roles = {"model", *(role for role, model in _others(ours) if model is not ours.model)}
    assert roles <= {*ROWS[name].models}
    assert len(real.seen) == len(models_of(ours)) == len(roles)


def _others(trainer: object) -> list[tuple[str, object]]:
    named = {"reference": getattr(trainer, "ref_model", None), "teacher": getattr(trainer, "teacher_model", None)}
    return [(role, model) for role, model in named.items() if model is not None]


def test_negative_control(tmp_path: Path) -> None:
    """Another learning rate gives other losses from the second step on."""
    build = BUILD["trl.experimental.sdft.SDFTTrainer"]
    stock = logged(build(tmp_path, **SETTINGS))
    other = logged(fastpack.patch(build(tmp_path, **{**SETTINGS, "learning_rate": 0.06})))
    assert abs(other[-1]["loss"] - stock[-1]["loss"]) > 3 * FLOAT32_BOUND * abs(stock[-1]["loss"])


def test_every_row_is_trained_or_refused() -> None:
    assert {name for name, row in ROWS.items() if not row.refused} == BUILD.keys()
    assert [name for name, row in ROWS.items() if row.refused] == ["trl.experimental.async_grpo.AsyncGRPOTrainer"]


@tried
def test_every_exported_trainer_has_a_row() -> None:
    packages = [f"trl.experimental.{module.name}" for module in pkgutil.iter_modules(trl.experimental.__path__)]
    exported = {
        f"{package}.{name}"
        for package in ("trl", *packages)
        for name in dir(importlib.import_module(package))
        if name.endswith("Trainer") and not name.startswith("_")
    }
    assert exported == ROWS.keys()


def test_refused_by_name(tmp_path: Path) -> None:
    trainer = async_grpo(tmp_path)
    for target in (trainer, type("Mine", (type(trainer),), {}).__new__(type("Mine", (type(trainer),), {}))):
        target.__dict__.update(trainer.__dict__)
        with pytest.raises(fastpack.PatchError, match="AsyncGRPOTrainer can't be patched: its batches are trees"):
            fastpack.patch(target)
    assert not fastpack.is_patched(trainer)


def test_the_command_lists_every_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "--trainers", "--json"]) == 0
    printed = capsys.readouterr().out
    assert [*re.findall(r'"trainer": "(.*)"', printed)] == [*ROWS]
    assert main(["families", "--trainers"]) == 0
    assert "BCO, Nash-MD, PPO, PRM, XPO" in capsys.readouterr().out
    assert main(["families", "--trainers", "--from", "run.json"]) == 2


def test_the_readme_shows_the_table() -> None:
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    assert trainers_markdown() in readme, "put what `fastpack families --trainers --markdown` prints into README.md"
