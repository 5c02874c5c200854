"""The command line: training from local files, the hint, one-line errors, doctor and families."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import LORA, STEPS, assert_one_line, losses, one_line, run_sft, sft_flags, trains_on_cpu
from oracle import FLOAT32_BOUND

import fastpack
from fastpack.attention_dispatch import BACKENDS
from fastpack.cli.main import main
from fastpack.cli.meter import Summary, hint
from fastpack.exactness.image_text import image_text_types
from fastpack.families.registry import FAMILIES
from fastpack.utils.versions import NEWEST_TRIED


@trains_on_cpu
def test_patched_and_stock_have_the_same_losses(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patched = run_sft(work)
    printed = capsys.readouterr().out
    stock = run_sft(work, "--no_patch")
    stock_printed = capsys.readouterr().out

    assert len(losses(stock)) == STEPS
    assert losses(patched) == pytest.approx(losses(stock), rel=FLOAT32_BOUND)
    assert losses(stock)[-1] < losses(stock)[0]
    assert (patched["summary"]["tier"], stock["summary"]["tier"]) == ("fast", "stock")
    assert patched["summary"]["backend"] == "segments"
    counts = [(step["real_tokens"], step["slots"]) for step in patched["steps"]]
    assert counts == [(step["real_tokens"], step["slots"]) for step in stock["steps"]]
    summary = patched["summary"]
    assert summary["real_tokens"] == sum(real for real, _ in counts)
    assert summary["padding_share"] == pytest.approx(1 - summary["real_tokens"] / summary["slots"])
    assert 0.2 < summary["padding_share"] < 0.8

    for text, message in ((printed, "the patched backbone skipped them"), (stock_printed, "without --no_patch")):
        (line,) = (line for line in text.splitlines() if line.startswith("hint:"))
        assert message in line
    for row in ("steps", "loss, first to last", "real tokens/s", "slots that were padding", "peak memory", "tier"):
        assert row in printed


@trains_on_cpu
def test_counts_are_those_of_the_collator(work: Path) -> None:
    from transformers import AutoTokenizer

    results = run_sft(work, "--train_sampling_strategy", "sequential", "--max_length", "64")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    rows = [json.loads(line) for line in (work / "rows.jsonl").read_text().splitlines()]
    lengths = [min(64, len(tokenizer.apply_chat_template(row["messages"])["input_ids"])) for row in rows]
    for at, step in enumerate(results["steps"]):
        batch = lengths[8 * at : 8 * at + 8]
        assert (step["real_tokens"], step["slots"]) == (sum(batch), 8 * max(batch))


@trains_on_cpu
def test_patch_options_are_passed_on(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_sft(work, "--graphs", "auto", "--kernels", "torch", "--max_steps", "2")
    assert any(note.startswith("graphs: off, CUDA graphs need a CUDA device") for note in results["report"]["notes"])
    assert "off, CUDA graphs need a CUDA device" in " ".join(capsys.readouterr().out.split())
    assert losses(results) == pytest.approx(losses(run_sft(work, "--max_steps", "2")), rel=FLOAT32_BOUND)


@trains_on_cpu
def test_the_fused_loss(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_sft(work, "--loss", "fused", "--max_steps", "2")
    assert "fused in 2 micro-batches" in one_line(capsys.readouterr().out)
    assert losses(results) == pytest.approx(losses(run_sft(work, "--max_steps", "2")), rel=FLOAT32_BOUND)
    run_sft(work, "--loss", "fused", "--loss_type", "dft", "--max_steps", "1")
    assert "not fused: loss_type is 'dft'" in one_line(capsys.readouterr().out)


@trains_on_cpu
def test_packing_runs_and_leaves_nothing_to_say(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_sft(work, "--packing", "--max_length", "256", "--per_device_train_batch_size", "2")
    assert results["summary"]["padding_share"] == 0
    assert results["hint"] is None
    assert "hint:" not in capsys.readouterr().out
    stock = run_sft(work, "--packing", "--max_length", "256", "--per_device_train_batch_size", "2", "--no_patch")
    assert losses(results) == pytest.approx(losses(stock), rel=FLOAT32_BOUND)


@trains_on_cpu
def test_padding_free_has_the_losses_of_padded_batches(work: Path) -> None:
    flat = run_sft(work, "--padding_free")
    padded = run_sft(work)
    assert flat["summary"]["padding_share"] == 0
    assert flat["hint"] is None
    assert losses(flat) == pytest.approx(losses(padded), rel=FLOAT32_BOUND)


@trains_on_cpu
def test_lora_on_four_bit_weights(work: Path) -> None:
    pytest.importorskip("bitsandbytes")
    flags = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "up_proj", "--load_in_4bit")
    results = run_sft(work, *flags)
    assert results["summary"]["tier"] == "fast"
    assert any("LoRA" in kind or "lora" in kind for kind in results["report"]["projections"])
    stock = run_sft(work, *flags, "--no_patch")
    assert losses(results) == pytest.approx(losses(stock), rel=2e-3)  # TRL trains these adapters in bfloat16


def test_float32_where_there_is_no_accelerator(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpack.cli.arguments import parse
    from fastpack.cli.sft import SFT

    flags = ["--random_init", str(work / "llama.json"), "--dataset_name", "rows.jsonl"]
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert parse(SFT, flags).training.bf16 is False


@trains_on_cpu
def test_prompts_and_completions_evaluation_and_saving(work: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "data"
    folder.mkdir()
    rows = [json.loads(line)["messages"][:2] for line in (work / "rows.jsonl").read_text().splitlines()]
    pairs = [json.dumps({"prompt": q["content"], "completion": a["content"]}) for q, a in rows]
    (folder / "train.jsonl").write_text("\n".join(pairs[:32]))
    (folder / "test.jsonl").write_text("\n".join(pairs[32:]))
    flags = ["--eval_strategy", "steps", "--eval_steps", "1", "--gradient_accumulation_steps", "2"]
    arguments = [*sft_flags(work, *flags, "--output_dir", str(tmp_path / "out")), "--json", "results.json"]
    arguments[arguments.index("--dataset_name") + 1] = str(folder)
    arguments[arguments.index("--save_strategy") + 1] = "steps"
    assert main(arguments) == 0

    results = json.loads(Path("results.json").read_text())
    # both halves of each step are counted, and no batch of the evaluation
    assert all(step["real_tokens"] > 8 * 12 for step in results["steps"])
    assert results["summary"]["slots"] < 3 * 16 * 256
    evaluations = results["evaluations"]
    assert [each["step"] for each in evaluations] == [step["step"] for step in results["steps"]]
    assert all(each["eval_loss"] > 0 for each in evaluations)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not fastpack.is_patched(saved)


@trains_on_cpu
def test_no_checkpoints_and_the_trained_model(work: Path, tmp_path: Path) -> None:
    """``--save_strategy no`` is about checkpoints; TRL's scripts save what came of the training all the same."""
    from transformers import AutoModelForCausalLM

    run_sft(work, "--output_dir", str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    assert not fastpack.is_patched(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))


