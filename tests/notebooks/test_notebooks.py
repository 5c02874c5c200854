"""The notebooks run from their first cell to their last, on a tiny local model and local data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from tiny_idefics3 import save_checkpoint
from tiny_idefics3 import write_rows as write_images

from fastpack.cli import trl_trains_on_cpu
from fastpack.cli.demo.data import Row, make_pairs, make_rows, tiny_llama, train_tokenizer, write_rows

FOLDER = Path(__file__).parent.parent.parent / "notebooks"
SFT, DPO, FRAMEWORKS, OPTIONS = "sft_quickstart.ipynb", "dpo_padding_free.ipynb", "frameworks.ipynb", "options.ipynb"
VISION, GRPO = "vision_sft.ipynb", "grpo.ipynb"
STEPS = 6
trains_on_cpu = pytest.mark.skipif(not trl_trains_on_cpu(), reason="this TRL's loss needs a GPU")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / name, as_version=4)


@pytest.mark.parametrize("name", [SFT, DPO, FRAMEWORKS, OPTIONS, VISION, GRPO])
def test_outputs_are_not_committed(name: str) -> None:
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.parametrize("name", [SFT, DPO, FRAMEWORKS, OPTIONS, VISION, GRPO])
def test_first_code_cell_installs_only_where_fastpack_is_missing(name: str) -> None:
    first = next(cell.source for cell in read(name).cells if cell.cell_type == "code")
    condition, install = first.index('find_spec("fastpack") is None'), first.index("%pip install")
    assert condition < install


def save_tiny_model(rows: list[Row], folder: Path) -> Path:
    """Save a tiny Llama with a tokenizer trained on the rows, and return where."""
    from transformers import AutoModelForCausalLM, set_seed

    tokenizer = train_tokenizer(rows)
    model = folder / "model"
    tokenizer.save_pretrained(model)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    set_seed(0)
    AutoModelForCausalLM.from_config(tiny_llama(tokenizer, **sizes)).save_pretrained(model)
    return model


def with_parameters(name: str, rows: list[Row], folder: Path, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> Any:
    """Return the notebook with these parameters, a tiny model and these rows in its cell of parameters."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save, write = (save_checkpoint, write_images) if name == VISION else (save_tiny_model, write_rows)
    parameters = {"MODEL": str(save(rows, folder)), "DATASET": str(write(rows, folder)), "MAX_STEPS": STEPS, **kwargs}

    return read_with(name, parameters)


def read_with(name: str, parameters: dict[str, Any]) -> Any:
    """Return the notebook with these parameters in its cell of parameters, and no other."""
    notebook = read(name)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    assert {line.split(" = ")[0] for line in cell.source.splitlines()} == parameters.keys()
    cell.source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    return notebook


def execute(notebook: Any, folder: Path) -> None:
    """Run its cells in this folder, from the first to the last."""
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()


