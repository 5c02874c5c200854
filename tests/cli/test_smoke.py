"""``gists/smoke.sh``: rows of real runs, a table, and an exit code that a script can trust."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import smoke_stand_ins
import torch
import transformers
from cli_runs import ON_CPU, smoke_main
from known_families import KNOWN

import fastpack
import fastpack.cli.smoke as smoke
from fastpack import cli as commands
from fastpack.attention_dispatch import BACKENDS
from fastpack.backends.call import AttentionCall
from fastpack.cli import families
from fastpack.cli.families import family_rows
from fastpack.cli.main import main
from fastpack.cli.smoke import MOST_USED, MOST_USED_ON_IMAGES, choose
from fastpack.exactness.family_settings import NOT_BUILT
from fastpack.exactness.image_text import image_text_types
from fastpack.exactness.inputs import INPUT_KINDS
from fastpack.exactness.tiny import build_tiny, model_types
from fastpack.families.refused import REFUSED
from fastpack.families.registry import family_named
from fastpack.packing.seqlens import PackedSeqLens
from fastpack.testing import processes, worker
from fastpack.testing.record import Record, Row, Setting
from fastpack.testing.worker import EACH, USUAL, Task

UNTRIED = {**NOT_BUILT, **REFUSED}
trains_on_cpu = pytest.mark.skipif(not commands.trl_trains_on_cpu(), reason="this TRL's loss needs a GPU")


EXACT = Task(("exact",), "auto", Setting())


@trains_on_cpu
def test_a_family_in_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "run.json"
    assert smoke_main(["mamba", "--json", str(result), *ON_CPU]) == 0
    record = Record.read(result)
    assert [row.mode for row in record.rows] == [mode for mode in USUAL if mode != "images"]
    assert record.versions.keys() >= {"transformers", "torch", "trl", "fastpack", "python"}
    for row in record.rows:
        assert row.tier == "re-padded mixer"
        assert row.error is not None
        assert row.error <= 1e-4
        if row.mode == "exact":
            assert row.kinds.keys() > INPUT_KINDS.keys()
        else:
            assert row.loss is not None
            assert row.loss <= 1e-4
            assert row.speed is not None
            assert row.speed > 0
    assert "4 runs of 1 family" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_verified_alone_in_half_precision(model_type: str, tmp_path: Path) -> None:
    """Experts too, which the other modes prove in float32 where no row names what chooses."""
    result = tmp_path / "run.json"
    flags = [model_type, "--modes", "verify", "--backends", "auto", "--dtype", "bfloat16", "--json", str(result)]
    assert smoke_main([*flags, *ON_CPU]) == 0
    (row,) = Record.read(result).rows
    assert (row.mode, row.dtype, row.tier, row.verdict) == ("verify", "bfloat16", "fast", "exact")
    assert row.error is not None
    assert row.bound is not None
    assert 1e-4 < row.error <= row.bound < 0.1


def test_a_leak_fails_what_is_verified_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = BACKENDS["segments"].run

    def leaky(call: AttentionCall) -> torch.Tensor:
        one = PackedSeqLens.from_lengths([sum(call.packed.lengths)])
        return run(dataclasses.replace(call, packed=one))

    monkeypatch.setattr(BACKENDS["segments"], "run", leaky)
    (row,) = worker.rows("llama", Task(("verify",), "auto", Setting(dtype="bfloat16")))
    assert (row.problem or "").startswith("not exact: packed, as each sequence alone: logits")


def test_the_families_of_a_tier() -> None:
    chosen, _ = choose([], everyone=True, tier="fast")
    assert {"llama", "llava"} < {*chosen}
    assert {family.tier for name in chosen if (family := family_named(name))} == {"fast"}
    assert set(chosen) < set(choose([], everyone=True)[0])


def test_a_record_that_can_not_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(smoke, "run", None)
    assert smoke_main(["llama", "--json", "/nowhere/run.json", *ON_CPU]) == 2
    assert "--json /nowhere/run.json: there is no folder /nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tier", "fast"], "--tier fast chooses among all families: pass --all with it"),
        (["llama", "--all"], "--all runs every family: leave out either --all or llama"),
        (["--jobs", "0"], "argument --jobs: 0: pass 1 or more"),
        (["--timeout", "-1"], "--timeout -1: pass the seconds"),
        (["--timeout", "nan"], "--timeout nan: pass the seconds"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device here"),
        (["--device", "toaster"], "argument --device: invalid choice: 'toaster'"),
        (["--device", "cpu", "--backends", "flash_attn"], "--backends flash_attn: attention='flash_attn' can't serve"),
        ([""], "'' is not the name of a family"),
        (["../llama"], "'../llama' is not the name of a family"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_before_anything_runs(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smoke, "run", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        code: Any = smoke_main(flags)
    except SystemExit as ended:  # of argparse
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@trains_on_cpu
def test_a_model_that_trl_can_not_train_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stock model, that is: a patched one that can't be trained fails."""
    stock = worker._train

    def broken(model: Any, *, packed: bool) -> Any:
        if hasattr(model, "peft_config") and not fastpack.is_patched(model):
            raise AttributeError("no such thing")
        return stock(model, packed=packed)

    monkeypatch.setattr(worker, "_train", broken)
    result = list(worker.rows("llama", Task(("plain", "lora"), "auto", Setting())))
    assert [row.verdict for row in result] == ["exact", "left out"]
    assert "AttributeError: no such thing" in (result[-1].left_out or "")
    monkeypatch.setattr(smoke, "run", lambda *_, **__: [result])
    assert smoke_main(["llama", *ON_CPU]) == 0
    assert "llama (lora): left out: the stock model can't be trained" in capsys.readouterr().out
    monkeypatch.setattr(
        worker,
        "_train",
        lambda model, **_: broken(model, packed=False) if fastpack.is_patched(model) else ([1, 1, 1], 1),
    )
    (row,) = worker.rows("llama", Task(("plain",), "auto", Setting()))
    assert "losses are off" in (row.problem or "")


