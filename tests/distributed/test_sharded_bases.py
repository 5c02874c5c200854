"""Adapters over a sharded base on two ranks: completions, updates and what vLLM gets are those over a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import Ranks
from sharded_work import generated_over, images_over, shards_for_generation, step_over
from trainer_cases import furthest

from fastpack.cli import trl_trains_on_cpu

on_trls_trainers = pytest.mark.skipif(
    not (trl_trains_on_cpu() or torch.cuda.is_available()), reason="this TRL's loss needs a GPU"
)


@on_trls_trainers
@pytest.mark.parametrize("vllm", [False, True])
def test_generation(vllm: bool, ranks: Ranks) -> None:
    """The ranks' longest completions differ in length: a rank that is done must go on moving weights."""
    bound = 1e-4 if ranks.backend == "gloo" else 1e-3
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
        assert furthest(sharded[0]["syncs"][-1], sharded[0]["syncs"][0]) > 3 * bound, "training changes what is sent"
    else:
        assert max(map(len, first)) != max(map(len, second))


@on_trls_trainers
@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3", "llava", "qwen3_5_moe"])
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_images(kind: str, model_type: str, ranks: Ranks) -> None:
    """Towers are whole: ``generate`` runs them before the text model. Experts' auxiliary loss is read as before."""
    bound = 1e-5 if ranks.backend == "gloo" else 1e-3
    whole, sharded = (ranks.run(images_over, kind, model_type, sharded=sharded) for sharded in (False, True))
    for ours, theirs in zip(sharded, whole, strict=True):
        assert (ours["sharded"] > 0, theirs["sharded"]) == (True, 0)
        for mine, other in zip(ours["logged"], theirs["logged"], strict=True):
            assert mine == pytest.approx(other, rel=bound, abs=bound)
        for step, expected in zip(ours["gradients"], theirs["gradients"], strict=True):
            assert furthest(step, expected) <= bound
    assert furthest(whole[0]["gradients"][1], whole[0]["gradients"][0]) > 10 * bound, "control: another batch"


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", ["zamba", "zamba2", "kimi_linear"])
def test_layers_of_several_kinds(model_type: str, ranks: Ranks) -> None:
    """Zamba's attention layers share their weights, which stay whole."""
    for ours in ranks.run(step_over, model_type, sharded=True):
        alone = step_over(model_type, sharded=False)
        assert ours["sharded"] > alone["sharded"] == 0
        assert furthest(ours["gradients"], alone["gradients"]) <= (1e-5 if ranks.backend == "gloo" else 1e-3)


@on_trls_trainers
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


@on_trls_trainers
def test_the_report_counts_what_still_drifts(ranks: Ranks) -> None:
    """Embeddings are kept whole, so that merges round them: the layers' weights are dropped after each."""
    for said in ranks.run(shards_for_generation, "as trl does"):
        assert "the adapter of 1 layers in bfloat16" in said
