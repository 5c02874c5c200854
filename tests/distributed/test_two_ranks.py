"""A step on two ranks is the step of one process on one big batch: DDP and FSDP2, whole and LoRA, checkpointed.

Each rank has other sequences, of other lengths in sum. In float32, within the bound of everything else here.
"""

from __future__ import annotations

from typing import Any

import pytest
from oracle import FLOAT32_BOUND, GPU_FLOAT32_BOUND
from prefix_cases import PROMPTS
from rank_work import (
    LAYERS,
    Case,
    exchanges,
    fail_on_the_second,
    flat_step,
    half_precision,
    nothing_on_one_rank,
    one_step,
    several_steps,
    step_with_prefixes,
    told,
)
from ranks import RankFailedError, Ranks

WRAPS = ("ddp", "fsdp2", "hybrid", "accelerate")
CHECKPOINTING = (None, "non-reentrant", "reentrant", "wrapper")
FEEDS = (("padded left", 1), ("TRL's keywords", 2), ("padded both sides", 2), ("restarting positions", 1))
PRODUCT = [
    Case(wrap, lora, checkpointing, *FEEDS[(i + j + k) % len(FEEDS)])
    for i, wrap in enumerate(WRAPS)
    for j, lora in enumerate((False, True))
    for k, checkpointing in enumerate(CHECKPOINTING)
]


def bound(ranks: Ranks) -> float:
    return FLOAT32_BOUND if ranks.backend == "gloo" else GPU_FLOAT32_BOUND


def name(case: Case) -> str:
    tuned = "lora" if case.lora else "full"
    return f"{case.wrap}, {tuned}, {case.checkpointing}, {case.feed} x {case.micro_batches}"


def fused_calls(case: Case) -> dict[str, int]:
    """The calls in a step if every layer is fast, including those of the recomputation."""
    forwards = case.micro_batches * LAYERS * (1 if case.checkpointing is None else 2)
    return {"project": 2 * forwards, "gated_mlp": forwards, "attend": forwards}


@pytest.mark.parametrize("case", PRODUCT, ids=name)
def test_a_step_is_that_of_one_process(case: Case, ranks: Ranks) -> None:
    for result in ranks.run(one_step, case):
        assert result["error"] <= bound(ranks)
        assert result["calls"] == fused_calls(case)


@pytest.mark.parametrize("case", [Case("none"), Case("ddp", feed="naive"), Case("fsdp2", feed="naive")], ids=name)
def test_the_check_sees_what_is_wrong(case: Case, ranks: Ranks) -> None:
    """Negative controls: gradients that stay on their rank, and sequences that see each other."""
    assert all(result["error"] > 1e-2 for result in ranks.run(one_step, case))


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "mixtral", "gemma2", "deepseek_v3"])
def test_other_families(family: str, ranks: Ranks) -> None:
    """The families have norms of heads, sinks, experts, tied weights, latents."""
    for wrap in ("ddp", "fsdp2"):
        for result in ranks.run(one_step, Case(wrap, family=family)):
            assert result["error"] <= bound(ranks)
            assert result["calls"]["project"] >= 2 * LAYERS


@pytest.mark.parametrize(
    ("wrap", "family", "units", "feed"),
    [
        *(
            (wrap, "roformer", units, feed)
            for wrap, units in (("ddp", "layers"), ("fsdp2", "layers"), ("hybrid", "layers"), ("fsdp2", "projections"))
            for feed in ("padded left", "TRL's keywords")
        ),
        pytest.param("fsdp2", "falcon_h1", "projections", "padded left", marks=pytest.mark.slow),  # most of a minute
        ("fsdp2", "falcon_h1", "projections", "TRL's keywords"),
    ],
)
def test_ranks_run_as_many_groups_of_rows(wrap: str, family: str, units: str, feed: str, ranks: Ranks) -> None:
    """The first rank has three different lengths, the second two, and each call exchanges weights."""
    case = Case(wrap, feed=feed, family=family, units=units, lengths=(7, 1, 19, 1, 33, 5))
    for result in ranks.run(one_step, case):
        assert result["error"] <= bound(ranks)


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_first_version_of_fsdp(lora: bool, checkpointing: str | None, ranks: Ranks) -> None:
    """While a layer runs, its modules have views of its weights, which aren't parameters."""
    for result in ranks.run(one_step, Case("fsdp1", lora, checkpointing)):
        assert result["error"] <= bound(ranks)
        assert result["calls"] == fused_calls(Case("fsdp1", lora, checkpointing))


