"""``fastpack sft`` and ``fastpack dpo`` with token budgets, shared prefixes and metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import losses, run_dpo, run_sft, sft_flags, trains_on_cpu

from fastpack.cli.main import main

METRICS = ("fastpack/real_tokens", "fastpack/step_seconds", "fastpack/tokens_per_second_per_gpu")


@trains_on_cpu
def test_sft_in_full_steps(work: Path) -> None:
    results = run_sft(work, "--max_tokens", "512")
    steps = [step["real_tokens"] for step in results["steps"]]
    assert all(0.7 * 512 < tokens <= 512 for tokens in steps)
    assert any("max_tokens=512: " in note for note in results["report"]["notes"])
    assert results["hint"] is None
    assert all(name in step for step in results["steps"] for name in METRICS)
    assert [step["fastpack/real_tokens"] for step in results["steps"]] == steps


@trains_on_cpu
def test_sft_cuts_what_is_too_long(work: Path) -> None:
    results = run_sft(work, "--max_tokens", "40", "--too_long", "truncate")
    assert [step["real_tokens"] for step in results["steps"]] == [40] * 3


@trains_on_cpu
def test_dpo_keeps_its_steps_within_a_budget(work: Path) -> None:
    whole = run_dpo(work, "--no_metrics")
    assert not any(name.startswith("fastpack/") for name in whole["steps"][0])
    split = run_dpo(work, "--max_tokens", "400", "--same_steps", "--share_prefixes", "auto")
    assert losses(split) == pytest.approx(losses(whole), rel=1e-5)
    notes = " ".join(split["report"]["notes"])
    assert "pieces" in notes
    assert "prefixes: shared in" in notes


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max_tokens", "512", "--no_patch"), "--no_patch trains without it"),
        (("--same_steps",), "--same_steps changes how --max_tokens works"),
        (("--too_long", "truncate"), "--too_long changes how --max_tokens works"),
        (("--max_tokens", "3"), "tokens, more than max_tokens=3"),
        (("--max_tokens", "3"), "(--too_long truncate)"),
        (("--max_tokens", "512", "--same_steps", "--padding_free"), "padding_free joins a batch into one row"),
    ],
)
def test_refused_in_one_line(
    flags: tuple[str, ...],
    words: str,
    work: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(sft_flags(work, *flags)) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed.splitlines()[-1]
