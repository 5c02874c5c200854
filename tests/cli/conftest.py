"""A folder to run commands in, and nothing that is fetched from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import SIZES

from fastpack.cli.demo.data import make_pairs, make_rows, tiny_llama, train_tokenizer, write_rows


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``rows.jsonl``, ``pairs.jsonl``, ``prompts.jsonl``, ``tokenizer/`` and ``llama.json``."""
    folder = tmp_path_factory.mktemp("work")
    write_rows(make_pairs(48), folder).rename(folder / "pairs.jsonl")
    rows = make_rows(48)
    prompts = [{"prompt": row["messages"][:1], "answer": row["messages"][1]["content"]} for row in rows]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    tokenizer = train_tokenizer(rows)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_rows(rows, folder)
    (folder / "llama.json").write_text(tiny_llama(tokenizer, num_key_value_heads=1, **SIZES).to_json_string())
    return folder


@pytest.fixture(autouse=True)
def _offline_and_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
