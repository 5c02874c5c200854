"""TRL's trainers on two ranks with DDP and accelerate's FSDP2: each step's loss and gradients equal one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from rank_trainers import (
    EXAMPLES,
    FSDP2,
    STEPS,
    grpo_update,
    of_4_bits,
    part_of_a_run,
    plain_trainer,
    refused_shards,
    refused_trainer,
    train,
    train_on_ranks,
    trainer_of,
)
from ranks import Ranks
from sft_cases import rows
from tiny import VOCAB, tiny_model
from trainer_cases import furthest

import fastpack
from fastpack.cli import trl_trains_on_cpu

WRAPS: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({}, "DistributedDataParallel"),
    "fsdp2": (FSDP2, "FSDP"),
}
pytestmark = pytest.mark.skipif(
    not (trl_trains_on_cpu() or torch.cuda.is_available()), reason="this TRL's loss needs a GPU"
)


def bound_of(ranks: Ranks) -> float:
    return 3e-5 if ranks.backend == "gloo" else 1e-3


def assert_agree(ours: list[Any], theirs: list[Any], ranks: Ranks) -> None:
    """Check what two runs logged, step by step."""
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(expected, rel=bound_of(ranks))


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, bool], list[tuple[float, float]]]:
    """The logs of the stock trainer in one process."""
    return {(kind, lora): train(trainer_of(kind, lora, 1, False)) for kind in ("sft", "dpo") for lora in (False, True)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_as_in_one_process(kind: str, lora: bool, wrap: str, alone: Any, ranks: Ranks) -> None:
    further, wrapper = WRAPS[wrap]
    checkpointing = {"gradient_checkpointing": True} if lora else {}
    for result in ranks.run(train_on_ranks, kind, lora, **checkpointing, **further):
        assert result["world"] == 2
        assert result["wrapped"].startswith(wrapper)
        assert (result["tier"], result["as_modules"], result["tier after"]) == ("fast", {}, "stock")
        assert len(result["logged"]) == STEPS
        assert_agree(result["logged"], alone[kind, lora], ranks)
    assert len(set(alone[kind, lora])) == STEPS, "it trains"
    assert alone[kind, lora][1] != pytest.approx(alone[kind, not lora][1], rel=1e-3), "the check sees another model"


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_fused_loss(lora: bool, wrap: str, alone: Any, ranks: Ranks) -> None:
    """Its metrics cover all ranks. If accelerate makes the head an FSDP unit of its own, TRL's loss runs."""
    further, _ = WRAPS[wrap]
    stock = ranks.run(train_on_ranks, "sft", lora, **further)
    for result, trls in zip(ranks.run(train_on_ranks, "sft", lora, loss="fused", **further), stock, strict=True):
        if wrap == "ddp":
            assert result["of loss"] == [f"loss: fused in {STEPS} micro-batches so far, with TRL's metrics"]
        else:
            assert "it carries hooks" in result["of loss"][-1]
        assert len(result["logged"]) == STEPS
        assert_agree(result["logged"], alone["sft", lora], ranks)
        assert_agree(result["metrics"], trls["metrics"], ranks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_auxiliary_loss_of_experts(steps: int, ranks: Ranks) -> None:
    """It is a mean over micro-batches and ranks, in the fused loss as in TRL's; the last run is the control."""
    experts = {"model_type": "mixtral", "router_aux_loss_coef": 0.5, "gradient_accumulation_steps": steps}
    experts["per_device_train_batch_size"] = 4 // steps
    stock, ours = (ranks.run(train_on_ranks, "sft", False, loss=loss, **experts) for loss in (None, "fused"))
    other = ranks.run(train_on_ranks, "sft", False, loss="fused", **{**experts, "router_aux_loss_coef": 0.45})
    bound = bound_of(ranks)
    for result, trls, control in zip(ours, stock, other, strict=True):
        assert result["of loss"] == [f"loss: fused in {steps * STEPS} micro-batches so far, with TRL's metrics"]
        assert all(entry[-1] > 0 for entry in trls["metrics"])
        for name in ("logged", "metrics"):
            for mine, theirs in zip(result[name], trls[name], strict=True):
                assert mine == pytest.approx(theirs, rel=bound)
        assert control["logged"][0] != pytest.approx(trls["logged"][0], rel=bound)


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_sharded_base(kind: str, keep: int, alone: Any, ranks: Ranks) -> None:
    """Each rank has its half of the frozen weights, and all of the adapters, whose gradients DDP averages."""
    for rank, result in enumerate(ranks.run(train_on_ranks, kind, True, keep=keep, gradient_checkpointing=True)):
        assert result["saved"] == ([result["trained"]] if rank == 0 else [])
        assert (result["world"], result["wrapped"]) == (2, "DistributedDataParallel")
        assert (result["tier"], result["as_modules"], result["tier after"]) == ("fast", {}, "stock")
        own, every = result["sharded"]
        assert own == pytest.approx(every / 2, rel=0.01), "some sizes are odd"
        assert_agree(result["logged"], alone[kind, True], ranks)


IN_4_BITS: dict[str, dict[str, Any]] = {
    "patched": {},
    "stock": {"patched": False},
    "evaluated before": {"evaluated": True},
    "stock, evaluated before": {"patched": False, "evaluated": True},
    "the head, too": {"llm_int8_skip_modules": ["none"]},
    "stored as bfloat16": {"bnb_4bit_quant_storage": torch.bfloat16},
}


@pytest.mark.parametrize("how", IN_4_BITS)
def test_gradients_over_a_sharded_base_in_4_bits(how: str, checkpoint: Path, ranks: Ranks) -> None:
    """The packed weights are plain tensors to FSDP2; their layers keep what unpacks them, for bitsandbytes, too."""
    settings = IN_4_BITS[how]
    of_model = {name: value for name, value in settings.items() if name.startswith(("bnb", "llm"))}
    stock = of_4_bits(checkpoint, sharded=False, **of_model)
    for result in ranks.run(of_4_bits, checkpoint, sharded=True, **settings):
        assert result["tier"] == ("fast" if settings.get("patched", True) else "stock")
        assert furthest(result["gradients"], stock["gradients"]) <= (1e-5 if ranks.backend == "gloo" else 1e-3)
        if how != "stored as bfloat16":
            head = 64 * VOCAB // 2 if how == "the head, too" else 0
            assert (result["own"], result["sharded"]) == ((stock["packed"] - head) // 2, stock["packed"] - head)
    control = of_4_bits(checkpoint, sharded=False, shares=(0,), **of_model)
    assert furthest(control["gradients"], stock["gradients"]) > 0.1, "one rank's batch alone"


@pytest.mark.parametrize("loss", [None, "fused"])
def test_a_sharded_base_in_4_bits(loss: str | None, checkpoint: Path, alone: Any, ranks: Ranks) -> None:
    """TRL trains adapters on 4-bit weights in bfloat16."""
    stock = train(trainer_of("sft", True, 1, False, in_4bit=checkpoint))
    shared: dict[str, Any] = {"in_4bit": checkpoint, "loss": loss, "gradient_checkpointing": True}
    for rank, result in enumerate(ranks.run(train_on_ranks, "sft", True, keep=0, **shared)):
        assert result["saved"] == ([result["trained"]] if rank == 0 else [])
        assert (result["tier"], result["as_modules"], result["tier after"]) == ("fast", {}, "stock")
        own, every = result["sharded"]
        assert own == pytest.approx(every / 2, rel=0.01)
        for ours, theirs in zip(result["logged"], stock, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-2)
    assert stock[0] != pytest.approx(alone["sft", True][0], rel=1e-2), "the check sees another model"


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("full", "everything trains"),
        ("lora", "is sharded already"),
        ("experts", "no weight of bitsandbytes' Linear4bit"),
    ],
)
def test_bases_that_cant_be_sharded(what: str, why: str, ranks: Ranks) -> None:
    for said in ranks.run(refused_shards, what):
        assert why in said
        assert said.endswith("Nothing was changed.")


