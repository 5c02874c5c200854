"""Unsloth's variant, with a stand-in for the library, which needs a GPU.

What is proved is what the benchmark hands over, the order of imports, and that a variant of another library that fails
does not end the comparison of the others.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastpack.bench import runner, variant_run
from fastpack.bench.same_losses import compare
from fastpack.bench.settings import RunResult, RunSettings
from fastpack.bench.shapes import SHAPES
from fastpack.bench.unsloth_model import BACKEND
from fastpack.bench.variants import VARIANTS
from fastpack.cli import trl_trains_on_cpu
from fastpack.cli.bench import choose_variants
from fastpack.errors import FastpackError

trains_on_cpu = pytest.mark.skipif(
    not torch.cuda.is_available() and not trl_trains_on_cpu(), reason="this TRL's loss needs a GPU"
)
STAND_IN = """
import sys

EARLY = [name for name in ("transformers", "trl", "peft") if name in sys.modules]
LOADED, ADAPTED = [], []


class FastLanguageModel:
    @staticmethod
    def from_pretrained(model_name, *, dtype, **options):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        LOADED.append(options)
        return AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype), AutoTokenizer.from_pretrained(model_name)

    @staticmethod
    def get_peft_model(model, *, use_gradient_checkpointing, random_state, **options):
        import torch
        from peft import LoraConfig, get_peft_model

        ADAPTED.append(options)
        torch.manual_seed(random_state + 1)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
"""
SMALL = RunSettings("Unsloth", rows=3, steps=1, warmup=2, lengths="17")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture
def unsloth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, imported; the folder that has it is on the path of processes too."""
    (tmp_path / "unsloth.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    for shape in ("tiny", "tiny-moe"):
        monkeypatch.setitem(SHAPES, shape, {**SHAPES[shape], "num_hidden_layers": 2, "vocab_size": 512})
    sys.modules.pop("unsloth", None)
    yield importlib.import_module("unsloth")
    del sys.modules["unsloth"]


@trains_on_cpu
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("shape", "mode", "experts", "modules", "parameters"),
    [
        ("tiny", "full", False, None, None),
        ("tiny", "lora", False, ATTENTION + MLP, None),
        ("tiny-moe", "lora", False, ATTENTION, None),
        ("tiny-moe", "lora", True, ATTENTION, EXPERTS),
    ],
)
def test_it_trains_the_same(
    shape: str, mode: Any, experts: bool, modules: list[str] | None, parameters: list[str] | None, unsloth: Any
) -> None:
    """From the others' base weights, and A and B, although it draws its own."""
    settings = replace(SMALL, shape=shape, mode=mode, lora_experts=experts, checkpointing=True)
    ours = variant_run.run(settings)
    stock = variant_run.run(replace(settings, variant="stock padded"))
    verdict = compare([stock, ours], half=False)
    assert verdict.agree, str(verdict)
    assert verdict.norm_steps == 3
    assert (ours.variant, ours.backend) == ("Unsloth", BACKEND)
    assert [
        {
            "max_seq_length": 17,
            "load_in_4bit": False,
            "full_finetuning": mode == "full",
            "use_gradient_checkpointing": "unsloth",
        }
    ] == unsloth.LOADED
    chosen = [(adapted["target_modules"], adapted["target_parameters"], adapted["r"]) for adapted in unsloth.ADAPTED]
    assert chosen == ([] if modules is None else [(modules, parameters, 16)])


