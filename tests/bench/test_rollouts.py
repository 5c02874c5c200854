"""``fastpack bench --trainer grpo`` and ``distill``: drawn completions, the update of each variant, and wrong flags."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_flops import HEAD, HIDDEN, INNER, LAYERS, VOCABULARY, WEIGHTS

from fastpack import cli as commands
from fastpack.bench import variant_run
from fastpack.bench.flops import needed_flops
from fastpack.bench.lengths import make_completion_lengths, make_lengths
from fastpack.bench.rollouts import make_rollouts
from fastpack.bench.same_losses import compare
from fastpack.bench.settings import RunResult, RunSettings
from fastpack.bench.shapes import SHAPES, make_config, vocabulary
from fastpack.cli.bench import PARSER, check, choose_variants, make_settings
from fastpack.cli.main import main
from fastpack.errors import FastpackError

trains_on_cpu = pytest.mark.skipif(
    not torch.cuda.is_available() and not commands.trl_trains_on_cpu(), reason="this TRL's loss needs a GPU"
)
GRPO = RunSettings("", trainer="grpo", rows=2, steps=2, warmup=2, lengths="5-9", generations=4, completions="3-20")
DISTILL = replace(GRPO, trainer="distill", rows=4, teacher="teacher")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], **sizes})
    monkeypatch.setitem(SHAPES, "teacher", {**SHAPES["tiny"], "hidden_size": 128})


def train(settings: RunSettings, *names: str) -> list[RunResult]:
    return [variant_run.run(replace(settings, variant=name)) for name in names]


def flags(*arguments: str) -> argparse.Namespace:
    return PARSER.parse_args(arguments)


def test_lengths_of_a_range_and_of_a_file(tmp_path: Path) -> None:
    drawn = make_completion_lengths(500, kind="500-2000", seed=1)
    assert drawn == make_completion_lengths(500, kind="500-2000", seed=1)
    assert drawn != make_completion_lengths(500, kind="500-2000", seed=2)
    assert 500 <= min(drawn) < 560
    assert 1940 < max(drawn) <= 2000
    assert make_lengths(3, kind="7-7") == make_completion_lengths(3, kind="7") == [7, 7, 7]
    (tmp_path / "a.json").write_text("[1, 4]")
    assert make_completion_lengths(3, kind=str(tmp_path / "a.json")) == [1, 4, 1]
    for kind, message in (
        ("9-4", "pass 4-9"),
        ("0", "at least 1"),
        ("0-4", "at least 1"),
        ("nowhere", "'chat', a number of tokens, a range such as 500-2000, or a JSON file"),
    ):
        with pytest.raises(ValueError, match=message):
            make_completion_lengths(50, kind=kind)
    with pytest.raises(ValueError, match="at least 2"):
        make_lengths(50, kind="1-2")


def test_rollouts_have_the_lengths_that_are_counted() -> None:
    for settings in (GRPO, DISTILL):
        batches = list(make_rollouts(settings))
        assert len(batches) == settings.total_steps
        real = [(batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).tolist() for batch in batches]
        assert real[settings.warmup :] == settings.timed_batches()
        assert all(batch["num_items_in_batch"] == batch["completion_mask"].sum() for batch in batches)
    prompts = next(make_rollouts(GRPO))["prompt_ids"].view(2, 4, -1)
    assert (prompts == prompts[:, :1]).all(), "a group has one prompt"
    assert not torch.equal(prompts[0, 0], prompts[1, 0])
    assert "advantages" not in batches[0]


@trains_on_cpu
@pytest.mark.parametrize("settings", [DISTILL, replace(DISTILL, mode="lora", micro_batches=2)], ids=["full", "lora"])
def test_distillation_is_the_same_padded_and_patched(settings: RunSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    results = train(settings, "stock padded", "fastpack")
    verdict = compare(results, half=False)
    assert verdict.agree, str(verdict)
    assert verdict.norm_steps == 4
    assert all(loss > 0 for loss in results[0].losses)
    assert (results[0].backend, results[1].backend) == ("sdpa", "segments")
    monkeypatch.setitem(SHAPES, "teacher", {**SHAPES["teacher"], "num_hidden_layers": 1})
    other = compare([*results[:1], *train(settings, "fastpack")], half=False)
    assert not other.agree, "another teacher is noticed"


@trains_on_cpu
def test_micro_batches_are_the_same_update() -> None:
    """The trainer's own, and those that fastpack splits."""
    whole = train(replace(GRPO, steps=1, warmup=1), "stock padded")
    halves = replace(GRPO, steps=1, warmup=1, micro_batches=2)
    results = [*whole, *train(halves, "stock padded", "fastpack, prompts shared")]
    results += train(replace(halves, max_tokens=60), "fastpack")
    for row in results[1:]:
        assert row.gradient_norms == pytest.approx(whole[0].gradient_norms, rel=1e-4), row.variant
        assert row.losses == pytest.approx(whole[0].losses, rel=1e-4, abs=1e-6), row.variant


