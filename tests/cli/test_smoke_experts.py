"""``fastpack smoke --modes experts``: LoRA on every stack of experts, compared with stock PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_runs import ON_CPU, smoke_main

from fastpack.exactness.tiny import model_types
from fastpack.families.registry import FAMILIES
from fastpack.families.spec import ExpertsSpec
from fastpack.layers import experts as layer
from fastpack.patching import experts as plan
from fastpack.testing import experts, worker
from fastpack.testing.record import Record, Row, Setting

FAST = [
    family.model_type
    for family in FAMILIES.values()
    if family.model_type in model_types() and any(isinstance(spec, ExpertsSpec) for spec in family.fast.values())
]
STOCK = ("jetmoe", "llama4_text", "longcat_flash")
WITHOUT = ("gemma4_text", "dbrx", "llama")
"""Gemma 4 has experts only with a setting, and DBRX has its stacks in matrices."""


def run(model_type: str) -> Row:
    (row,) = worker.rows(model_type, worker.Task((experts.EXPERTS,), "auto", Setting()))
    return row


@pytest.mark.sample(4)
@pytest.mark.parametrize("model_type", sorted({*FAST} - {*WITHOUT}))
def test_adapters_on_experts_are_those_of_stock_peft(model_type: str) -> None:
    row = run(model_type)
    assert (row.verdict, row.problem) == ("exact", None)
    assert row.error is not None
    assert row.error <= experts.BOUND


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", STOCK)
def test_stock_experts_are_left_out_with_a_reason(model_type: str) -> None:
    row = run(model_type)
    assert (row.verdict, row.problem) == ("left out", None)
    assert "no forward for experts of this kind" in (row.left_out or "")
    assert row.error is not None


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", WITHOUT)
def test_models_without_stacks_are_left_out(model_type: str) -> None:
    assert run(model_type).left_out == experts.NO_STACKS


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_a_wrong_scale_of_the_adapters_fails(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = layer.active_update

    def halved(*args: Any) -> Any:
        lora = read(*args)
        return replace(lora, scale=lora.scale / 2)

    monkeypatch.setattr(layer, "active_update", halved)
    assert (run(model_type).problem or "").startswith("not exact")


def test_a_control_that_changes_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "swap_adapters", lambda _: None)
    assert "adapters of two experts swapped" in (run("mixtral").problem or "")


def test_experts_that_run_stock_without_a_word_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "experts_forward", lambda patched, *args, **kwargs: patched.stock(*args, **kwargs))
    assert (run("mixtral").problem or "").startswith("0 of 2 blocks of experts ran fast")


def test_the_mode_on_the_command_line(tmp_path: Path) -> None:
    result = tmp_path / "run.json"
    assert smoke_main(["olmoe", "--modes", "experts", "--backends", "auto", "--json", str(result), *ON_CPU]) == 0
    (row,) = Record.read(result).rows
    assert (row.mode, row.verdict) == ("experts", "exact")