def test_losses_that_are_divided_by_another_number_of_labels() -> None:
    stock = [5.0, 6.0, 7.0]
    tokens = [70, 69, 81]
    divided = [loss * n / (n - 4) for loss, n in zip(stock, tokens, strict=True)]
    assert worker._off(divided, stock, packed=True) < 1e-12
    assert worker._off(divided, stock, packed=False) > 0.05
    assert worker._off(stock, stock, packed=True) == 0.0
    assert worker._off([5.0, 6.0, divided[2]], stock, packed=True) > 0.05


def test_every_backend_that_can_serve() -> None:
    rows = list(worker.rows("llama", Task(("exact",), EACH, Setting())))
    assert {row.backend for row in rows} >= {"segments", "reference"}
    assert all(row.verdict == "exact" for row in rows)


def test_a_refused_family_is_a_row_and_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke_main(["reformer", "gemma3n", "--modes", "exact", *ON_CPU]) == 0
    printed = capsys.readouterr().out
    assert "0 exact, 2 refused, 0 left out, 0 FAILED" in printed
    assert f"reformer: refused: {REFUSED['reformer']}" in printed
    assert f"gemma3n: refused: {NOT_BUILT['gemma3n']}" in printed


def test_a_listed_family_that_is_not_refused_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REFUSED, "llama", "made up")
    (row,) = worker.rows("llama", EXACT)
    assert row.verdict == "FAILED"


