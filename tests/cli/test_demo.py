"""``fastpack demo``: both runs in a few steps, its results and its picture; and the data that it makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastpack.cli import UsageError, demo, trl_trains_on_cpu
from fastpack.cli.demo.data import SPECIAL_TOKENS, make_rows, train_tokenizer
from fastpack.cli.main import main

STEPS = 4
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.skipif(not trl_trains_on_cpu(), reason="this TRL's loss needs a GPU")
def test_demo(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fastpack",
        "demo",
        "--steps",
        str(STEPS),
        "--rows",
        "96",
        "--json",
        "results.json",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fastpack-demo.png", "results.json"]
    assert (tmp_path / "fastpack-demo.png").read_bytes().startswith(PNG)
    assert "The losses agree" in done.stdout

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["losses_agree"] is True
    assert [row["step"] for row in results["steps"]] == list(range(1, STEPS + 1))
    for row in results["steps"]:
        assert row["patched_loss"] == pytest.approx(row["stock_loss"], rel=1e-4)
        assert row["stock_seconds"] > 0
        assert row["patched_seconds"] > 0
    assert results["steps"][-1]["stock_loss"] < results["steps"][0]["stock_loss"]
    assert results["max_relative_difference"] == max(row["relative_difference"] for row in results["steps"])
    assert results["real_tokens"] == sum(row["real_tokens"] for row in results["steps"])
    assert results["slots"] == sum(row["slots"] for row in results["steps"])
    assert 0.3 < results["padding_share"] < 0.7
    speeds = results["tokens_per_second"]
    assert results["speed_ratio"] == pytest.approx(speeds["patched"] / speeds["stock"])
    assert results["model"]["tier"] == "fast"
    assert results["machine"]["torch"]


def written(loss: float, seconds: float) -> dict[str, Any]:
    """What a run of ``fastpack sft`` of four steps writes."""
    step = {"real_tokens": 100, "slots": 200, "seconds": seconds, "loss": loss}
    summary = {"real_tokens": 400, "slots": 800, "padding_share": 0.5, "memory_kind": "resident"}
    return {
        "steps": [{"step": number, **step} for number in range(1, 5)],
        "summary": {**summary, "peak_memory_bytes": 2**30},
        "report": {"family": "llama", "tier": "fast", "backend": "segments"},
    }


@pytest.mark.parametrize(("drift", "code"), [(1e-6, 0), (1e-3, 1)])
def test_losses_that_disagree_fail(
    drift: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"stock, padded": written(3.0, 0.5), "patched": written(3.0 * (1 + drift), 0.25)}
    monkeypatch.setattr(demo, "_train", lambda what, *_: runs[what])
    monkeypatch.setattr(demo, "require_trl_on_cpu", lambda command: None)
    assert main(["demo", "--plot", str(tmp_path / "plot.png")]) == code
    printed = capsys.readouterr().out
    assert ("DISAGREE" in printed) is (code == 1)
    assert "2.00x" in printed


@pytest.mark.slow
def test_a_run_that_breaks_off_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="the patched run ended with exit code 2, see above"):
        demo._train("patched", tmp_path, {"no_such_flag": "1"})
    assert "--no_such_flag" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--plot", "nowhere/plot.png"], "there is no folder"),
        (["--plot", "plot.xyz"], "ends in one of .png"),
        (["--json", "."], "--json .: it is a folder"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastpack demo: error: ")
    assert words in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--steps", "2"], "--steps: 2: pass 3 or more"), (["--rows", "3"], "--rows: 3: pass 16 or more")],
)
def test_too_few_to_compare(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", *flags])
    assert words in capsys.readouterr().err


def test_data_are_the_same_for_the_same_seed() -> None:
    assert make_rows(20, seed=3) == make_rows(20, seed=3)
    assert make_rows(20, seed=3) != make_rows(20, seed=4)


def test_tokenizer_is_small_and_whole() -> None:
    rows = make_rows(50)
    tokenizer = train_tokenizer(rows)
    assert len(tokenizer) <= 1000
    assert set(SPECIAL_TOKENS) <= set(tokenizer.get_vocab())
    chat = rows[0]["messages"]
    ids = tokenizer.apply_chat_template(chat)["input_ids"]
    assert all(message["content"] in tokenizer.decode(ids) for message in chat)
    assert tokenizer.pad_token_id not in ids
