"""``fastpack dpo`` from local files: what TRL computes, counts of tokens, errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cli_runs import LORA, STEPS, assert_one_line, losses, one_line, run_dpo, sft_flags, trains_on_cpu
from oracle import FLOAT32_BOUND

from fastpack.cli.main import main


def check_equal_dpo(patched: dict[str, Any], stock: dict[str, Any]) -> None:
    assert (patched["summary"]["tier"], stock["summary"]["tier"]) == ("fast", "stock")
    for mine, theirs in zip(patched["steps"], stock["steps"], strict=True):
        largest = max(abs(theirs[f"logps/{side}"]) for side in ("chosen", "rejected"))
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=FLOAT32_BOUND), name
        for name in ("logps/chosen", "logps/rejected"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6), name
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6 * 0.1 * largest), name
        assert (mine["real_tokens"], mine["slots"]) == (theirs["real_tokens"], theirs["slots"])


@pytest.mark.sample(1)
@trains_on_cpu
@pytest.mark.parametrize("flags", [(), LORA, ("--precompute_ref_log_probs", "--max_length", "64")])
def test_dpo_patched_and_stock_are_the_same(
    work: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("of-one").absolute())
    patched = run_dpo(work, *flags)
    printed = capsys.readouterr().out
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("of-other").absolute())
    stock = run_dpo(work, *flags, "--no_patch")
    check_equal_dpo(patched, stock)
    # policy and reference begin as one and the same, also where both are random
    assert [run["steps"][0]["loss"] for run in (patched, stock)] == pytest.approx([math.log(2)] * 2, abs=1e-6)
    assert patched["steps"][-1]["rewards/margins"] != 0
    assert 0.2 < patched["summary"]["padding_share"] < 0.8
    assert "hint:" not in printed
    assert "without --no_patch the backbone skips them" in capsys.readouterr().out


@pytest.mark.sample(1)
@trains_on_cpu
@pytest.mark.parametrize("flags", [LORA, (), ("--precompute_ref_log_probs",)])
def test_the_fused_loss_of_dpo(work: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Policy and reference give log-probabilities without logits, and what TRL computes from them is the same.

    Adam divides tiny gradients by themselves, which makes a step of their rounding; a larger epsilon does not.
    """
    flags = (*flags, "--adam_epsilon", "1e-3")
    fused = run_dpo(work, *flags, "--loss", "fused")
    assert "log-probabilities fused with the head in" in one_line(capsys.readouterr().out)
    check_equal_dpo(fused, run_dpo(work, *flags, "--no_patch"))
    assert "log-probabilities fused" not in one_line(capsys.readouterr().out), "control"


@trains_on_cpu
def test_dpo_counts_both_sides_of_each_pair(work: Path) -> None:
    from transformers import AutoTokenizer

    results = run_dpo(work, "--train_sampling_strategy", "sequential")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    rows = [json.loads(line) for line in (work / "pairs.jsonl").open()]

    def tokens(row: dict[str, Any], side: str) -> int:
        return len(tokenizer.apply_chat_template(row["prompt"] + row[side], return_dict=True)["input_ids"])

    for at, step in enumerate(results["steps"]):
        batch = [tokens(row, side) for row in rows[8 * at : 8 * at + 8] for side in ("chosen", "rejected")]
        assert (step["real_tokens"], step["slots"]) == (sum(batch), 16 * max(batch))


@trains_on_cpu
def test_dpo_on_four_bit_weights(work: Path) -> None:
    pytest.importorskip("bitsandbytes")
    results = run_dpo(work, *LORA, "--load_in_4bit", "--loss_type", "ipo")
    assert results["summary"]["tier"] == "fast"
    stock = run_dpo(work, *LORA, "--load_in_4bit", "--loss_type", "ipo", "--no_patch")
    assert losses(results) == pytest.approx(losses(stock), rel=2e-3)  # TRL trains these adapters in bfloat16


@pytest.mark.sample(1)
@trains_on_cpu
@pytest.mark.parametrize("flags", [(), ("--precompute_ref_log_probs",)])
def test_dpo_from_a_folder(work: Path, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policy and reference are loaded by name, as TRL does."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig.from_json_file(work / "llama.json"))
    model.save_pretrained(tmp_path / "model")

    def run(cache: str, *further: str) -> dict[str, Any]:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / cache)
        base = ["--model_name_or_path", str(tmp_path / "model"), "--tokenizer", str(work / "tokenizer")]
        base += ["--data", str(work / "pairs.jsonl"), "--max_steps", str(STEPS), "--learning_rate", "1e-2"]
        base += ["--use_cpu", "True", "--bf16", "False", "--save_strategy", "no", "--json", "results.json"]
        assert main(["dpo", *base, *flags, *further]) == 0
        results: dict[str, Any] = json.loads(Path("results.json").read_text())
        return results

    patched = run("one")
    check_equal_dpo(patched, run("other", "--no_patch"))
    assert patched["steps"][0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


@trains_on_cpu
def test_another_reference_is_noticed(work: Path) -> None:
    """Negative control: the policy's first log-probabilities against those of other weights."""
    patched = run_dpo(work)
    with pytest.raises(AssertionError):
        check_equal_dpo(patched, run_dpo(work, "--no_patch", "--seed", "7"))


def test_dpo_wants_pairs(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["dpo", *sft_flags(work)[1:]]
    assert_one_line(arguments, "has the columns messages; DPO takes prompt, chosen and rejected", capsys)
    arguments[arguments.index("--dataset_name") + 1] = str(work / "pairs.jsonl")
    assert_one_line([*arguments, "--loss_type", "aot", "--use_weighting"], "not implemented for 'aot'", capsys)
    assert_one_line([*arguments, "--packing"], "not used by the HfArgumentParser: ['--packing']", capsys)