def test_one_process_has_nothing_to_shard() -> None:
    with pytest.raises(fastpack.PatchError, match="there is one process"):
        fastpack.shard_base(tiny_model("llama"))


ZERO3: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
"""Every weight is partitioned, however small."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_zero3(kind: str, lora: bool, alone: Any, ranks: Ranks) -> None:
    """DeepSpeed itself, inside the trainer. Its hooks bring weights, so that modules are called, not their weights."""
    pytest.importorskip("deepspeed")
    checkpointing = {"gradient_checkpointing": True} if lora else {}
    for result in ranks.run(train_on_ranks, kind, lora, deepspeed=ZERO3, **checkpointing):
        assert (result["world"], result["wrapped"]) == (2, "DeepSpeedEngine")
        assert (result["tier"], result["tier after"]) == ("fast", "stock")
        assert result["as_modules"], "partitioned weights are never read"
        assert_agree(result["logged"], alone[kind, lora], ranks)


SPREAD: dict[str, Any] = {
    **FSDP2,
    "per_device_train_batch_size": EXAMPLES,
    "parallelism_config": ParallelismConfig(cp_size=2),
}
"""Both ranks get the batches of one process, and share them."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("loss", [None, "fused"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_context_parallelism(kind: str, lora: bool, loss: str | None, alone: Any, ranks: Ranks) -> None:
    """Asked for by accelerate's config, it is ours: torch's would drop masks, and TRL's DPO would sum up shares."""
    for result in ranks.run(train_on_ranks, kind, lora, loss=loss, **SPREAD):
        spread = next(note for note in result["notes"] if note.startswith("context parallelism"))
        batches = 2 * STEPS if (kind, lora) == ("dpo", True) else STEPS  # the reference is the same model, without LoRA
        assert spread == f"context parallelism: each batch is spread over 2 ranks, {batches} batches so far"
        assert (result["tier"], result["tier after"]) == ("fast", "stock")
        assert_agree(result["logged"], alone[kind, lora], ranks)


