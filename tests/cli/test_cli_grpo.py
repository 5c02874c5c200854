"""``fastpack grpo`` from local files: what TRL computes, reward functions by name, errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import LORA, assert_one_line, one_line, rollout_flags, run_rollouts, trains_on_cpu
from oracle import FLOAT32_BOUND

from fastpack.cli.rewards import check_columns, load_rewards
from fastpack.errors import FastpackError

REWARDS = """
from shared_words import LONG

def vowels(completions, **kwargs):
    return [sum(letter in "aeiou" for letter in c[0]["content"]) / LONG for c in completions]

def shared(completions, answer, **kwargs):
    return [float(len(set(c[0]["content"]) & set(a))) for c, a in zip(completions, answer)]

def strict(completions):
    return [0.0 for _ in completions]

def _hidden(**kwargs):
    return []

class Callable:
    def __call__(self, **kwargs):
        return []
"""
FUNCTIONS = ("--reward_funcs", "rewards.py:vowels", "rewards.py:shared")
FUSED = ("--loss", "fused")
GROUPS = ("--num_generations", "4")


@pytest.fixture(autouse=True)
def _rewards(_offline_and_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("rewards.py").write_text(REWARDS)
    Path("shared_words.py").write_text("LONG = 10\n")
    Path("broken.py").write_text("1 / 0\n")
    yield
    sys.modules.pop("shared_words", None)


def run_grpo(work: Path, *flags: str) -> dict[str, Any]:
    return run_rollouts(work, "grpo", *FUNCTIONS, *GROUPS, *flags)


@pytest.mark.sample(2)
@trains_on_cpu
@pytest.mark.parametrize(
    "flags",
    [
        (*LORA, "--lora_dropout", "0", "--beta", "0.1", "--loss_type", "grpo", *FUSED),
        (),
        ("--share_prefixes", "auto", *FUSED),
        (*LORA, "--lora_dropout", "0", "--beta", "0.1", "--loss_type", "grpo"),
    ],
)
def test_grpo_patched_and_stock_are_the_same(
    work: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    patched = run_grpo(work, *flags)
    printed = capsys.readouterr().out
    stock_flags = [flag for flag in flags if flag not in ("--share_prefixes", "auto", *FUSED)]
    stock = run_grpo(work, *stock_flags, "--no_patch")
    assert ("log-probabilities fused with the head in" in one_line(printed)) == (FUSED[0] in flags)
    assert (patched["summary"]["tier"], stock["summary"]["tier"]) == ("fast", "stock")
    for mine, theirs in zip(patched["steps"], stock["steps"], strict=True):
        assert theirs["grad_norm"] > 0
        for name in ("loss", "grad_norm", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=FLOAT32_BOUND, abs=1e-7), name
        for name in ("reward", "rewards/vowels/mean", "rewards/shared/mean", "completions/mean_length"):
            assert mine[name] == theirs[name], name
        assert theirs["reward"] == pytest.approx(theirs["rewards/vowels/mean"] + theirs["rewards/shared/mean"])
        assert (mine["real_tokens"], mine["slots"]) == (theirs["real_tokens"], theirs["slots"])
    rewards = [step["reward"] for step in patched["steps"]]
    assert f"{rewards[0]:.4f} to {rewards[-1]:.4f}" in printed
    assert "reward, first to last" in printed


@trains_on_cpu
def test_another_reward_is_noticed(work: Path) -> None:
    """Negative control."""
    both = run_grpo(work, "--max_steps", "3")
    one = run_rollouts(work, "grpo", *FUNCTIONS[:2], *GROUPS, "--no_patch")
    assert both["steps"][0]["grad_norm"] != pytest.approx(one["steps"][0]["grad_norm"], rel=FLOAT32_BOUND)


def test_functions_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("package").mkdir()
    Path("package/words.py").write_text(REWARDS)
    names = ["rewards.py:vowels", str(Path("rewards.py").absolute()) + ":shared", "package.words.shared"]
    functions = load_rewards([*names, "think_format_reward", "get_soft_overlong_punishment"])
    assert [each.__name__ for each in functions[:4]] == ["vowels", "shared", "shared", "think_format_reward"]
    assert functions[0]([[{"content": "banana"}]]) == [0.3]
    check_columns(functions, ["prompt", "answer"], "rows.jsonl")
    with pytest.raises(FastpackError, match=r"shared takes 'answer', but rows.jsonl has the columns prompt, text: add"):
        check_columns(functions, ["prompt", "text"], "rows.jsonl")
    monkeypatch.setattr("fastpack.cli.rewards.is_math_verify_available", lambda: False)
    with pytest.raises(FastpackError, match="pip install math-verify"):
        load_rewards(["accuracy_reward"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:exact", "there is no file nowhere.py; pass FILE.py:FUNCTION, MODULE.FUNCTION, or one of TRL's"),
        ("rewards.py", "pass FILE.py:FUNCTION"),
        ("exact", "--reward_funcs exact: pass FILE.py:FUNCTION"),
        ("rewards.py:exact", "rewards has no function 'exact', only vowels, shared, strict"),
        ("rewards.py:LONG", "has no function 'LONG'"),
        ("rewards.py:strict", "strict has no **kwargs, but TRL passes prompts, completions"),
        ("broken.py:exact", "broken.py raised ZeroDivisionError: division by zero"),
        ("nowhere.exact", "No module named 'nowhere'; pass FILE.py:FUNCTION"),
        ("broken.exact", "broken raised ZeroDivisionError"),
        ("prompts.jsonl:exact", "there is no file prompts.jsonl"),
    ],
)
def test_functions_that_can_not_be_called(
    name: str, message: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data is not there either, but nothing is loaded before the functions."""
    flags = [*rollout_flags(work, "grpo"), "--reward_funcs", name]
    flags[flags.index("--data") + 1] = "nowhere.jsonl"
    assert_one_line(flags, message, capsys)


def test_what_grpo_wants(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = rollout_flags(work, "grpo")
    assert_one_line(flags, "pass --reward_funcs (FILE.py:FUNCTION", capsys)
    assert_one_line([*flags, *FUNCTIONS, "--num_generations", "3"], "num_generations", capsys)
    assert_one_line([*flags, *FUNCTIONS, "--packing"], "not used by the HfArgumentParser: ['--packing']", capsys)
    assert_one_line([*flags, *FUNCTIONS, "--max_tokens", "99", "--same_steps"], "leave same_steps out", capsys)
    flags[flags.index("--data") + 1] = str(work / "rows.jsonl")
    assert_one_line([*flags, *FUNCTIONS], "has the columns messages; GRPO takes prompt, as text or as messages", capsys)
    Path("prompts.jsonl").write_text('{"prompt": "Why?", "solution": "So."}\n')
    flags[flags.index("--data") + 1] = "prompts.jsonl"
    assert_one_line([*flags, *FUNCTIONS], "shared takes 'answer', but prompts.jsonl has the columns prompt", capsys)