def test_other_adapters_are_refused(unsloth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = unsloth.FastLanguageModel.get_peft_model

    def fewer(model: Any, **options: Any) -> Any:
        return stock(model, **options | {"target_modules": ["q_proj"]})

    monkeypatch.setattr(unsloth.FastLanguageModel, "get_peft_model", fewer)
    with pytest.raises(FastpackError, match=r"Unsloth and PEFT do not adapt the same weights: .*down_proj"):
        variant_run.run(replace(SMALL, shape="tiny", mode="lora"))


@pytest.mark.slow
@trains_on_cpu
@pytest.mark.usefixtures("unsloth")
def test_it_is_imported_first(tmp_path: Path) -> None:
    """In a process of its own; after transformers, this stand-in can't be imported."""
    (tmp_path / "unsloth.py").write_text(STAND_IN.replace("LOADED,", "assert not EARLY, EARLY\nLOADED,"))
    flags = json.dumps(asdict(replace(SMALL, shape="tiny-moe", mode="lora", lora_experts=True, warmup=1)))
    row = RunResult(**runner._run("Unsloth", VARIANTS["Unsloth"].module, flags))
    assert (row.backend, len(row.seconds), len(row.losses)) == (BACKEND, 1, 2)
    with pytest.raises(FastpackError, match=r"AssertionError.*transformers"):
        runner._run("Unsloth", "fastpack.bench.variant_run", flags)


def test_where_it_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_variants(None, on_gpu=False)[1]["Unsloth"] == "needs a GPU"
    reason = "changes TRL's trainer, which --loop plain does without"
    assert choose_variants(None, on_gpu=True, loop="plain")[1]["Unsloth"] == reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_variants(None, on_gpu=True)[1]["Unsloth"] == "unsloth is not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "Unsloth" in choose_variants(None, on_gpu=True)[0]
    with pytest.raises(FastpackError, match="not a variant of --trainer dpo"):
        choose_variants(["Unsloth"], on_gpu=True, trainer="dpo")


def run_all(
    monkeypatch: pytest.MonkeyPatch,
    *rows: RunResult | FastpackError,
    names: Sequence[str] = ("stock padded", "Unsloth", "fastpack"),
) -> runner.Outcome:
    """Return the outcome of variants whose processes end like this."""
    ended = dict(zip(names, rows, strict=True))

    def said(name: str, *_: Any) -> dict[str, Any]:
        if name not in ended:
            return {"ceiling": {"flops": 1e12, "bandwidth": 1e12, "product": "", "device": ""}, "machine": {}}
        row = ended[name]
        if isinstance(row, FastpackError):
            raise row
        return asdict(row)

    monkeypatch.setattr(runner, "_run", said)
    return runner.run_all(RunSettings("", lengths="8", steps=1), names, left_out={}, on_gpu=True)


def made_up(name: str, loss: float = 2.0) -> RunResult:
    return RunResult(name, "kernel", seconds=[1.0], tokens=[9], slots=9, losses=[loss] * 5, gradient_norms=[1.0] * 5)


def test_the_others_go_on_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_all(monkeypatch, made_up("stock padded"), FastpackError("it broke"), made_up("fastpack"))
    assert [row.error for row in result.results] == [None, "it broke", None]
    assert result.verdict.agree
    assert result.verdict.variant == "fastpack"


def test_the_others_go_on_where_it_trains_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_all(monkeypatch, made_up("stock padded"), made_up("Unsloth", 2.5), made_up("fastpack"))
    assert result.results[1].error == "trains another model: the loss of step 1, by 2.5e-01, relative (bound 0.02)"
    assert "tokens_per_second" not in result.to_dict()["variants"][1]
    assert result.verdict.agree
    assert [row.variant for row in result.ran] == ["stock padded", "fastpack"]


def test_others_are_not_compared_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_all(monkeypatch, made_up("Unsloth", 2.5), made_up("fastpack"), names=["Unsloth", "fastpack"])
    assert [row.variant for row in result.results] == ["fastpack", "Unsloth"]
    assert "trains another model" in str(result.results[1].error)
    assert result.verdict.agree


def test_ours_may_not_fail_or_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    with pytest.raises(FastpackError, match="it broke"):
        run_all(monkeypatch, made_up("stock padded"), made_up("Unsloth"), FastpackError("it broke"))
    result = run_all(monkeypatch, made_up("stock padded"), made_up("Unsloth"), made_up("fastpack", 2.5))
    assert not result.verdict.agree
