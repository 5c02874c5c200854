"""The notebook runs from its first cell to its last, on a tiny local model and local data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from fastpack.commands import trl_trains_on_cpu
from fastpack.commands.demo.data import make_rows, tiny_llama, train_tokenizer, write_rows

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "sft_quickstart.ipynb"
STEPS = 6
PARAMETERS = """
MODEL = {model!r}
DATASET = {data!r}
MAX_STEPS = {steps}
BATCH_SIZE = 8
MAX_LENGTH = 256
LORA_RANK = 4
LEARNING_RATE = 5e-3
"""


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_outputs_are_not_committed(notebook: Any) -> None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


def test_first_code_cell_installs_only_where_fastpack_is_missing(notebook: Any) -> None:
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    condition, install = first.index('find_spec("fastpack") is None'), first.index("%pip install")
    assert condition < install


@pytest.mark.skipif(not trl_trains_on_cpu(), reason="this TRL's loss needs a GPU")
def test_runs_end_to_end(notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, set_seed

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = make_rows(48)
    tokenizer = train_tokenizer(rows)
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    set_seed(0)
    AutoModelForCausalLM.from_config(tiny_llama(tokenizer, **sizes)).save_pretrained(model)
    data = write_rows(rows, tmp_path)

    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert len(cells) == 1
    cells[0].source = PARAMETERS.format(model=str(model), data=str(data), steps=STEPS)
    patched = next(
        cell for cell in notebook.cells if "fastpack.patch(model)" in cell.source and "print(" in cell.source
    )
    patched.source += "\nreport_of_test = fastpack.report(model).to_dict()"
    notebook.cells.append(
        nbformat.v4.new_code_cell("import json; print(json.dumps({'runs': runs, 'report': report_of_test}))")
    )
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()

    *_, plotted, last = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert any("image/png" in output.get("data", {}) for output in plotted.outputs)
    figures = json.loads(last.outputs[0].text)
    stock, padding_free = figures["runs"]["stock, padded"], figures["runs"]["patched"]
    assert len(stock["loss"]) == STEPS
    assert padding_free["loss"] == pytest.approx(stock["loss"], rel=1e-4)
    assert stock["loss"][-1] < stock["loss"][0]
    assert figures["report"]["rung"] == "fast"
