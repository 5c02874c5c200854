"""``fastpack fit``: a table of cards, the terms of a peak, and what it says if nothing fits."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cli_runs import assert_one_line, one_line
from tiny import tiny_config

from fastpack.cli.main import main
from fastpack.memory.fit import CARDS


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    assert main(["fit", "llama8b", "--vram", "24", "--mode", "qlora", "--rank", "32"]) == 0
    assert time.perf_counter() - began < 10
    printed = one_line(capsys.readouterr().out)
    assert "LlamaForCausalLM, 8.03 billion parameters; qlora of rank 32, checkpointing, offload checkpoints" in printed
    for card in CARDS:
        assert f" {card} GB " in printed
    assert 'fastpack.patch(trainer, offload="checkpoints", loss="fused")' in printed
    assert "expandable_segments" in printed
    assert "weights in NF4" not in printed


def test_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["fit", "llama8b", "--vram", "20", "--explain"]) == 0
    printed = one_line(capsys.readouterr().out)
    assert " 20 GB " in printed
    assert "weights in NF4 (1/2 + 1/64 + 4/64/256) x weights" in printed
    assert main(["fit", "llama8b", "--vram", "20", "--json"]) == 0
    (card,) = (fit for name, fit in json.loads(capsys.readouterr().out)["cards"].items() if name == "20")
    assert sum(term["bytes"] for term in card["terms"]) / 2**30 == pytest.approx(card["peak"])
    assert 18.9 < card["peak"] <= 19
    assert f"{card['sequence']:,} tokens on 20 GB" in printed


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config("qwen3").save_pretrained(tmp_path)
    assert main(["fit", str(tmp_path), "--no-checkpointing", "--mode", "full"]) == 0
    printed = one_line(capsys.readouterr().out)
    assert "Qwen3ForCausalLM" in printed
    assert "full, no checkpointing, offload none" in printed
    assert 'fastpack.patch(trainer, loss="fused")' in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere/at/all.json"], "nowhere/at/all.json: there is no such file or folder"),
        (["."], ".: no config there"),
        (["llama8b", "--explain"], "--explain shows the peak on one card: pass --vram GIB too"),
        (["llama8b", "--no-checkpointing", "--offload", "checkpoints"], "offload='checkpoints' keeps the inputs"),
        (["llama8b", "--vram", "24", "--mode", "full"], "Use --mode lora (16.2 GiB) or --mode qlora (6.0 GiB)"),
        (["tiny-moe"], "Qwen3MoeSparseMoeBlock is not counted"),
        (["tiny-vl"], "builds no causal LM from a config of 'qwen3_vl'"),
    ],
)
def test_errors_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_line(["fit", *flags], message, capsys)


@pytest.mark.parametrize("flags", [["--vram", "0"], ["--vram", "much"], ["--rank", "0"], ["--mode", "half"]])
def test_flags_out_of_range(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "llama8b", *flags])
    assert exit_.value.code == 2
    assert f"argument {flags[0]}: " in capsys.readouterr().err