@pytest.mark.parametrize("loss", [None, "fused"])
def test_modules_without_weights(loss: str | None, ranks: Ranks) -> None:
    """The first version of FSDP holds all weights itself, except while a layer runs."""
    for result in ranks.run(flat_step, Case("flat", loss=loss)):
        assert result["error"] <= bound(ranks)
        assert [message["tier"] for message in result["reports"]] == ["fast", "fast"]
        assert "already wrapped by FSDP" in result["refused"]
        assert "call it before the model is wrapped" in result["refused"]


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_shared_prefixes(wrap: str, checkpointing: str | None, ranks: Ranks) -> None:
    """Each rank shares as many tokens as its own sequences have in common."""
    case = Case(wrap, lora=checkpointing == "reentrant", checkpointing=checkpointing)
    result = ranks.run(step_with_prefixes, case)
    assert [rank["saved"] for rank in result] == [sum(PROMPTS[::2]), sum(PROMPTS[1::2])]
    assert all(rank["error"] <= bound(ranks) for rank in result)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_the_loss_without_logits(wrap: str, lora: bool, ranks: Ranks) -> None:
    for result in ranks.run(one_step, Case(wrap, lora, loss="fused")):
        assert result["error"] <= bound(ranks)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_several_steps(wrap: str, lora: bool, ranks: Ranks) -> None:
    first, second = ranks.run(several_steps, Case(wrap, lora, "non-reentrant", "TRL's keywords", 2), 4)
    assert first["ranks"] == second["ranks"]
    assert first["ranks"] == pytest.approx(first["alone"], rel=bound(ranks))
    assert first["apart"] <= 10 * bound(ranks)
    assert len(set(first["ranks"])) == 4, "it trains"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("wrap", "lora", "checkpointing"),
    [
        ("ddp", False, None),
        ("fsdp2", False, None),
        ("fsdp2", False, "reentrant"),
        ("fsdp2", True, "non-reentrant"),
        ("accelerate", False, "wrapper"),
        ("accelerate", True, None),
    ],
)
def test_no_more_is_exchanged_than_by_the_stock_model(
    wrap: str, lora: bool, checkpointing: str | None, ranks: Ranks
) -> None:
    stock, _ = ranks.run(exchanges, Case(wrap, lora, checkpointing, "padded right", patched=False))
    ours, _ = ranks.run(exchanges, Case(wrap, lora, checkpointing, "padded right"))
    assert ours == stock
    assert sum(ours.values()) > 0


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_half_precision(lora: bool, ranks: Ranks) -> None:
    for result in ranks.run(half_precision, Case("fsdp2", lora)):
        assert 0 < result["patched"] <= 1.5 * result["stock"]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_rank_without_tokens_takes_part(wrap: str, ranks: Ranks) -> None:
    assert max(ranks.run(nothing_on_one_rank, Case(wrap))) <= bound(ranks)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_what_is_said_of_a_wrapped_model(wrap: str, lora: bool, ranks: Ranks) -> None:
    result: dict[str, Any]
    for result in ranks.run(told, Case(wrap, lora)):
        assert result["patched"]
        assert result["report"]["tier"] == "fast"
        assert result["report"]["as_modules"] == {}, "a weight is whole while its layer runs"
        assert result["report"]["projections"] == result["before"]["projections"]
        assert "fastpack" in result["text"]
        assert not [text for text in result["warnings"] if "view" in text], "FSDP2 warns of views"
        assert result["names"]
        assert result["left"] == []
        assert result["tier after"] == "stock"
        assert result["stock again"] <= bound(ranks)
        assert ("DistributedDataParallel" if wrap == "ddp" else "FSDP2") in result["refused"]
        assert result["still stock"]


@pytest.mark.slow
def test_a_rank_that_fails_is_named(ranks: Ranks) -> None:
    """The harness shows the failed rank's trace while the other waits in vain; the next test has new processes."""
    with pytest.raises(RankFailedError, match="rank 1") as caught:
        ranks.run(fail_on_the_second, "on purpose")
    assert "ValueError: on purpose" in str(caught.value)