def test_a_loss_that_is_not_fused_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = train(replace(DISTILL, steps=1, warmup=0), "fastpack, fused loss")
    assert row.error is not None
    assert row.error.startswith("the loss is not fused: ")


def test_distillation_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The student's training and the teacher's forward; both heads on completions."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
    }
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], **sizes})
    monkeypatch.setitem(SHAPES, "teacher", {**SHAPES["tiny"], "num_hidden_layers": 2})
    (tmp_path / "c.json").write_text(json.dumps([9, 9, 3, 4]))
    settings = replace(DISTILL, rows=2, steps=1, warmup=1, lengths="2", completions=str(tmp_path / "c.json"))
    tokens, pairs, predicted = 5 + 6, 15 + 21, 3 + 4
    layer = 2 * tokens * WEIGHTS + 4 * pairs * HIDDEN
    assert needed_flops(settings) == 3 * (LAYERS * layer + predicted * HEAD) + 2 * layer + predicted * HEAD
    groups = replace(settings, trainer="grpo", teacher=None, rows=1, generations=2)
    assert needed_flops(groups) == 3 * (LAYERS * layer + predicted * HEAD)


def test_the_settings_of_the_flags() -> None:
    settings = make_settings(flags("--trainer", "distill"), on_gpu=True)
    assert (settings.shape, settings.teacher, settings.rows) == ("qwen0.5b", "qwen3-8b", 16)
    settings = make_settings(flags("--trainer", "distill"), on_gpu=False)
    assert (settings.shape, settings.teacher, settings.branches) == ("tiny", "tiny", 1)
    settings = make_settings(flags("--trainer", "grpo", "--generations", "16", "--max-tokens", "9"), on_gpu=False)
    assert (settings.branches, settings.teacher, settings.max_tokens, settings.completions) == (16, None, 9, "chat")
    assert len({vocabulary(shape) for shape in ("qwen0.5b", "qwen2-1.5b", "qwen3-4b", "qwen3-8b")}) == 1


def test_known_sizes() -> None:
    from transformers import AutoModelForCausalLM

    for shape, count in (("qwen2-1.5b", 1_543_714_304), ("qwen3-4b", 4_022_468_096)):
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(make_config(shape))
        assert model.num_parameters() == count, shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--completions", "5"], "--completions is for --trainer grpo and distill. Leave --completions out."),
        (["--trainer", "dpo", "--max-tokens", "5"], "--max-tokens is for --trainer grpo and distill"),
        (["--trainer", "distill", "--generations", "5"], "--generations is for --trainer grpo. Leave"),
        (["--trainer", "grpo", "--teacher", "tiny"], "--teacher is for --trainer distill. Leave --teacher out."),
        (
            ["--trainer", "distill", "--shape", "qwen0.5b", "--teacher", "llama8b"],
            "128,256 token ids, but --shape qwen0.5b has 151,936. Pass a teacher with the same vocabulary: qwen0.5b,",
        ),
        (["--trainer", "distill", "--shape", "tiny-vl"], "trains on images, and is for --trainer sft and grpo"),
        (["--trainer", "distill", "--loop", "plain"], "only TRL's trainer has the loss of distill"),
        (["--trainer", "grpo", "--micro-batches", "5"], "--micro-batches 5 does not divide the 32 sequences of a step"),
        (["--trainer", "grpo", "--completions", "5-1"], "--completions 5-1: the range ends before it begins"),
    ],
)
def test_wrong_flags(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    stock = ["stock padded", "stock padded + FA2", "stock padded + FA2 + Liger"]
    shared = ["fastpack, prompts shared", "fastpack, fused loss", "fastpack, prompts shared, fused loss"]
    assert choose_variants(None, on_gpu=True, trainer="distill") == ([*stock, "fastpack"], {})
    assert choose_variants(None, on_gpu=True, trainer="grpo") == ([*stock, "fastpack", *shared], {})
    assert choose_variants(None, on_gpu=False, trainer="distill")[0] == ["stock padded", "fastpack"]
    left_out = choose_variants(None, on_gpu=True, trainer="grpo", shape="gpt-oss-20b")[1]
    assert left_out["stock padded + FA2"] == "needs FlashAttention-2, which transformers lacks for this shape"
    with pytest.raises(FastpackError, match="not a variant of --trainer distill, which has stock padded"):
        choose_variants(["fastpack packed"], on_gpu=True, trainer="distill")


def test_settings_are_checked_before_a_process_starts() -> None:
    check(GRPO, on_gpu=False)
    with pytest.raises(commands.UsageError, match="--completions nothing: no such file"):
        check(replace(GRPO, completions="nothing"), on_gpu=False)
