"""Experts spread over the ranks of a mesh: a step is that of one process on one big batch."""

from __future__ import annotations

import pytest
from expert_models import FAMILIES
from expert_ranks_work import (
    asks_in_fsdp2,
    both,
    generated,
    kept_by_a_checkpoint,
    no_expert_here,
    order_of_work,
    refused,
    spread_step,
    watched_by_anomaly_detection,
)
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
        assert len(result["choices"]) == layers * passes * parts
        known = [choices is not None for choices in result["choices"]]
        assert all(known) if checkpointing is None else not any(known), "counted where rows are kept, and only there"
        assert result["asked"] == 1, "once in a forward, not in each layer"


def test_over_many_ranks_rows_are_counted(ranks: Ranks) -> None:
    """In every pass, since memory for all choices would be many times what is needed."""
    for result in ranks.run(spread_step, "qwen3_moe", None, checkpointing="non-reentrant", uncounted=1):
        assert len(result["choices"]) == 4
        assert None not in result["choices"]


def test_four_ranks(four: Ranks) -> None:
    """Each has one of the four experts, and sequences of other lengths."""
    bound = FLOAT32_BOUND if four.backend == "gloo" else GPU_FLOAT32_BOUND
    for result in four.run(spread_step, "qwen3_moe", "experts", checkpointing="non-reentrant", halves=True):
        assert result["error"] <= bound < 0.01 * result["control"], result


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_share_batches_too(family: str, ranks: Ranks) -> None:
    bound = FLOAT32_BOUND if ranks.backend == "gloo" else GPU_FLOAT32_BOUND
    assert max(ranks.run(both, family)) <= bound


@pytest.mark.parametrize("tokens", [(5, 5), (0, 5), (1, 6), (1, 1), (0, 0), (3, 8)])
@pytest.mark.parametrize(("halves", "part"), [(False, 99), (True, 99), (True, 2)], ids=["whole", "halves", "parts"])
def test_ranks_without_tokens_or_experts(halves: bool, part: int, tokens: tuple[int, int], ranks: Ranks) -> None:
    """They take part in the exchanges all the same."""
    if ranks.backend != "gloo":
        pytest.skip("ON A CPU: the sizes are what matters")
    real = sum(2 * count - (count > 1) for count in tokens)
    for rank, result in enumerate(ranks.run(no_expert_here, tokens, halves, part)):
        assert result["apart"] <= 1e-5
        assert result["choices"] == (real if rank == 0 else 0)
        assert result["calls"] == (max(1, sum(tokens) // part) + 1 if halves else 1)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_stands_for_gradients_is_no_anomaly(ranks: Ranks) -> None:
    if ranks.backend != "gloo":
        pytest.skip("ON A CPU: what is in new memory is what matters")
    assert max(ranks.run(watched_by_anomaly_detection)) <= 1e-5


def test_checkpoints_keep_nothing_that_came(ranks: Ranks) -> None:
    if ranks.backend != "gloo":
        pytest.skip("ON A CPU: what is kept is what matters")
    assert ranks.run(kept_by_a_checkpoint, keeps=False) == [0, 0]
    assert min(ranks.run(kept_by_a_checkpoint, keeps=True)) > 0, "the control"


def test_exchanges_are_under_way_while_experts_run(ranks: Ranks) -> None:
    if ranks.backend != "gloo":
        pytest.skip("ON A CPU: the order is what matters")
    forward = ["start"] * 4 + ["wait"] * 2  # weights and choices, and halves of the tokens
    forward += ["wait", "experts"] * 2 + ["last matmul", "start sums"] * 2 + ["wait"] * 2
    backward = ["start"] * 2 + ["wait", "gradients of experts", "start sums"] * 2
    backward += ["start sums"] + ["wait"] * 3  # of weights, too
    for order in ranks.run(order_of_work):
        assert order == [*forward, "backward", *backward]


@pytest.mark.parametrize("spread", [False, True])
def test_fsdp2s_shards_are_not_spread_experts(spread: bool, ranks: Ranks) -> None:
    """It asks once in a forward if they are, and never if they are not."""
    assert ranks.run(asks_in_fsdp2, spread=spread) == [int(spread)] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_generation(family: str, ranks: Ranks) -> None:
    """A rank whose sequences have ended goes on exchanging tokens until the other's have."""
    first, second = whole = ranks.run(generated, family, spread=False)
    assert ranks.run(generated, family, spread=True) == whole
    assert len(first[0]) != len(second[0]), "else none waits"


def test_what_ranks_cant_share(ranks: Ranks) -> None:
    for said in ranks.run(refused, "qwen3_moe", 5):
        assert "has 5 experts, which 2 ranks can't share equally" in said


def test_a_model_without_experts() -> None:
    with pytest.raises(fastpack.UnsupportedModelError, match="no experts with stacked weights"):
        fastpack.shard_experts(tiny_model("llama"), None)  # type: ignore[arg-type]