@trains_on_cpu
def test_a_mixture_of_datasets(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As TRL's scripts take it, from a ``--config``."""
    lines = (work / "rows.jsonl").read_text().splitlines(keepends=True)
    parts = []
    for name, some in (("a.jsonl", lines[:20]), ("b.jsonl", lines[20:])):
        Path(name).write_text("".join(some))
        parts.append(f"  - {{path: json, data_files: {name}, columns: [messages]}}\n")
    Path("mix.yaml").write_text("datasets:\n" + "".join(parts) + "test_split_size: 0.25\n")
    both = sft_flags(work, "--config", "mix.yaml")
    assert_one_line(both, "pass only one: --data", capsys)
    at = both.index("--dataset_name")
    del both[at : at + 2]
    further = ["--max_steps", "-1", "--num_train_epochs", "1", "--eval_strategy", "epoch"]
    assert main([*both, *further, "--json", "results.json"]) == 0
    steps = json.loads(Path("results.json").read_text())["steps"]
    assert len(lines) == 48
    assert len(steps) == 5, "of at most 8: three quarters of both"


@pytest.mark.sample(1)
@trains_on_cpu
@pytest.mark.parametrize("asked", ["True", "checkpoint"])
def test_resumed(asked: str, work: Path, tmp_path: Path) -> None:
    whole = run_sft(work, "--output_dir", str(tmp_path / "out"), "--save_strategy", "steps", "--save_steps", "2")
    last = tmp_path / "out" / f"checkpoint-{STEPS}"
    last.rename(tmp_path / "elsewhere")
    checkpoint = asked if asked == "True" else str(tmp_path / "out" / "checkpoint-2")
    rest = run_sft(work, "--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint", checkpoint)
    assert losses(rest) == pytest.approx(losses(whole)[2:], rel=FLOAT32_BOUND)
    assert len(rest["steps"]) == STEPS - 2


@trains_on_cpu
def test_padding_free_says_that_it_cuts_no_examples(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_sft(work, "--max_steps", "1")
    assert "cuts no examples: the default" not in capsys.readouterr().out
    run_sft(work, "--max_steps", "1", "--padding_free", "True")
    assert "cuts no examples: the default --max_length 1,024 was off" in capsys.readouterr().out


@trains_on_cpu
def test_results_in_the_output_folder(work: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = sft_flags(work)
    for flag, value in (("--output_dir", folder), ("--json", folder / "run.json")):
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = str(value)
        else:
            arguments += [flag, str(value)]
    assert main(arguments) == 0
    assert json.loads((folder / "run.json").read_text())["summary"]["steps"] == STEPS


def test_a_command_that_is_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("fastpack.cli.doctor.main", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err.split("\n") == ["", "fastpack doctor: interrupted", ""]


def summary(*, steps: int = 10, real: int = 1000, slots: int = 2000) -> Summary:
    return Summary(steps, 2.0, 1.0, real, slots, 1 - real / slots, 100.0, None, "")


def test_hint_is_silent_where_nothing_can_be_saved() -> None:
    assert hint(summary(real=1900), patched=False, head_too=False) is None
    assert hint(summary(), patched=True, head_too=True) is None


def test_hint_says_which_flag_leaves_padding_out() -> None:
    for head_too in (True, False):
        stock = hint(summary(), patched=False, head_too=head_too)
        assert stock is not None
        assert "50% of the slots (1,000 of 2,000) were padding" in stock
        assert "without --no_patch" in stock
    patched = hint(summary(), patched=True, head_too=False)
    assert patched is not None
    assert "but the loss head did not; with --padding_free" in patched


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "segments" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings["packages"]["torch"]["supported"] is True
    assert findings["packages"]["torch"]["needed"].startswith(">=")
    assert findings["packages"]["torch"]["newest_tried"] == NEWEST_TRIED["torch"]
    on_cpu = findings["attention"]["devices"]["cpu"]
    assert findings["attention"]["backends"].keys() == BACKENDS.keys()
    assert on_cpu["segments"] == {"float32": None, "bfloat16": None, "float16": None}
    assert "CUDA" in on_cpu["torch_varlen"]["bfloat16"]


@pytest.mark.parametrize(
    ("result", "message", "unsaid", "code"),
    [
        ({"transformers": "5.5.9"}, ["5.5.9: too old", "pip install 'transformers"], ["not tried"], 1),
        ({"trl": "1.99.0"}, ["1.99.0: not tried"], ["too old"], 0),
        ({"transformers": "5.99.0"}, ["5.99.0"], ["not tried", "too old"], 0),
    ],
)
def test_doctor_names_what_is_too_old_or_was_not_tried(
    result: dict[str, str],
    message: list[str],
    unsaid: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fastpack.cli import doctor

    versions = {"transformers": "5.6.0", "torch": "2.11.0+cu128", **result}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    assert main(["doctor"]) == code
    printed = capsys.readouterr().out
    assert [text for text in [*message, "not installed"] if text not in printed] == []
    assert [text for text in unsaid if text in printed] == []


def test_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = {row["model_type"] for row in rows}
    assert len(names) == len(rows)
    assert names > {*FAMILIES}
    assert names - {*FAMILIES} <= {*image_text_types()}
    assert {"model_type": "llava", "tier": "fast", "backbone": "LlamaModel"} in rows
    assert {"model_type": "llama", "tier": "fast", "backbone": "LlamaModel"} in rows
    assert main(["families", "--markdown"]) == 0
    markdown = capsys.readouterr().out
    assert all(f"`{name}`" in markdown for name in FAMILIES)
    assert main(["families"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "LlamaModel" in printed
    tiers = {row["model_type"]: row["tier"] for row in rows}
    assert {tiers[name] for name in ("lfm2", "qwen3_next", "kimi_linear", "mamba2", "falcon_h1")} == {"fast"}
    assert {tiers[name] for name in ("bailing_hybrid", "lfm3", "zamba2")} == {"varlen"}
    assert tiers["jamba"] == "re-padded mixer"


def test_the_module_is_the_command_and_starts_light() -> None:
    shown = subprocess.run([sys.executable, "-m", "fastpack", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == f"fastpack {fastpack.__version__}"
    code = "import fastpack.cli.main, sys; sys.exit(bool({'transformers', 'trl', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@trains_on_cpu
def test_a_sharded_base_on_two_processes(work: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fastpack"]
    ran: list[list[float]] = []
    for flags in ((), ("--shard_base",)):
        arguments = [*sft_flags(work, *LORA, "--per_device_train_batch_size", "4", *flags), "--json", "results.json"]
        subprocess.run([*launch, *arguments], check=True, timeout=300)
        ran.append(losses(json.loads(Path("results.json").read_text())))
    assert ran[1] == pytest.approx(ran[0], rel=FLOAT32_BOUND)


@trains_on_cpu
def test_a_sharded_base_needs_processes(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*sft_flags(work, *LORA, "--shard_base")]) == 2
    assert "launch it with torchrun" in one_line(capsys.readouterr().err)
