"""GRPO over a sharded base on two ranks: completions, updates and what vLLM gets are those over a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_trainers import generated_over, shards_for_generation
from ranks import Ranks
from trainer_cases import furthest

from fastpack.cli import trl_trains_on_cpu

pytestmark = pytest.mark.skipif(
    not (trl_trains_on_cpu() or torch.cuda.is_available()), reason="this TRL's loss needs a GPU"
)


@pytest.mark.parametrize("vllm", [False, True])
def test_as_over_a_whole_base(vllm: bool, ranks: Ranks) -> None:
    """The ranks' longest completions differ in length: a rank that is done must go on moving weights."""
    bound = 1e-4 if ranks.backend == "gloo" else 1e-2
    whole, sharded = (ranks.run(generated_over, sharded=sharded, vllm=vllm) for sharded in (False, True))
    for ours, theirs in zip(sharded, whole, strict=True):
        assert (ours["sharded"] > 0, theirs["sharded"]) == (True, 0)
        assert ours["completions"] == theirs["completions"]
        for mine, other in zip(ours["gradients"], theirs["gradients"], strict=True):
            assert furthest(mine, other) <= bound
        assert len(ours["syncs"]) == len(theirs["syncs"]) == (len(ours["gradients"]) if vllm else 0)
        for mine, other in zip(ours["syncs"], theirs["syncs"], strict=True):
            assert [*mine] == [*other]
            assert furthest(mine, other) <= bound
        # merges go with the gathered weights; the control: into whole ones PEFT adds and subtracts
        assert (ours["drifted"], theirs["drifted"] > 0) == (0, vllm)
    first, second = (result["completions"] for result in whole)
    assert first != second
    if vllm:
        assert furthest(sharded[0]["syncs"][-1], sharded[0]["syncs"][0]) > 10 * bound, "training changes what is sent"
    else:
        assert max(map(len, first)) != max(map(len, second))


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("batching", "set use_transformers_continuous_batching=False"),
        ("own", "code of its own: set use_vllm=False"),
        ("4 bits", "load the base in bfloat16"),
    ],
)
def test_trainers_that_cant_generate(what: str, why: str, checkpoint: Path, ranks: Ranks) -> None:
    for said in ranks.run(shards_for_generation, what, checkpoint if what == "4 bits" else None):
        assert why in said
        assert said.endswith("Nothing was changed.")


def test_the_report_counts_what_still_drifts(ranks: Ranks) -> None:
    """Embeddings are kept whole, so that merges round them: the layers' weights are dropped after each."""
    for said in ranks.run(shards_for_generation, "as trl does"):
        assert "the adapter of 1 layers in bfloat16" in said
