"""``python -m fastpack.smoke.preference``: a table and an exit code that can be trusted."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_preference_trainers import LOSSES as OF_THE_SUITE

import fastpack
import fastpack.smoke.preference.__main__ as smoke
from fastpack import commands
from fastpack.commands.demo.data import make_pairs, train_tokenizer
from fastpack.smoke.preference import cases
from fastpack.smoke.preference.cases import LOSSES, TRAINERS, Case, Work, all_cases, run
from fastpack.smoke.preference.figures import Figures
from fastpack.smoke.preference.judge import Differences, judge

trains_on_cpu = pytest.mark.skipif(not commands.trl_trains_on_cpu(), reason="this TRL's loss needs a GPU")
FEW = ["--pairs", "2", "--steps", "2", "--max-length", "96", "--learning-rate", "1e-3"]  # or controls see too little


@pytest.fixture
def work() -> Work:
    return smoke.make_work(smoke._parser().parse_args(FEW))


def made_up(**given: Any) -> Figures:
    logged = [
        {"loss": 0.7, "grad_norm": 2.0, "rewards/chosen": 0.1, "rewards/rejected": 0.3, "rewards/margins": -0.2},
        {"loss": 0.6, "grad_norm": 3.0, "rewards/chosen": 0.2, "rewards/rejected": 0.1, "rewards/margins": 0.1},
    ]
    figures = Figures(0.1, logged, [-300.0, -200.0], [-301.0, -203.0], [(0, 1)])
    return replace(figures, **given)


def changed(step: int, **given: float) -> list[dict[str, Any]]:
    logged = copy.deepcopy(made_up().logged)
    logged[step].update(given)
    return logged


@trains_on_cpu
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case of each trainer on made-up pairs, and what is written."""
    variants = ["sigmoid", "plain", "lora, reference precomputed"]
    found = tmp_path / "found.json"
    assert smoke.main([*FEW, "--variants", *variants, "--noise", "--json", str(found)]) == 0
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
    stock = run(case, work, patch=False)
    for other in (replace(case, settings={**case.settings, "beta": 0.1001}), case):
        slower = replace(work, learning_rate=0.999 * work.learning_rate) if other is case else work
        verdict = judge(run(other, slower, patch=True), stock, starts_at_ln_2=True)
        assert verdict.problems
    assert not judge(run(case, work, patch=True), stock, starts_at_ln_2=True).problems


