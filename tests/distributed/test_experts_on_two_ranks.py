"""Experts on two ranks: a step is that of one process on one big batch, whole and LoRA, DDP and FSDP."""

from __future__ import annotations

from typing import Any

import pytest
from expert_models import FAMILIES
from oracle import FLOAT32_BOUND, GPU_FLOAT32_BOUND
from rank_work import LAYERS, Case, exchanges, nothing_on_one_rank, one_step, several_steps, told
from ranks import Ranks

TUNED = pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
CASES = [
    Case(wrap, lora, checkpointing, feed, micro, family=family, units=units, experts=True)
    for wrap, checkpointing, feed, micro, family, units in (
        ("ddp", None, "padded left", 1, "qwen3_moe", "layers"),
        ("ddp", "reentrant", "TRL's keywords", 2, "gpt_oss", "layers"),
        ("fsdp2", None, "TRL's keywords", 2, "gpt_oss", "layers"),
        ("fsdp2", "non-reentrant", "padded left", 1, "qwen3_moe", "experts"),
        ("fsdp2", "reentrant", "restarting positions", 1, "gpt_oss", "experts"),
        ("hybrid", "wrapper", "padded both sides", 2, "qwen3_moe", "layers"),
        ("accelerate", "non-reentrant", "padded left", 1, "gpt_oss", "layers"),
        ("fsdp1", None, "padded left", 1, "qwen3_moe", "layers"),
    )
    for lora in (False, True)
]


def bound(ranks: Ranks) -> float:
    return FLOAT32_BOUND if ranks.backend == "gloo" else GPU_FLOAT32_BOUND


def name(case: Case) -> str:
    tuned = "lora" if case.lora else "whole"
    return f"{case.wrap}, {tuned}, {case.checkpointing}, {case.family}, units of {case.units}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_step_is_that_of_one_process(case: Case, ranks: Ranks) -> None:
    forwards = case.micro_batches * LAYERS * (1 if case.checkpointing is None else 2)
    for result in ranks.run(one_step, case):
        assert result["error"] <= bound(ranks)
        assert result["calls"]["experts"] == result["calls"]["attend"] == forwards


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_the_check_sees_what_is_wrong(wrap: str, ranks: Ranks) -> None:
    """The control: sequences that see each other."""
    case = Case(wrap, True, feed="naive", family="qwen3_moe", experts=True)
    assert all(result["error"] > 1e-2 for result in ranks.run(one_step, case))


@TUNED
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_several_steps(wrap: str, lora: bool, ranks: Ranks) -> None:
    case = Case(wrap, lora, "non-reentrant", "TRL's keywords", 2, family="gpt_oss", experts=True)
    first, second = ranks.run(several_steps, case, 4)
    assert first["ranks"] == second["ranks"]
    assert first["ranks"] == pytest.approx(first["alone"], rel=bound(ranks))
    assert first["apart"] <= 10 * bound(ranks)
    assert len(set(first["ranks"])) == 4, "it trains"


@TUNED
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_rank_whose_experts_get_no_token(wrap: str, lora: bool, ranks: Ranks) -> None:
    """Every weight has a gradient there, too, or ranks would wait for each other."""
    case = Case(wrap, lora, family="qwen3_moe", experts=True)
    assert max(ranks.run(nothing_on_one_rank, case)) <= bound(ranks)


@pytest.mark.parametrize("units", ["layers", "experts"])
def test_no_more_is_exchanged_than_by_the_stock_model(units: str, ranks: Ranks) -> None:
    """Torch's counter can't follow PEFT's own forward, so this is without LoRA."""
    settings: dict[str, Any] = {"family": "gpt_oss", "units": units, "experts": True}
    stock, _ = ranks.run(exchanges, Case("fsdp2", feed="padded right", patched=False, **settings))
    ours, _ = ranks.run(exchanges, Case("fsdp2", feed="padded right", **settings))
    assert ours == stock
    assert sum(ours.values()) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("units", ["layers", "experts"])
def test_what_is_said_of_a_wrapped_model(units: str, family: str, ranks: Ranks) -> None:
    result: dict[str, Any]
    for result in ranks.run(told, Case("fsdp2", True, family=family, units=units, experts=True)):
        assert result["patched"]
        assert result["report"]["tier"] == "fast"
        assert result["report"]["swapped"]["experts"] == LAYERS
        assert result["report"]["as_modules"] == {}
        assert not [what for what, _ in result["report"]["skipped"] if what.endswith("Experts")]
        assert not [text for text in result["warnings"] if "view" in text], "FSDP2 warns of views"
        assert result["names"]
        assert result["left"] == []
        assert result["stock again"] <= bound(ranks)
