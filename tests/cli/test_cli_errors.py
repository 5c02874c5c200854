"""Whatever a command can't do is said in one line, before anything is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_runs import SIZES, assert_one_line, sft_flags

from fastpack import cli as commands


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--dataset_name": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file or folder"),
        ({"--dataset_name": None}, "pass --data (or --dataset_name)"),
        ({"--tokenizer": None}, "llama.json: pass --tokenizer FOLDER"),
        ({"--tokenizer": "nowhere"}, "no tokenizer in nowhere: pass --tokenizer FOLDER"),
        ({"--random_init": None}, "either --model_name_or_path MODEL or --random_init CONFIG"),
        ({"--random_init": "nowhere.json"}, "nowhere.json: there is no such file or folder"),
        ({"--attention": "flash_attn"}, "can't serve float32 on cpu"),
        ({"--attention": "sideways"}, "invalid choice: 'sideways'"),
        ({"--graphs": "always"}, "invalid choice: 'always'"),
        ({"--graphs": "auto", "--share_prefixes": "auto"}, "share_prefixes"),
        ({"--offload": "everything"}, "invalid choice: 'everything'"),
        ({"--no_such_flag": "1"}, "--no_such_flag"),
        ({"--max_steps": "many"}, "invalid int value: 'many'"),
        ({"--eval_strategy": "epoch"}, "has no split 'test'"),
        ({"--resume_from_checkpoint": "/nowhere"}, "--resume_from_checkpoint /nowhere: /nowhere is not a checkpoint"),
        (
            {"--resume_from_checkpoint": "True"},
            "outputs/sft is not a checkpoint, it has no trainer_state.json",
        ),
        ({"--packing": "True", "--max_length": "none"}, "`max_length` can't be `None`"),
        ({"--json": "/nowhere/run.json"}, "--json /nowhere/run.json: there is no folder /nowhere"),
        ({"--patch": "False", "--graphs": "auto", "--max_tokens": "99"}, "--graphs, --max_tokens: needs fastpack"),
        ({"--max_tokens": "0"}, "max_tokens=0; pass the tokens of a micro-batch, an int"),
        ({"--use_liger_kernel": "True"}, "--use_liger_kernel needs Liger, which is not installed"),
        ({"--config": "bad.yaml"}, "while parsing a flow sequence"),
        ({"--config": "data.yaml"}, "In a --config, --data is dataset_name"),
        ({"--config": "graphs.yaml"}, "graphs='always' is not a choice"),
        ({"--config": "dtype.yaml"}, "--dtype foo: no such dtype"),
        ({"--random_init": "odd.json"}, "hidden size (33)"),
    ],
)
def test_errors_are_one_line(
    work: Path, change: dict[str, str | None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((work / "llama.json").read_text())
    files = {"bad": "a: [1", "data": "data: rows.jsonl", "graphs": "graphs: always", "dtype": "dtype: foo"}
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(f"{text}\n")
    Path("odd.json").write_text(json.dumps({**config, "hidden_size": 33}))
    arguments = sft_flags(work)
    for flag, value in change.items():
        if value is None:
            at = arguments.index(flag)
            del arguments[at : at + 2]
        elif flag in arguments:
            arguments[arguments.index(flag) + 1] = value
        else:
            arguments += [flag, value]
    assert_one_line(arguments, message, capsys)


def test_kernels_that_nothing_here_can_run(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert_one_line([*sft_flags(work), "--kernels", "triton"], "kernels='triton', but there is no GPU here", capsys)


def test_a_data_set_without_text_is_refused(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.jsonl").write_text('{"question": "Why?", "answer": "So."}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": \n')
    (tmp_path / "notes.doc").write_text("Why?")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "null.jsonl").write_text('{"text": "Why?"}\n{"text": null}\n')
    for name, message in (
        ("empty.jsonl", "empty.jsonl holds no rows"),
        ("null.jsonl", "has 1 row without a value of 'text'"),
        ("odd.jsonl", "has the columns answer, question"),
        ("broken.jsonl", "can't be read as a data set"),
        ("notes.doc", "a local data set is a file that ends in .jsonl"),
    ):
        arguments = sft_flags(work)
        arguments[arguments.index("--dataset_name") + 1] = str(tmp_path / name)
        assert_one_line(arguments, message, capsys)


def test_an_encoder_and_a_foreign_tokenizer_are_refused(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import BertConfig

    config = json.loads((work / "llama.json").read_text())
    (tmp_path / "small.json").write_text(json.dumps({**config, "vocab_size": 97}))
    small = BertConfig(vocab_size=1024, **SIZES)
    (tmp_path / "bert.json").write_text(small.to_json_string())
    for name, message in (("small.json", "ids, but the model embeds 97"), ("bert.json", "is an encoder")):
        arguments = sft_flags(work)
        arguments[arguments.index("--random_init") + 1] = str(tmp_path / name)
        assert_one_line(arguments, message, capsys)


def test_a_missing_package_is_named_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda name: None)
    command = "pip install 'trl>=1.15' 'datasets>=4.0'"
    assert_one_line(["sft"], f"needs trl and datasets, not installed here: {command}", capsys)


def test_a_trl_that_needs_a_gpu_is_named(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "trl_trains_on_cpu", lambda: False)
    assert_one_line(sft_flags(work), "needs TRL 1.16 or newer", capsys)


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_launcher_of_many_processes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each process would start the variants again."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_one_line([command], "runs in one process, but 2 were started: call it without torchrun", capsys)
