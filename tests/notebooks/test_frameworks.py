"""The recipes of ``notebooks/frameworks.ipynb`` run as they stand there, and give a stock run's losses.

Trainer, accelerate and Lightning run in the notebook. LLaMA-Factory, ms-swift and axolotl want releases of trl and
transformers that the suite does not have beside its own: their recipes run where the framework is installed
(``pytest tests/trainers/test_frameworks.py --all`` in an environment of theirs), in processes of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from test_notebooks import FRAMEWORKS, STEPS, execute, read, save_tiny_model, with_parameters

import fastpack
from fastpack.cli.demo.data import make_rows, write_rows

ROWS, BATCH_SIZE, LAYERS = 24, 4, 2
COUNTING = """
from fastpack.backends import segments

attended, stock_run = [], segments.run


def counted(call):
    attended.append(1)
    return stock_run(call)


segments.run = counted
"""
"""Counts the calls of fastpack's attention on a CPU, in another process than this one."""
COUNTED = "next(reversed(losses.values()))['attended'] = len(attended)\nattended.clear()"
AT_EXIT = """
import atexit

atexit.register(lambda: print("fastpack attended", len(attended), "times", flush=True))
"""


def tagged(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def test_a_recipe_for_each_framework_of_at_most_ten_lines() -> None:
    recipes = [cell.source for cell in read(FRAMEWORKS).cells if tagged(cell, "recipe")]
    assert len(recipes) == 6
    for recipe in recipes:
        code = [line for line in recipe.splitlines() if line.strip() and not line.startswith("%%")]
        assert len(code) <= 10, recipe
        assert "fastpack.patch(" in recipe


def test_the_readme_links_to_the_recipes() -> None:
    assert f"(notebooks/{FRAMEWORKS})" in (Path(__file__).parent.parent.parent / "README.md").read_text()


def run_notebook(folder: Path, monkeypatch: pytest.MonkeyPatch, *, lightning: bool) -> dict[str, dict[str, Any]]:
    """Run it, and return each framework's losses, stock and patched, and how often fastpack's attention ran."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    kwargs = {"BATCH_SIZE": BATCH_SIZE, "MAX_LENGTH": 256, "LEARNING_RATE": 5e-3}
    notebook = with_parameters(FRAMEWORKS, make_rows(ROWS), folder, monkeypatch, **kwargs)
    cells = [nbformat.v4.new_code_cell(COUNTING)]
    for cell in notebook.cells:
        if lightning or not tagged(cell, "lightning"):
            cells.append(cell)
            if "\ncompare(" in cell.source:
                cells.append(nbformat.v4.new_code_cell(COUNTED))
    notebook.cells = [*cells, nbformat.v4.new_code_cell("import json\nprint(json.dumps(losses))")]
    execute(notebook, folder)
    nbformat.write(notebook, folder / FRAMEWORKS)
    reported: dict[str, dict[str, Any]] = json.loads(notebook.cells[-1].outputs[0].text)
    return reported


def assert_equal_to_stock(reported: dict[str, Any]) -> None:
    stock, patched = reported["stock"], reported["patched"]
    assert len(stock) == STEPS
    assert stock[-1] < stock[0]  # it learned something
    assert patched == pytest.approx(stock, rel=1e-5)
    assert reported["attended"] == STEPS * LAYERS  # in the patched run, and in that alone


@pytest.mark.slow
def test_trainer_and_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = run_notebook(tmp_path, monkeypatch, lightning=False)
    assert reported.keys() == {"trainer", "accelerate"}
    for framework in reported.values():
        assert_equal_to_stock(framework)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="LIGHTNING IS NOT INSTALLED: [frameworks]")
def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = run_notebook(tmp_path, monkeypatch, lightning=True)
    assert reported.keys() == {"trainer", "accelerate", "lightning"}
    assert_equal_to_stock(reported["lightning"])


@dataclass(frozen=True)
class Framework:
    """A framework that loads a recipe as a file: its command without the recipe, and a config for the tiny model."""

    tag: str
    package: str
    wants: str
    stock: str
    config: str


COMMON = """
seed: 0
max_steps: {steps}
learning_rate: 5.0e-3
logging_steps: 1
lora_dropout: 0
fp16: false
bf16: false
output_dir: {output}
"""
FROM_FILES = (
    Framework(
        "llamafactory",
        "llamafactory",
        "trl up to 0.24",
        "llamafactory-cli train train.yaml",
        COMMON
        + """
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
dataset_dir: .
dataset: rows
template: chatml
cutoff_len: 256
per_device_train_batch_size: 4
report_to: none
save_steps: {steps}
use_cpu: true
""",
    ),
    Framework(
        "swift",
        "swift",
        "trl below 1.0 and transformers below 5.20",
        "swift sft train.yaml",
        COMMON
        + """
model: model
model_type: llama
template: chatml
use_hf: true
dataset: rows.jsonl
split_dataset_ratio: 0
torch_dtype: float32
tuner_type: lora
lora_rank: 4
max_length: 256
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
report_to: none
save_steps: {steps}
use_cpu: true
""",
    ),
    Framework(
        "axolotl",
        "axolotl",
        "transformers 5.20.1, trl 1.14.1 and Python 3.12",
        "axolotl train train.yaml",
        COMMON
        + """
base_model: model
datasets: [{{path: rows.jsonl, ds_type: json, type: chat_template}}]
chat_template: tokenizer_default
dataset_prepared_path: prepared
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
sequence_len: 256
micro_batch_size: 4
gradient_accumulation_steps: 1
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: constant
save_steps: {steps}
""",
    ),
)
ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
ROWS_FOR_LLAMAFACTORY = {
    "rows": {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": ROLES}
}


def recipe_of(framework: Framework) -> tuple[str, str, dict[str, str]]:
    """Return the name of the recipe's file, its text, and the blocks of code in the text after it by their language."""
    cells = read(FRAMEWORKS).cells
    (index,) = (index for index, cell in enumerate(cells) if tagged(cell, framework.tag))
    magic, text = cells[index].source.split("\n", 1)
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", cells[index + 1].source, re.DOTALL))
    return magic.removeprefix("%%writefile "), text, blocks


def losses_of(command: str, config: str, folder: Path, output: str) -> tuple[list[float], str]:
    """Run a framework's command, and return the losses of its steps and what it printed."""
    (folder / "train.yaml").write_text(config.format(steps=STEPS, output=output))
    paths = [str(Path(fastpack.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DISABLE_VERSION_CHECK": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    command = command.replace("PYTHONPATH=.", f"PYTHONPATH=.{os.pathsep}{environment['PYTHONPATH']}")
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (state,) = (folder / output).glob(f"**/checkpoint-{STEPS}/trainer_state.json")
    history = json.loads(state.read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("framework", FROM_FILES, ids=lambda framework: framework.tag)
def test_files_that_a_framework_loads(framework: Framework, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework.package) is None:
        pytest.skip(f"{framework.package.upper()} IS NOT INSTALLED, and can't be beside this suite: {framework.wants}")
    rows = make_rows(ROWS)
    save_tiny_model(rows, tmp_path)
    write_rows(rows, tmp_path)
    (tmp_path / "dataset_info.json").write_text(json.dumps(ROWS_FOR_LLAMAFACTORY))
    name, text, blocks = recipe_of(framework)
    (tmp_path / name).write_text(COUNTING + AT_EXIT + text)
    settings = "".join(line for line in blocks.get("yaml", "").splitlines(True) if not line.startswith("plugins"))

    stock, message = losses_of(framework.stock, framework.config + settings, tmp_path, "stock")
    assert "fastpack:" not in message  # no report: nothing was patched
    patched, message = losses_of(blocks["bash"], framework.config + blocks.get("yaml", ""), tmp_path, "patched")
    assert len(stock) == STEPS
    assert stock[-1] < stock[0]
    assert patched == pytest.approx(stock, rel=1e-5)
    assert re.search(r"attention +│ segments", message)  # the report that the recipe prints
    (attended,) = re.findall(r"fastpack attended (\d+) times", message)
    assert int(attended) >= STEPS * LAYERS  # more where layers are checkpointed
    print(framework.tag, stock, patched, sep="\n")
