"""Token budgets on two ranks: uneven micro-batches give the gradient of one big batch in one process."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_trainers import FSDP2, generated_within, one_step_within
from ranks import Ranks
from trainer_cases import BUILD, DATA, Gradients, furthest

from fastpack import TokenBudget
from fastpack.cli import trl_trains_on_cpu

pytestmark = pytest.mark.skipif(
    not (trl_trains_on_cpu() or torch.cuda.is_available()), reason="this TRL's loss needs a GPU"
)
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sft, ddp": ("sft", 60, {}),
    "sft, fsdp2": ("sft", 60, FSDP2),
    "dpo, ddp": ("dpo", 150, {}),
    "dpo and sft, ddp": ("dpo", 150, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}),
    "reward, ddp": ("reward", 150, {}),
    "kto, ddp": ("kto", 60, {}),
    "a mean of one's own, ddp": ("plain", 75, {"own": "compute_loss"}),
    "a share of one's own, ddp": ("plain", 75, {"own": "compute_loss, handed on"}),
    "a function that is a mean, ddp": ("plain", 75, {"own": "compute_loss_func"}),
    "a function that is a share, ddp": ("plain", 75, {"own": "compute_loss_func, a share"}),
    "sft, handed on, ddp": ("sft", 60, {"own": "compute_loss, handed on"}),
    "dpo, its own steps, ddp": ("dpo", TokenBudget(150, same_steps=True), {}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_one_batch(name: str, ranks: Ranks, tmp_path: Path) -> None:
    kind, budget, further = CASES[name]
    result = ranks.run(one_step_within, kind, budget, gradient_accumulation_steps=2, **further)
    batches = [batch for rank in result for batch in rank["chosen"]]
    chosen = list(chain.from_iterable(batches))
    assert len(set(chosen)) == len(chosen), "no example twice"
    if isinstance(budget, TokenBudget):
        assert "4 batches" not in result[0]["note"], "each rank counts its own"
        assert "pieces" in result[0]["note"]
    else:
        assert len({len(batch) for batch in batches}) > 1, "or they are even"

    alone = {name: value for name, value in further.items() if not name.startswith(("fsdp", "own"))}
    stock = BUILD[kind](tmp_path, DATA[kind]().select(chosen), max_steps=1, **alone, per_device_train_batch_size=24)
    theirs = Gradients(stock)
    stock.train()
    bound = 2e-5 if ranks.backend == "gloo" else 1e-3
    for rank in result:
        assert furthest(rank["gradients"], theirs.steps[0]) <= bound
        assert all(math.isfinite(value) for value in rank["logged"].values())
        assert rank["logged"]["loss"] == pytest.approx(stock.state.log_history[0]["loss"], rel=bound)
    assert result[0]["logged"] == result[1]["logged"], "what is gathered is the same for both"


def test_generated_batches_are_split_alike(ranks: Ranks) -> None:
    """Ranks have completions of different lengths, and run the same number of pieces."""
    whole, split = ranks.run(generated_within, None), ranks.run(generated_within, 40)
    for ours, stock in zip(split, whole, strict=True):
        assert furthest(ours["gradients"], stock["gradients"]) <= (2e-5 if ranks.backend == "gloo" else 1e-3)
        assert "pieces" in ours["note"]
    assert split[0]["note"] == split[1]["note"]


def test_negative_control(ranks: Ranks, tmp_path: Path) -> None:
    """With one example less, the gradients differ far more."""
    result = ranks.run(one_step_within, "dpo", 150, gradient_accumulation_steps=2)
    chosen = [i for rank in result for batch in rank["chosen"] for i in batch][1:]
    stock = BUILD["dpo"](tmp_path, DATA["dpo"]().select(chosen), max_steps=1, per_device_train_batch_size=24)
    theirs = Gradients(stock)
    stock.train()
    assert furthest(result[0]["gradients"], theirs.steps[0]) > 1e-3


def test_means_of_ranks_are_refused(ranks: Ranks) -> None:
    """SFT's loss would be the mean of the ranks' own means, which is not the mean over the step."""
    for message in ranks.run(_refused, "sft", 60, average_tokens_across_devices=False):
        assert "average_tokens_across_devices=False takes the mean of the ranks' means" in message


def test_batches_that_ranks_have_alone_are_refused(ranks: Ranks) -> None:
    """One rank would wait for the other for ever; full batches are the same number on each rank."""
    uneven: dict[str, Any] = {"accelerator_config": {"even_batches": False}}
    for message in ranks.run(_refused, "sft", TokenBudget(60, same_steps=True), **uneven):
        assert "even_batches=False of accelerator_config gives ranks different numbers of batches" in message
    assert set(ranks.run(_refused, "sft", 60, **uneven)) == {"nothing was raised"}


@pytest.mark.parametrize("what", ["data", "budget"])
def test_ranks_with_other_data(what: str, ranks: Ranks) -> None:
    for message in ranks.run(_differently, what):
        assert "is not the same on every rank" in message


def _refused(*args: Any, **further: Any) -> str:
    from fastpack.errors import PatchError

    try:
        one_step_within(*args, **further)
    except PatchError as error:
        return str(error)
    return "nothing was raised"


def _differently(what: str) -> str:
    import tempfile

    import torch.distributed as dist
    from rank_trainers import as_launched

    import fastpack
    from fastpack.errors import PackingError

    rank = dist.get_rank()
    with as_launched():
        data = DATA["dpo"]().select(range(24 - (rank if what == "data" else 0)))
        trainer = BUILD["dpo"](Path(tempfile.mkdtemp()), data, ddp_find_unused_parameters=False)
        try:
            fastpack.patch(trainer, max_tokens=150 + (rank if what == "budget" else 0))
        except PackingError as error:
            assert fastpack.report(trainer).tier == "stock", "nothing was changed"
            return str(error)
    return "nothing was raised"
