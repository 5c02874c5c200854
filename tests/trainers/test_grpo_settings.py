"""Each setting of ``GRPOConfig`` that reaches the loss: losses, metrics and weights equal stock's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from every_trainer import check_logs, check_weights, weights_of
from grpo_cases import CASES, LOSSES, LayerTokens, Rollouts, bound_of_loss, grpo
from preferences import logged

import fastpack
from fastpack.trainers.loss_units import GRPO_LOSSES

pytestmark = pytest.mark.usefixtures("accelerate_afresh")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"share_prefixes": "auto"},
    {"loss": "fused"},
    {"share_prefixes": "auto", "loss": "fused"},
)
NO_LORA = {"reference in step": "TRL refuses a PEFT model"}


def test_every_loss_is_tried() -> None:
    assert set(LOSSES) == GRPO_LOSSES.keys()


@pytest.mark.sample(5)
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("what", CASES)
def test_equal(what: str, lora: bool, tmp_path: Path) -> None:
    if lora and what in NO_LORA:
        pytest.skip(NO_LORA[what])
    stock = grpo(tmp_path, lora=lora, **CASES[what])
    before = weights_of(stock)
    counted = LayerTokens(stock, shared=False)
    theirs = logged(stock)
    assert len(theirs) == stock.args.max_steps >= 2
    assert counted.padding == sum(counted.seen) / 2 - sum(counted.expected) / 2 > 0, "stock computes padding"
    after = weights_of(stock)
    learns = what != "all truncated"
    assert any((after[name] != value).any() for name, value in before.items()) == learns, "it trains"
    assert any(step["grad_norm"] > 0 for step in theirs) == learns

    for options in OPTIONS:
        ours = fastpack.patch(grpo(tmp_path, lora=lora, **CASES[what]), **options)
        counted = LayerTokens(ours, shared="share_prefixes" in options)
        mine = logged(ours)
        check_logs(mine, theirs, of_loss=bound_of_loss(ours))
        check_weights(ours, stock)
        assert counted.seen == counted.expected, options
        assert counted.padding > 0
        assert counted.saved > 0.1 * sum(counted.expected) / 2, "groups have a prompt in common"
        notes = "\n".join(fastpack.report(ours).notes)
        assert ("log-probabilities fused with the head in " in notes) == ("loss" in options)
        assert ("prefixes: shared in " in notes) == ("share_prefixes" in options)


@pytest.mark.slow
def test_every_setting_takes_part(tmp_path: Path) -> None:
    """No two cases have the same losses and gradients, so that a setting that did nothing would be seen."""
    seen: dict[tuple[float, ...], str] = {}
    for what, further in CASES.items():
        steps = logged(grpo(tmp_path, **further))
        numbers = tuple(step[name] for step in steps for name in ("loss", "grad_norm"))
        assert numbers not in seen, (what, seen[numbers])
        seen[numbers] = what


def test_negative_control(tmp_path: Path) -> None:
    """The comparison fails where tokens of tools are not masked, and the counts where nothing is patched."""
    stock = logged(grpo(tmp_path, **CASES["tools"]))

    class Unmasked(Rollouts):
        def __call__(self, texts: list[str], trainer: Any) -> dict[str, Any]:
            drawn = super().__call__(texts, trainer)
            drawn["env_mask"] = [[1] * len(ids) for ids in drawn["completion_ids"]]
            return drawn

    trainer = fastpack.patch(grpo(tmp_path, rollouts=lambda: Unmasked(of_tools=True)), share_prefixes="auto")
    counted = LayerTokens(trainer, shared=False)
    with pytest.raises(AssertionError):
        check_logs(logged(trainer), stock)
    assert sum(counted.seen) < sum(counted.expected)