def test_streamed_batches(ranks: Ranks) -> None:
    """In TRL's trainers each rank reads the stream; transformers' own has one rank read it and deal the rows."""
    stock = train(trainer_of("sft", False, 1, False, streams=True))
    for result in ranks.run(train_on_ranks, "sft", False, streams=True, **SPREAD):
        assert_agree(result["logged"], stock, ranks)
    for said, tier in ranks.run(refused_trainer, "streamed"):
        assert "deals the rows of a streamed data set to all ranks" in said
        assert said.endswith("Nothing was changed.")
        assert tier == "stock"


def test_after_torchs_context_parallelism(ranks: Ranks) -> None:
    """Torch has rerouted attention by then; TRL's precomputing of a reference prepares a model before it trains."""
    for said, tier in ranks.run(refused_trainer, "prepared"):
        assert "has set up torch's context parallelism already. Patch before the first trainer.train()" in said
        assert said.endswith("Nothing was changed.")
        assert tier == "stock"


RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({}, {"alone": True}),
    "a sharded base": ({"keep": 1}, {"alone": True}),
    "accumulation": (
        {},
        {"alone": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": EXAMPLES // 2},
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", RESUMED)
def test_resumed_in_one_process(how: str, alone: Any, ranks: Ranks, tmp_path: Path) -> None:
    """With as many examples a step, a run that resumes on fewer ranks sees each once, and goes on as it would have."""
    first, then = RESUMED[how]
    began = ranks.run(part_of_a_run, str(tmp_path), True, stop=1, **first)
    ended = ranks.run(part_of_a_run, str(tmp_path), True, resumed=1, **then)[:1]
    check_resumed(began, ended, alone["sft", True], ranks)


def test_resumed_with_another_number_of_examples_a_step(ranks: Ranks, tmp_path: Path) -> None:
    """The control: transformers counts steps, so that half as many examples a step are seen twice."""
    began = ranks.run(part_of_a_run, str(tmp_path), True, stop=1)
    ended = ranks.run(part_of_a_run, str(tmp_path), True, resumed=1, alone=True, per_device_train_batch_size=4)[:1]
    seen = [row for result in (*began, *ended) for step in result["rows"] for row in step]
    assert len({*seen}) < len(seen)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_spread_batches_resumed_on_other_ranks(
    lora: bool, alone: Any, ranks: Ranks, four: Ranks, tmp_path: Path
) -> None:
    """Two ranks share each batch; then two pairs of ranks share one half each, and the other way round."""
    shards = {"fsdp_config": {**FSDP2["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}}
    of_two, of_four = ({**SPREAD, **shards} for _ in range(2))
    of_four |= {"per_device_train_batch_size": EXAMPLES // 2}
    of_four |= {"parallelism_config": ParallelismConfig(cp_size=2, dp_shard_size=2)}
    for before, then, first, second in ((ranks, four, of_two, of_four), (four, ranks, of_four, of_two)):
        folder = str(tmp_path / str(before.world))
        began = before.run(part_of_a_run, folder, lora, stop=1, **first)[::2]
        ended = then.run(part_of_a_run, folder, lora, resumed=1, **second)[::2]
        check_resumed(began, ended, alone["sft", lora], ranks)


def check_resumed(began: list[dict[str, Any]], ended: list[dict[str, Any]], whole: list[Any], ranks: Ranks) -> None:
    """Compare what two parts of a run saw and logged with the data and with a whole run."""
    seen = [row for result in (*began, *ended) for step in result["rows"] for row in step]
    assert sorted(seen) == sorted(map(tuple, rows(EXAMPLES * STEPS)["input_ids"])), "each example once"
    for result in ended:
        assert len(result["logged"]) == STEPS
        assert_agree(result["logged"], whole, ranks)


@pytest.mark.parametrize("padding_free", [False, True])
def test_metrics_and_evaluation_of_spread_batches(padding_free: bool, ranks: Ranks) -> None:
    """Tokens that both ranks see count once, and so do labels over accumulated micro-batches."""
    further = {"padding_free": padding_free, "max_length": None}
    further |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    stock = trainer_of("sft", True, 1, False, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    logged = train(stock)
    entries = [entry for entry in stock.state.log_history if "loss" in entry]
    eval_loss = stock.evaluate(stock.train_dataset)["eval_loss"]
    for loss in (None, "fused"):
        for result in ranks.run(train_on_ranks, "sft", True, loss=loss, evaluated=True, **{**SPREAD, **further}):
            bound = bound_of(ranks)
            assert result["eval"] == pytest.approx(eval_loss, rel=bound)
            assert [step[0] for step in result["logged"]] == pytest.approx([step[0] for step in logged], rel=bound)
            for ours, entry in zip(result["metrics"], entries, strict=True):
                theirs = [entry.get(name, 0.0) for name in ("entropy", "mean_token_accuracy", "num_tokens")]
                assert ours[:3] == pytest.approx(theirs, rel=bound)


@pytest.mark.parametrize("fused", [False, True])
def test_grpos_update_of_spread_batches(fused: bool, ranks: Ranks) -> None:
    """TRL refuses accelerate's context parallelism in GRPO; who gives the ranks the same rollouts can spread them."""
    settings: dict[str, Any] = {"fused": fused, "beta": 0.1, "num_iterations": 2, "max_steps": 4}
    stock = ranks.run(grpo_update, spread=False, **settings)[0]
    for result in ranks.run(grpo_update, spread=True, **settings):
        assert result["world"] == 1
        assert "spread over 2 ranks" in result["notes"][0]
        assert result["losses"] == pytest.approx(stock["losses"], abs=1e-5)
        steps = zip(result["gradients"], stock["gradients"], strict=True)
        assert max(furthest(ours, theirs) for ours, theirs in steps) <= (1e-4 if ranks.backend == "gloo" else 1e-3)
    assert furthest(*stock["gradients"][:2]) > 1e-2, "the control: another step's"


@pytest.mark.parametrize("loss", [None, "fused"])
@pytest.mark.parametrize("average", [True, False])
def test_transformers_own_trainer_with_spread_batches(average: bool, loss: str | None, ranks: Ranks) -> None:
    """It multiplies the auxiliary loss, too, and cuts the last batch of an evaluation to the rows that there are."""
    stock = ranks.run(plain_trainer, spread=False, average=average)[0]
    bound = bound_of(ranks)
    for result in ranks.run(plain_trainer, spread=True, average=average, loss=loss):
        for ours, theirs in zip(result["logged"], stock["logged"], strict=True):
            assert ours == pytest.approx(theirs, rel=bound)
        assert result["eval"] == pytest.approx(stock["eval"], rel=bound)
        assert result["tokens"] == stock["tokens"]
