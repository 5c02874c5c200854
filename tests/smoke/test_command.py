"""``gists/smoke.sh``: rows of real runs, a table, and an exit code that a script can trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fastpack.smoke.__main__ as smoke
from fastpack import commands
from fastpack.smoke.most_used import MOST_USED
from fastpack.smoke.tiny import model_types
from fastpack.smoke.train import Row

trains_on_cpu = pytest.mark.skipif(not commands.trl_trains_on_cpu(), reason="this TRL's loss needs a GPU")


@trains_on_cpu
def test_a_family_in_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "rows.json"
    assert smoke.main(["mamba", "--backends", "auto", "--json", str(found)]) == 0
    rows = json.loads(found.read_text())
    assert [row["mode"] for row in rows] == ["plain", "lora", "packed"]
    for row in rows:
        assert row["rung"] == "re-padded mixer"
        assert row["error"] <= 1e-4
        assert row["loss"] <= 1e-4
        assert row["speed"] > 0
    printed = capsys.readouterr().out
    assert "3 runs of 1 families, 0 failed" in printed


def test_what_crashes_or_hangs_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main(["no_such_family", "--modes", "plain"]) == 1
    told = capsys.readouterr()
    assert "no_such_family" in told.err
    assert "FAILED" in told.out
    (row,) = smoke.run(["llama"], ["plain"], "auto", jobs=1, timeout=0)
    assert row.problem == "not done after 0 s"


def test_a_row_that_fails_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def made_up(family: str, *_: Any) -> list[Row]:
        return [Row(family, "plain", "fast", "segments", 0.5, 0.0, 2.0, "not exact" if family == "qwen2" else None)]

    monkeypatch.setattr(smoke, "_in_a_process", made_up)
    assert smoke.main(["llama", "mistral"]) == 0
    assert smoke.main(["llama", "qwen2"]) == 1
    assert "qwen2 (plain, segments): not exact" in capsys.readouterr().err


def test_who_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(smoke, "run", lambda families, *_, **__: asked.append(list(families)) or [])
    smoke.main([])
    smoke.main(["--all"])
    most, everybody = asked
    assert 60 <= len(most) < len(everybody)
    assert set(most) <= set(MOST_USED)
    assert set(everybody) <= set(model_types())