@pytest.mark.parametrize("mode", ["exact", "images"])
def test_an_unknown_family_fails(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke_main(["no_such_family", "--modes", mode, *ON_CPU]) == 1
    assert f"no_such_family ({mode}, no backend): KeyError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stand_in", "timeout", "modes", "problem"),
    [
        (smoke_stand_ins.hang, 3, "plain, lora", "not done after 3 s"),
        (smoke_stand_ins.fail, 60, "plain, lora", "ValueError: no good"),
        (smoke_stand_ins.die, 60, "exact, plain, lora", "ended by signal 9"),
        (smoke_stand_ins.leave, 60, "plain, lora", "its process ended with exit code 0 before it had sent all rows"),
        (smoke_stand_ins.leave_before_anything, 60, "exact, plain, lora", "its process ended with exit code 0 before"),
        (smoke_stand_ins.forget, 60, "plain, lora", "its process ended without these rows"),
    ],
    ids=["hangs", "raises", "is killed", "leaves", "leaves at once", "forgets"],
)
def test_a_hang_or_a_crash_is_a_failed_row(
    stand_in: Any, timeout: float, modes: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had sent before is kept, the rest of its modes failed, and the next family runs."""
    monkeypatch.setattr(processes, "work", stand_in)
    task = Task(("exact", "plain", "lora"), "auto", Setting())
    result = list(processes.run(["one", "two"], task, jobs=2, timeout=timeout))
    assert [rows[-1].family for rows in result] == ["one", "two"]
    for rows in result:
        last = rows[-1]
        assert last.mode == modes
        assert (last.problem or "").startswith(problem)
        sent = stand_in not in (smoke_stand_ins.die, smoke_stand_ins.leave_before_anything)
        assert len(rows) == 1 + sent


def test_leaving_before_the_last_backend_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each mode has a row."""
    monkeypatch.setattr(processes, "work", smoke_stand_ins.leave)
    ((sent, missed),) = processes.run(["one"], EXACT, jobs=1, timeout=60)
    assert (sent.mode, missed.mode, missed.verdict) == ("exact", "exact", "FAILED")


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("after", [0.2, 8])
def test_an_interrupt_stops_everything(
    after: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While processes start, and while they work; what they do would take ten minutes."""
    monkeypatch.setattr(processes, "work", smoke_stand_ins.hang)
    model_types()  # imports transformers, which takes longer than the first interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        assert smoke_main(["llama", "gpt2", "mamba", "--device", "cpu", "--jobs", "2"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "\nfastpack smoke: interrupted\n"
    assert not multiprocessing.active_children()


def test_empty_columns_are_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    row = Row("llama", "exact", "fast", "segments", "float32", 1e-6, 1e-4)
    monkeypatch.setattr(smoke, "run", lambda *_, **__: [[row]])
    assert smoke_main(["llama", *ON_CPU]) == 0
    printed = capsys.readouterr().out
    assert "1 run of 1 family" in printed
    assert "off by" in printed
    assert "losses off by" not in printed
    assert "x padded" not in printed
    assert "no room for" not in printed


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_real_processes_have_a_time_limit(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_context", lambda _: multiprocessing.get_context(method))
    ((row,),) = processes.run(["llama"], EXACT, jobs=1, timeout=0)
    assert row.problem == "not done after 0 s"


@pytest.mark.slow
def test_a_new_process_gives_what_a_forked_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are not forked."""
    (forked,) = processes.run(["llama"], EXACT, jobs=1, timeout=200)
    monkeypatch.setattr(processes, "_context", lambda _: multiprocessing.get_context("spawn"))
    assert list(processes.run(["llama"], EXACT, jobs=1, timeout=200)) == [forked]
    assert [row.verdict for row in forked] == ["exact"]


def test_a_row_that_fails_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def made_up(families: Any, *_: Any, **__: Any) -> list[list[Row]]:
        return [[Row(f, "plain", "fast", "segments", problem="not exact" if f == "qwen2" else None)] for f in families]

    monkeypatch.setattr(smoke, "run", made_up)
    assert smoke_main(["llama", "mistral", *ON_CPU]) == 0
    assert smoke_main(["llama", "qwen2", *ON_CPU]) == 1
    assert "qwen2 (plain, segments): not exact" in capsys.readouterr().err


def test_the_families_that_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(smoke, "run", lambda families, *_, **__: asked.append(list(families)) or [])
    smoke_main(ON_CPU)
    smoke_main(["--all", *ON_CPU])
    most, everybody = asked
    assert 60 <= len(most) < len(everybody)
    assert set(most) <= {*MOST_USED, *MOST_USED_ON_IMAGES}
    assert {*MOST_USED_ON_IMAGES} & {*everybody} < {*most}
    assert everybody == list(dict.fromkeys([*model_types(), *image_text_types()]))
    monkeypatch.setattr("fastpack.exactness.tiny.model_types", lambda: ["llama", "gpt2"])
    capsys.readouterr()
    assert smoke_main(["llama", "mamba", "no_such_family", *ON_CPU]) == 0
    assert asked[-1] == ["llama", "no_such_family"]
    assert "not in transformers" in (printed := capsys.readouterr().out)
    assert "mamba" in printed


def made_up_run(tmp_path: Path) -> Path:
    kinds = {"padded right": 1e-6, "packed_seq_lens": 2e-6}
    rows = [
        Row("llama", "exact", "fast", "segments", "float32", 2e-6, 1e-4, kinds),
        Row("llama", "plain", "fast", "segments", "float32", 2e-6, 1e-4),
        Row("gpt2", "exact", "quite new", "segments", "float32", 1e-6, 1e-4, kinds),
        Row("mamba", "exact", "re-padded mixer", "", "float32", 1e-6, 1e-4, kinds),
        Row("mamba", "plain", problem="crashed"),
        Row("qwen2", "plain", "fast", "segments", "float32", 1e-6, 1e-4),
        Row("llava", "exact", "fast", "segments", "float32", 1e-6, 1e-4, kinds),
        Row("llava", "images", "fast", "segments", "float32", 4e-6, 1e-4, {"images, flattened": 4e-6}),
        Row("reformer", "exact", refused="it sorts tokens"),
    ]
    run = tmp_path / "run.json"
    run.write_text(json.dumps(Record.of_now("cpu, float32", 12.5, ("bamba",), rows).to_dict()))
    return run


def test_a_run_is_summarised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_up_run(tmp_path)
    monkeypatch.setattr("fastpack.exactness.tiny.model_types", lambda: ["gpt2", "llama", "mamba", "qwen2", "reformer"])
    assert main(["families", "--from", str(run)]) == 0
    section = capsys.readouterr().out
    assert "| **fast** (2) |" in section
    assert "| **quite new** (1) |" in section
    assert "2 of 5 names in transformers' causal-LM mapping give" in section
    assert "2.0e-06 in float32" in section
    words = " ".join(section.split())
    assert "1 of 1 names in transformers' image-text mapping also give" in words
    assert "within 4.0e-06 in float32 (allowed are 1e-04). The inputs were images, flattened." in words
    assert "Not proved: `mamba`." in section
    assert "- `reformer`: it sorts tokens" in section
    assert not {"`qwen2`", "`bamba`", "`mistral`"} & set(section.replace(",", " ").split())
    monkeypatch.setattr("fastpack.exactness.tiny.model_types", lambda: ["gpt2", "llama", "mamba", "opt", "qwen2"])
    assert main(["families", "--from", str(run)]) == 0
    assert "2 of the 5 names that were tried give" in " ".join(capsys.readouterr().out.split())


def test_a_run_is_entered_in_the_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The families that it proved, as they are in the installed transformers; and none of another's."""
    run, file = made_up_run(tmp_path), tmp_path / "proved.json"
    monkeypatch.setattr(families, "LOCK", file)
    monkeypatch.setattr(families, "locked", lambda: {"LlamaMLP": {"old": ["5.6.0", transformers.__version__]}})
    monkeypatch.setattr(families, "sources_of", lambda family: {f"{family.title()}MLP": "new"})
    assert main(["families", "--from", str(run), "--lock"]) == 0
    entered = json.loads(file.read_text())
    assert entered["LlamaMLP"] == {"old": ["5.6.0"], "new": [transformers.__version__]}
    assert entered.keys() == {"LlamaMLP", "Gpt2MLP", "LlavaMLP"}
    file.unlink()
    record = json.loads(run.read_text())
    record["versions"]["transformers"] = "5.6.0"
    run.write_text(json.dumps(record))
    assert main(["families", "--from", str(run), "--lock"]) == 2
    assert "made with transformers 5.6.0" in capsys.readouterr().err
    assert main(["families", "--lock"]) == 2
    assert not file.exists()


def test_a_file_that_is_not_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, run = tmp_path / "bad.json", made_up_run(tmp_path)
    result = Record.read(run).to_dict()
    for text in (
        "",
        "[]",
        "{}",
        "5",
        '"run"',
        json.dumps({**result, "rows": []}),
        json.dumps({**result, "rows": [5]}),
        json.dumps({**result, "versions": []}),
    ):
        bad.write_text(text)
        assert main(["families", "--from", str(bad)]) == 2
        assert "is not a file of gists/smoke.sh" in capsys.readouterr().err
    for form in ("--json", "--markdown"):
        with pytest.raises(SystemExit):
            main(["families", "--from", str(run), form])
        assert f"argument {form}: not allowed with argument --from" in capsys.readouterr().err


def test_the_readme_counts_the_families() -> None:
    """``test_tiers.py`` proves each name on its tier; names that share a backbone with a family have its tier."""
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    tiers = {row["model_type"]: row["tier"] for row in family_rows() if row["model_type"] in {*KNOWN} - UNTRIED.keys()}
    for name in {*KNOWN} & {*model_types()} - tiers.keys() - UNTRIED.keys():
        tiers[name] = fastpack.report(fastpack.patch(build_tiny(name))).tier
    if len(tiers) < len(KNOWN) - len(UNTRIED.keys() & {*KNOWN}):
        pytest.skip("this release of transformers lacks some of the names")
    for tier, number in Counter(tiers.values()).items():
        assert re.search(rf"^\| {tier} \|.*\| {number} \|$", readme, re.MULTILINE), (tier, number)
    assert f"{len(tiers)} of the {len(KNOWN)} names in transformers" in readme
