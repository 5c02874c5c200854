"""Experts spread over the ranks of a mesh: a step is that of one process on one big batch."""

from __future__ import annotations

import pytest
from expert_models import FAMILIES
from expert_ranks_work import both, no_expert_here, order_of_work, refused, spread_step
from oracle import FLOAT32_BOUND, GPU_FLOAT32_BOUND
from ranks import Ranks
from tiny import tiny_model

import fastpack


@pytest.mark.sample(12)
@pytest.mark.parametrize("checkpointing", [None, "non-reentrant", "reentrant"])
@pytest.mark.parametrize("lora", [None, "attention", "experts"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_a_step_is_that_of_one_process(
    halves: bool, family: str, lora: str | None, checkpointing: str | None, ranks: Ranks
) -> None:
    bound = FLOAT32_BOUND if ranks.backend == "gloo" else GPU_FLOAT32_BOUND
    results = ranks.run(spread_step, family, lora, checkpointing=checkpointing, halves=halves)
    for result in results:
        assert result["error"] <= bound < 0.01 * result["control"], result
        layers, passes, parts = 2, 1 if checkpointing is None else 2, 2 if halves else 1
        assert len(result["rows"]) == layers * passes * parts


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_share_batches_too(family: str, ranks: Ranks) -> None:
    bound = FLOAT32_BOUND if ranks.backend == "gloo" else GPU_FLOAT32_BOUND
    assert max(ranks.run(both, family)) <= bound


def test_a_rank_without_rows(ranks: Ranks) -> None:
    """It takes part in the exchanges all the same, and its weights have gradients."""
    if ranks.backend != "gloo":
        pytest.skip("ON A CPU: the sizes are what matters")
    for rank, result in enumerate(ranks.run(no_expert_here)):
        assert result["apart"] <= 1e-6
        assert result["rows"] == [19 if rank == 0 else 0]
        assert result["gradient"]


def test_exchanges_are_under_way_while_experts_run(ranks: Ranks) -> None:
    if ranks.backend != "gloo":
        pytest.skip("ON A CPU: the order is what matters")
    for order in ranks.run(order_of_work):
        three = ["start"] * 3
        waits = ["wait"] * 3
        forward = [*three, *three, *waits, "experts", "start", *waits, "experts", "start", "wait", "wait"]
        assert order[: len(forward)] == forward
        backward = ["start", "start", "wait", "gradients of experts", "start", "wait", "gradients of experts", "start"]
        assert order[len(forward) :] == ["backward", *backward, "wait", "wait"]


def test_what_ranks_cant_share(ranks: Ranks) -> None:
    for said in ranks.run(refused, "qwen3_moe", 5):
        assert "has 5 experts, which 2 ranks can't share equally" in said


def test_a_model_without_experts() -> None:
    with pytest.raises(fastpack.UnsupportedModelError, match="no experts with stacked weights"):
        fastpack.shard_experts(tiny_model("llama"), None)  # type: ignore[arg-type]
