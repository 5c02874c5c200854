"""``fastpack smoke-preference``: a table and an exit code that can be trusted."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fastpack
import fastpack.cli.smoke_preference as smoke
from fastpack import cli as commands
from fastpack.cli.demo.data import make_pairs, train_tokenizer
from fastpack.cli.flags import make_parser
from fastpack.cli.main import main
from fastpack.testing.preference import cases
from fastpack.testing.preference.cases import TRAINERS, Case, Work, all_cases, run
from fastpack.testing.preference.judge import differences, problems

trains_on_cpu = pytest.mark.skipif(not commands.trl_trains_on_cpu(), reason="this TRL's loss needs a GPU")
FEW = ["--pairs", "2", "--steps", "2", "--max-length", "96", "--learning-rate", "1e-3"]  # or controls see too little


@pytest.fixture
def work() -> Work:
    return smoke.make_work(make_parser("smoke-preference", "", smoke.FLAGS).parse_args(FEW))


BETA = 0.1
MADE_UP: list[dict[str, float]] = [
    {"loss": 0.7, "grad_norm": 2.0, "rewards/chosen": 0.1, "rewards/margins": -0.2, "logps/chosen": -300.0},
    {"loss": 0.6, "grad_norm": 3.0, "rewards/chosen": 0.2, "rewards/margins": 0.1, "logps/chosen": -203.0},
]


def changed(step: int, **given: float) -> list[dict[str, float]]:
    logged = copy.deepcopy(MADE_UP)
    logged[step].update(given)
    return logged


def said(run_: Any, stock: Any = MADE_UP, **given: Any) -> list[str]:
    return problems(run_, stock, beta=BETA, **{"starts_at_ln_2": False, **given})


@trains_on_cpu
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case of each trainer on made-up pairs, and what is written."""
    variants = ["sigmoid", "plain", "lora, reference precomputed"]
    found = tmp_path / "found.json"
    assert main(["smoke-preference", *FEW, "--variants", *variants, "--noise", "--json", str(found)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("equal") == 5
    records = json.loads(found.read_text())
    assert {record["trainer"] for record in records} == set(TRAINERS)
    assert all(not record["problems"] and record["left_out"] is None for record in records)
    dpo = [record["off"] for record in records if record["trainer"] == "dpo"]
    assert all(not math.isnan(value) for off in dpo for value in off.values())
    assert all(off["log_probs"] <= 1e-6 for off in dpo)
    assert all(record["noise"].keys() == record["off"].keys() for record in records)


@trains_on_cpu
def test_another_run_is_not_equal(work: Work) -> None:
    """Negative control: a little more beta, and a little less learning."""
    case = Case("dpo", "sigmoid", {"loss_type": ["sigmoid"]})
    stock, beta = run(case, work, patch=False)
    for other in (replace(case, settings={**case.settings, "beta": 0.1001}), case):
        slower = copy.copy(work.given)
        slower.learning_rate *= 0.999 if other is case else 1.0
        found, _ = run(other, replace(work, given=slower), patch=True)
        assert problems(found, stock, beta=beta, starts_at_ln_2=True)


@trains_on_cpu
def test_what_is_not_equal_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A patch that changes something is a failed row, and the exit code says so."""
    stock_patch = fastpack.patch

    def patch(trainer: Any) -> Any:
        trainer.beta *= 1.01
        return stock_patch(trainer)

    monkeypatch.setattr(cases.fastpack, "patch", patch)
    assert main(["smoke-preference", *FEW, "--trainers", "dpo", "--variants", "sigmoid"]) == 1
    printed = capsys.readouterr()
    assert "FAILED" in printed.out
    assert "dpo, sigmoid: loss off by" in printed.err


def test_every_loss_of_the_suite_is_a_case() -> None:
    found = all_cases()
    assert {case.trainer for case in found} == set(TRAINERS)
    assert len({(case.trainer, case.variant) for case in found}) == len(found)


@pytest.mark.parametrize(
    ("run_", "what"),
    [
        (changed(1, loss=0.6 * (1 + 3e-5)), "loss off by 3.0e-05"),
        (changed(0, grad_norm=2.0 * (1 + 3e-5)), "grad_norm off by 3.0e-05"),
        (changed(1, **{"logps/chosen": -203.001}), "log_probs off by 4.9e-06"),
        (changed(1, **{"rewards/chosen": 0.2001}), "rewards off by 3.3e-06"),
        (changed(0, loss=math.nan), "loss off by inf"),
        (changed(1, grad_norm=math.nan), "grad_norm off by inf"),
        (changed(0, **{"logps/chosen": math.nan}), "log_probs off by inf"),
        (changed(1, **{"rewards/margins": math.nan}), "rewards off by inf"),
    ],
)
def test_what_the_judge_says(run_: Any, what: str) -> None:
    """Of what is off, or no number, wherever it stands among others."""
    assert not said(MADE_UP, has_log_probs=True)
    assert any(what in problem for problem in said(run_, has_log_probs=True))


def test_losses_of_long_sequences_may_be_off_by_what_rounding_does_to_a_margin() -> None:
    """2**-23 x 0.1 x 3010 is 3.6e-5, of a loss of 0.6 it is 6.0e-5."""

    def long(loss: float = 0.6, grad_norm: float = 3.0) -> list[dict[str, float]]:
        return changed(1, loss=loss, grad_norm=grad_norm, **{"logps/chosen": -3010.0})

    for off, steepness, allowed in ((5.8e-5, 1, True), (6.2e-5, 1, False), (6.2e-5, 20, True), (1.3e-3, 20, False)):
        assert (not said(long(loss=0.6 * (1 + off)), long(), steepness=steepness)) is allowed
    for off, allowed in ((3.5e-5, True), (3.7e-5, False)):
        assert (not said(long(grad_norm=3.0 * (1 + off)), long())) is allowed


def test_log_probabilities_that_nobody_logged_are_a_problem() -> None:
    silent = [{"loss": step["loss"], "grad_norm": step["grad_norm"], "margin": 0.5} for step in MADE_UP]
    found = said(silent, silent, has_log_probs=True)
    assert "no log_probs to compare: none was logged" in found
    assert not said(silent, silent), "of trainers that have none"
    other = [{**step, "margin": 0.5 * (1 + 3e-5)} for step in silent]
    assert said(other, silent) == ["rewards off by 3.0e-05, allowed 1.0e-05"]


def test_the_first_loss() -> None:
    (problem,) = said(MADE_UP, starts_at_ln_2=True)
    assert problem.startswith("the first loss is off ln 2 by 6.9e-03")


def test_runs_of_other_steps_are_not_compared() -> None:
    with pytest.raises(ValueError, match="steps"):
        differences(MADE_UP[:1], MADE_UP, BETA)


def test_nothing_compared_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke-preference", *FEW, "--trainers", "dpo", "kto", "--variants", "sigmod", "plain"]) == 2
    assert "--variants 'sigmod': dpo, kto with these losses have none of this name" in capsys.readouterr().err

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("too new a release")

    monkeypatch.setattr(smoke, "run", broken)
    assert main(["smoke-preference", *FEW, "--trainers", "dpo", "--variants", "sigmoid"]) == 2
    printed = capsys.readouterr()
    assert "left out: the stock model can't be trained so: RuntimeError: too new a release" in printed.out
    assert "nothing was compared" in printed.err


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_pairs(3)
    train_tokenizer(make_pairs(20)).save_pretrained(tmp_path)
    for name, lines, said in (
        ("few.jsonl", rows, "holds 3 rows, the steps take 4"),
        ("odd.jsonl", [{"text": "a"}] * 4, "line 1 has no chosen, prompt, rejected"),
    ):
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
        assert main(["smoke-preference", *FEW, "--data", str(tmp_path / name), "--tokenizer", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
    assert main(["smoke-preference", *FEW, "--data", str(tmp_path / "few.jsonl")]) == 2
    assert "--data needs --tokenizer" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text("{\n")
    good = ["--data", str(tmp_path / "four.jsonl"), "--tokenizer", str(tmp_path)]
    (tmp_path / "four.jsonl").write_text("\n".join(map(json.dumps, make_pairs(4))))
    for flags, said in (
        (["--data", str(tmp_path / "nowhere.jsonl")], "nowhere.jsonl: no such file"),
        (["--data", str(tmp_path)], "no such file; pass a file of JSON lines"),
        (["--data", str(tmp_path / "bad.jsonl")], "bad.jsonl, line 1 is no JSON"),
        (["--tokenizer", str(tmp_path / "nothing")], "nothing: nothing that can be loaded"),
        (["--config", str(tmp_path / "nothing")], "nothing: nothing that can be loaded"),
    ):
        assert main(["smoke-preference", *FEW, *good, *flags]) == 2, flags
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    for flag in ("--pairs", "--steps", "--max-length"):
        with pytest.raises(SystemExit):
            main(["smoke-preference", *FEW, flag, "0"])
        assert f"argument {flag}: 0: pass 1 or more" in capsys.readouterr().err
