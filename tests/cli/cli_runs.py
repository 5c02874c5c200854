"""Runs of the command line on a folder of local files, for the tests of its commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastpack import cli as commands
from fastpack.cli.main import main

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
STEPS = 3
LORA = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "up_proj")
trains_on_cpu = pytest.mark.skipif(not commands.trl_trains_on_cpu(), reason="this TRL's loss needs a GPU")


def sft_flags(work: Path, *flags: str) -> list[str]:
    base = ["--tokenizer", str(work / "tokenizer"), "--random_init", str(work / "llama.json")]
    base += [
        "--dataset_name",
        str(work / "rows.jsonl"),
        "--max_steps",
        str(STEPS),
        "--per_device_train_batch_size",
        "8",
    ]
    base += ["--use_cpu", "True", "--bf16", "False", "--learning_rate", "1e-2", "--save_strategy", "no"]
    return ["sft", *base, *flags]


def run_sft(work: Path, *flags: str) -> dict[str, Any]:
    """Run ``fastpack sft``, which must succeed, and return its results."""
    assert main([*sft_flags(work, *flags), "--json", "results.json"]) == 0
    results: dict[str, Any] = json.loads(Path("results.json").read_text())
    return results


def one_line(printed: str) -> str:
    """Return a printed summary without its table's lines and breaks."""
    return " ".join(printed.replace("│", " ").split())


def losses(results: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in results["steps"]]


def run_dpo(work: Path, *flags: str) -> dict[str, Any]:
    """Run ``fastpack dpo``, which must succeed, and return its results; the reference is always the same."""
    arguments = ["dpo", *sft_flags(work, *flags)[1:], "--json", "results.json", "--gradient_checkpointing", "False"]
    at = arguments.index("--dataset_name")
    arguments[at : at + 2] = ["--data", str(work / "pairs.jsonl")]
    assert main(arguments) == 0
    results: dict[str, Any] = json.loads(Path("results.json").read_text())
    assert len(results["steps"]) == STEPS
    return results


def run_rollouts(work: Path, command: str, *flags: str) -> dict[str, Any]:
    """Run ``fastpack grpo`` or ``distill`` on short completions; it must succeed. Return its results."""
    assert main([*rollout_flags(work, command), *flags, "--json", "results.json"]) == 0
    results: dict[str, Any] = json.loads(Path("results.json").read_text())
    assert len(results["steps"]) == STEPS
    return results


def rollout_flags(work: Path, command: str) -> list[str]:
    flags = [command, *sft_flags(work)[1:], "--max_completion_length", "12"]
    at = flags.index("--dataset_name")
    flags[at : at + 2] = ["--data", str(work / "prompts.jsonl")]
    return flags


def assert_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    # libraries may log errors of their own
    (line,) = (line for line in printed.err.splitlines() if line.startswith(f"fastpack {arguments[0]}: error: "))
    assert message in line
    assert "Traceback" not in printed.err


ON_CPU = ["--device", "cpu", "--jobs", "1"]


def smoke_main(flags: list[str]) -> int:
    """Run ``fastpack smoke`` with these flags in this process, and return its exit code."""
    return main(["smoke", *flags])