def run(
    name: str,
    rows: list[Row],
    patching: str,
    reported: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run a notebook with these parameters, and give what ``told`` says at its end.

    ``patching`` is what the cell holds that patches; its report is kept.
    """
    notebook = with_parameters(name, rows, folder, monkeypatch, **kwargs)
    patched = next(cell for cell in notebook.cells if patching in cell.source and "print(" in cell.source)
    patched.source += f"\nreport_of_test = fastpack.report({patching.split('(')[1]}.to_dict()"
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json; print(json.dumps({reported}))"))
    execute(notebook, folder)

    *_, plotted, last = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert any("image/png" in output.get("data", {}) for output in plotted.outputs)
    nbformat.write(notebook, folder / name)
    figures: dict[str, Any] = json.loads(last.outputs[0].text)
    return figures


@pytest.mark.slow
@trains_on_cpu
def test_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"BATCH_SIZE": 8, "MAX_LENGTH": 256, "LORA_RANK": 4, "LEARNING_RATE": 5e-3}
    reported = "{'runs': runs, 'report': report_of_test}"
    figures = run(SFT, make_rows(48), "fastpack.patch(model)", reported, tmp_path, monkeypatch, **kwargs)
    stock, padding_free = figures["runs"]["stock, padded"], figures["runs"]["patched"]
    assert len(stock["loss"]) == STEPS
    assert padding_free["loss"] == pytest.approx(stock["loss"], rel=1e-4)
    assert stock["loss"][-1] < stock["loss"][0]
    assert figures["report"]["tier"] == "fast"


@pytest.mark.slow
@trains_on_cpu
def test_dpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"PAIRS": 8, "MAX_LENGTH": 256, "LORA_RANK": 4, "LEARNING_RATE": 5e-3, "BETA": 0.1}
    reported = "{'runs': runs, 'report': report_of_test, 'apart': [loss_apart, margin_apart], 'counts': [real, slots]}"
    figures = run(DPO, make_pairs(48), "fastpack.patch(trainer)", reported, tmp_path, monkeypatch, **kwargs)
    stock, padding_free = figures["runs"]["stock, padded"], figures["runs"]["patched"]
    assert len(stock["loss"]) == STEPS
    assert padding_free["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    assert padding_free["logps"] == pytest.approx(stock["logps"], rel=1e-6)
    assert figures["apart"][1] <= 1e-6
    assert stock["margin"][0] == 0 != stock["margin"][-1]
    assert figures["report"]["tier"] == "fast"
    real, slots = figures["counts"]
    assert 0.3 < 1 - real / slots < 0.8
    assert figures["runs"]["patched"]["num_tokens"] == real  # what was counted is what was trained on


@pytest.mark.slow
@trains_on_cpu
def test_vision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"BATCH_SIZE": 8, "LORA_RANK": 4, "LEARNING_RATE": 5e-3}
    reported = "{'runs': runs, 'report': report_of_test, 'rows': rows, 'counts': [real, slots]}"
    figures = run(VISION, make_rows(48), "fastpack.patch(model)", reported, tmp_path, monkeypatch, **kwargs)
    stock, patched = figures["runs"]["stock, padded"], figures["runs"]["patched"]
    assert len(stock["loss"]) == STEPS
    assert patched["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    assert stock["loss"][-1] < stock["loss"][0]
    assert figures["report"]["tier"] == "fast"
    real, slots = figures["counts"]
    assert 0.2 < 1 - real / slots < 0.8
    assert len({images for images, _, _ in figures["rows"]}) > 2, "images have many sizes"


def grpo(folder: Path, monkeypatch: pytest.MonkeyPatch, further: str = "", **kwargs: Any) -> dict[str, Any]:
    """Run the notebook on GRPO with these parameters and further code before its trainer, and return its results."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sizes = {"PROMPTS": 4, "COMPLETIONS": 4, "MAX_COMPLETION_LENGTH": 24, "REPLAYED": 3}
    notebook = read_with(GRPO, {**sizes, **kwargs})
    before = next(i for i, cell in enumerate(notebook.cells) if "def make_trainer(" in cell.source)
    notebook.cells.insert(before, nbformat.v4.new_code_cell(further))
    reported = "{'runs': runs, 'learning': learning, 'padding': padding, 'notes': fastpack.report(trainer).notes}"
    undone = next(cell for cell in notebook.cells if cell.source.startswith("fastpack.unpatch("))
    undone.source = f"import json\nprint(json.dumps({reported}))\n{undone.source}"
    execute(notebook, folder)
    nbformat.write(notebook, folder / GRPO)

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    reported, patched = undone.outputs[0].text.splitlines()
    assert patched == "False"
    figures: dict[str, Any] = json.loads(reported)
    stock, ours = figures["runs"]["stock"], figures["runs"]["patched"]
    assert len(stock["loss"]) == 3
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-5, abs=1e-6)
    assert ours["norm"] == pytest.approx(stock["norm"], rel=1e-5)
    assert min(stock["norm"]) > 0
    steps = kwargs["MAX_STEPS"]
    assert any(note.startswith(f"prefixes: shared in {steps} of {steps} batches") for note in figures["notes"])
    assert any(note.startswith(f"loss: log-probabilities fused with the head in {steps} ") for note in figures["notes"])
    return figures


@pytest.mark.slow
@trains_on_cpu
def test_grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model of the notebook itself learns its task."""
    figures = grpo(tmp_path, monkeypatch, MODEL="tiny", MAX_STEPS=24, LORA_RANK=0, LEARNING_RATE=3e-3)
    learning = figures["learning"]
    assert learning[0] < 0.6
    assert sum(learning[-5:]) / 5 > 0.85
    assert 0.1 < figures["padding"] < 0.8


@pytest.mark.slow
@trains_on_cpu
def test_grpo_on_a_chat_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts are chats; a model with random weights gets another reward, since it never adds up."""
    checked = """
texts = ("7 + 5 is 12\\n#### 12", "#### 1,204.", "12 or 13", "")
assert [right_answer(text, answer) for text, answer in zip(texts, (12, 1204, 12, 0))] == [1, 1, 0, 0]
for row in dataset:
    question = row["prompt"][-1]["content"]
    a, b, c, *d = [int(number) for number in re.findall(r"\\d+", question)]
    result = a * b - c if " buys " in question else a + b * c if " has " in question else a * b + c * d[0]
    assert row["answer"] == result
assert check is right_answer
check = lambda text, answer: len(text) % 7 / 7
"""
    model = str(save_tiny_model(make_rows(48), tmp_path))
    grpo(tmp_path, monkeypatch, checked, MODEL=model, MAX_STEPS=4, LORA_RANK=4, LEARNING_RATE=1e-3)


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook itself compares the losses of every option with the stock model's, and stops where they differ."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sizes = {"HIDDEN_SIZE": 64, "LAYERS": 2, "VOCABULARY": 256, "GROUPS": 2, "STEPS": 4}
    notebook = read_with(OPTIONS, sizes)
    execute(notebook, tmp_path)

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert "loss: fused in training" in text
    assert "prefixes: on" in text
    assert "graphs: off" in text
    assert "shared prefixes  " in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