@trains_on_cpu
def test_what_is_not_equal_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A patch that changes something is a failed row, and the exit code says so."""
    stock_patch = fastpack.patch

    def patch(trainer: Any) -> Any:
        trainer.beta *= 1.01
        return stock_patch(trainer)

    monkeypatch.setattr(cases.fastpack, "patch", patch)
    assert smoke.main([*FEW, "--trainers", "dpo", "--variants", "sigmoid"]) == 1
    printed = capsys.readouterr()
    assert "FAILED" in printed.out
    assert "dpo, sigmoid: loss off by" in printed.err


@trains_on_cpu
def test_log_probabilities_are_those_that_the_trainer_logs(work: Work) -> None:
    figures = run(Case("dpo", "sigmoid"), work, patch=True)
    assert len(figures.policy) == len(figures.reference) == 2 * work.pairs * work.steps
    for step, logged in enumerate(figures.logged):
        rows = figures.policy[2 * work.pairs * step :][: 2 * work.pairs]
        assert sum(rows[: work.pairs]) / work.pairs == pytest.approx(logged["logps/chosen"], rel=1e-6)
        assert sum(rows[work.pairs :]) / work.pairs == pytest.approx(logged["logps/rejected"], rel=1e-6)
        margins = figures.margins[work.pairs * step :][: work.pairs]
        assert sum(margins) / work.pairs == pytest.approx(logged["rewards/margins"], abs=1e-7 * figures.largest)


def test_every_loss_of_the_suite_is_a_case() -> None:
    assert set(LOSSES) == set(OF_THE_SUITE)
    found = all_cases()
    assert {case.trainer for case in found} == set(TRAINERS)
    assert len({(case.trainer, case.variant) for case in found}) == len(found)


@pytest.mark.parametrize(
    ("run_", "said"),
    [
        (made_up(logged=changed(1, loss=0.6 * (1 + 3e-5))), "loss off by 3.0e-05"),
        (made_up(logged=changed(0, grad_norm=2.0 * (1 + 3e-5))), "norm of the gradients off by 3.0e-05"),
        (made_up(policy=[-300.0, -200.001]), "log-probabilities off by 5.0e-06"),
        (made_up(logged=changed(1, **{"rewards/chosen": 0.2001})), "rewards off by 3.3e-06"),
        (made_up(policy=[-303.0, -200.0]), "1 pairs are ranked otherwise"),
        (made_up(logged=changed(0, loss=math.nan)), "not a number"),
    ],
)
def test_what_the_judge_says(run_: Figures, said: str) -> None:
    # the one that is ranked otherwise prefers its chosen completion by 2
    stock = made_up(reference=[-301.0, -199.0])
    run_ = replace(run_, reference=[-301.0, -199.0])
    assert not judge(stock, stock, starts_at_ln_2=False).problems
    assert any(said in problem for problem in judge(run_, stock, starts_at_ln_2=False).problems)


def test_losses_of_long_sequences_may_be_off_by_what_rounding_does_to_a_margin() -> None:
    """2**-23 x 0.1 x 3010 is 3.6e-5, of a loss of 0.6 it is 6.0e-5."""

    def long(loss: float = 0.6, grad_norm: float = 3.0) -> Figures:
        logged = changed(1, loss=loss, grad_norm=grad_norm)
        return made_up(logged=logged, policy=[-3000.0, -2000.0], reference=[-3010.0, -2030.0])

    for off, steepness, allowed in ((5.8e-5, 1, True), (6.2e-5, 1, False), (6.2e-5, 20, True), (1.3e-3, 20, False)):
        verdict = judge(long(loss=0.6 * (1 + off)), long(), starts_at_ln_2=False, steepness=steepness)
        assert (not verdict.problems) is allowed
    for off, allowed in ((3.5e-5, True), (3.7e-5, False)):
        assert (not judge(long(grad_norm=3.0 * (1 + off)), long(), starts_at_ln_2=False).problems) is allowed


@pytest.mark.parametrize(
    "run_",
    [
        made_up(policy=[math.nan, -200.0]),
        made_up(policy=[-300.0, math.nan]),
        made_up(reference=[-301.0, math.nan]),
        made_up(logged=changed(0, **{"rewards/chosen": math.nan})),
        made_up(logged=changed(1, **{"rewards/margins": math.nan})),
    ],
)
def test_what_is_not_a_number_is_not_equal(run_: Figures) -> None:
    """Wherever it stands among others."""
    assert any("off by inf" in problem for problem in judge(run_, made_up(), starts_at_ln_2=False).problems)


def test_log_probabilities_that_nobody_heard_are_a_problem() -> None:
    silent = made_up(policy=[], reference=[], pairs=[])
    other = replace(silent, logged=changed(0, **{"rewards/chosen": 9.0}))
    for run_ in (silent, other):
        (problem,) = judge(run_, silent, starts_at_ln_2=False, has_log_probs=True).problems
        assert "none was heard" in problem
    assert not judge(silent, silent, starts_at_ln_2=False).problems, "of trainers that have none"


def test_the_first_loss() -> None:
    figures = made_up()
    (problem,) = judge(figures, figures, starts_at_ln_2=True).problems
    assert problem.startswith("the first loss is off ln 2 by 6.9e-03")


def test_runs_of_other_steps_are_not_compared() -> None:
    with pytest.raises(ValueError, match="steps"):
        Differences.between(made_up(logged=made_up().logged[:1]), made_up())


def test_nothing_compared_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main([*FEW, "--trainers", "dpo", "kto", "--variants", "sigmod", "plain"]) == 2
    assert "--variants 'sigmod': dpo, kto with these losses have none of this name" in capsys.readouterr().err

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("too new a release")

    monkeypatch.setattr(smoke, "run", broken)
    assert smoke.main([*FEW, "--trainers", "dpo", "--variants", "sigmoid"]) == 2
    printed = capsys.readouterr()
    assert "left out: the stock model can't be trained so: RuntimeError: too new a release" in printed.out
    assert "nothing was compared" in printed.err


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_pairs(3)
    train_tokenizer(make_pairs(20)).save_pretrained(tmp_path)
    for name, lines, said in (
        ("few.jsonl", rows, "holds 3 rows, the steps take 4"),
        ("odd.jsonl", [{"text": "a"}] * 4, "line 1: it has no prompt and no chosen and no rejected"),
    ):
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
        assert smoke.main([*FEW, "--data", str(tmp_path / name), "--tokenizer", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
    assert smoke.main([*FEW, "--data", str(tmp_path / "few.jsonl")]) == 2
    assert "--data needs --tokenizer" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text("{\n")
    good = ["--data", str(tmp_path / "four.jsonl"), "--tokenizer", str(tmp_path)]
    (tmp_path / "four.jsonl").write_text("\n".join(map(json.dumps, make_pairs(4))))
    for flags, said in (
        (["--data", str(tmp_path / "nowhere.jsonl")], "nowhere.jsonl: No such file"),
        (["--data", str(tmp_path)], "Is a directory; pass a file of JSON lines"),
        (["--data", str(tmp_path / "bad.jsonl")], "bad.jsonl, line 1 is no JSON"),
        (["--tokenizer", str(tmp_path / "nothing")], "nothing: nothing that can be loaded"),
        (["--config", str(tmp_path / "nothing")], "nothing: nothing that can be loaded"),
        (["--pairs", "0"], "--pairs 0: pass 1 or more"),
        (["--steps", "0"], "--steps 0: pass 1 or more"),
        (["--max-length", "0"], "--max-length 0: pass 1 or more"),
    ):
        assert smoke.main([*FEW, *good, *flags]) == 2, flags
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
