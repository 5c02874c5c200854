"""``fastpack distill`` from local files: what TRL computes, the teacher, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import LORA, assert_one_line, losses, rollout_flags, run_rollouts, trains_on_cpu
from oracle import FLOAT32_BOUND

TEACHER = ("--teacher_random_init", "teacher.json")


@pytest.fixture(autouse=True)
def _teacher(work: Path, _offline_and_here: None) -> None:
    config = json.loads((work / "llama.json").read_text())
    Path("teacher.json").write_text(json.dumps({**config, "hidden_size": 64}))
    Path("other.json").write_text(json.dumps({**config, "vocab_size": 7}))


@pytest.mark.sample(1)
@trains_on_cpu
@pytest.mark.parametrize(
    "flags", [(), (*LORA, "--lora_dropout", "0", "--beta", "0.5"), ("--gradient_accumulation_steps", "2")]
)
def test_distillation_patched_and_stock_are_the_same(work: Path, flags: tuple[str, ...]) -> None:
    patched = run_rollouts(work, "distill", *TEACHER, *flags)
    stock = run_rollouts(work, "distill", *TEACHER, *flags, "--no_patch")
    assert (patched["summary"]["tier"], stock["summary"]["tier"]) == ("fast", "stock")
    for mine, theirs in zip(patched["steps"], stock["steps"], strict=True):
        assert theirs["loss"] > 0
        for name in ("loss", "grad_norm", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=FLOAT32_BOUND, abs=1e-7), name
        assert mine["completions/mean_length"] == theirs["completions/mean_length"]
        assert (mine["real_tokens"], mine["slots"]) == (theirs["real_tokens"], theirs["slots"])


@trains_on_cpu
def test_teachers(work: Path) -> None:
    """One with random weights is not the student, even with its config; one from a folder is its own."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    own = run_rollouts(work, "distill", "--teacher_random_init", str(work / "llama.json"))
    assert all(loss > 1e-6 for loss in losses(own)), "a student that is its own teacher learns nothing"
    AutoModelForCausalLM.from_config(LlamaConfig.from_json_file("teacher.json")).save_pretrained("teacher")
    saved = run_rollouts(work, "distill", "--teacher_model_name_or_path", "teacher")
    assert losses(saved)[0] != losses(own)[0]
    kept = run_rollouts(work, "distill", "--teacher_model_name_or_path", "teacher", "--no_patch")
    assert losses(saved) == pytest.approx(losses(kept), rel=FLOAT32_BOUND)


def test_what_distillation_wants(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = rollout_flags(work, "distill")
    one = "pass either --teacher_model_name_or_path MODEL or --teacher_random_init CONFIG"
    assert_one_line(flags, one, capsys)
    assert_one_line([*flags, *TEACHER, "--teacher_model_name_or_path", "a"], one, capsys)
    assert_one_line([*flags, "--teacher_random_init", "nowhere.json"], "nowhere.json: there is no such file", capsys)
    other = "the teacher other.json has 7 token ids, but the student has"
    assert_one_line([*flags, "--teacher_random_init", "other.json"], other, capsys)
    why = "--loss fused is for fastpack sft, dpo and grpo: TRL's own divergence is computed from hidden states"
    assert_one_line([*flags, *TEACHER, "--loss", "fused"], why, capsys)
    flags[flags.index("--data") + 1] = str(work / "rows.jsonl")
    assert_one_line([*flags, *TEACHER], "has the columns messages; DISTILL takes prompt, as text or", capsys)
