"""The longest batches of a card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny import tiny_config

import fastpack
from fastpack.bench.shapes import make_config
from fastpack.memory import step
from fastpack.memory.fit import CARDS, GIB, fit_card, host_bytes
from fastpack.memory.settings import TrainingSettings
from fastpack.memory.sizes import read_sizes

EIGHT = read_sizes(make_config("llama8b"))
SETTINGS = {
    "qlora": TrainingSettings("qlora", 32),
    "qlora, TRL's loss": TrainingSettings("qlora", 32, loss="trl"),
    "lora, no checkpointing": TrainingSettings("lora", 16, checkpointing=False, offload=None),
    "full": TrainingSettings("full", offload=None),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("card", [12, 24, 80])
def test_every_smaller_batch_fits_and_a_larger_one_does_not(name: str, card: float) -> None:
    settings, sizes = SETTINGS[name], EIGHT if name != "full" else read_sizes(make_config("qwen0.5b"))
    if name == "lora, no checkpointing" and card < 24:
        pytest.skip("the weights don't fit")
    fit = fit_card(sizes, settings, card, length=512, reserve=1)
    for most, length in ((fit.sequence, None), (fit.tokens, 512)):
        largest = max(step.peak(sizes, settings, most * part // 200, length)[1] for part in range(1, 201))
        assert largest <= (card - 1) * GIB
        beyond = max(step.peak(sizes, settings, most * part // 200, length)[1] for part in range(200, 206))
        assert beyond > (card - 1) * GIB, "control: 3 % more"
    assert fit.peak == pytest.approx(sum(term.of(fit.sequence) for term in fit.moment.terms) / GIB)


def test_what_makes_room() -> None:
    """Larger cards, shorter sequences, and everything that is meant to save memory."""
    found = [fit_card(EIGHT, SETTINGS["qlora"], card).sequence for card in CARDS]
    assert found == sorted({*found})
    qlora = fit_card(EIGHT, SETTINGS["qlora"], 48)
    assert qlora.tokens > qlora.sequence, "their attention does not wait on the host, of which three would be here"
    kept = fit_card(EIGHT, replace(SETTINGS["qlora"], offload=None), 48)
    whole = fit_card(EIGHT, replace(SETTINGS["qlora"], offload=None, checkpointing=False), 48)
    assert qlora.sequence > 2 * kept.sequence > 4 * whole.sequence
    assert (kept.host, whole.host) == (0, 0)
    assert fit_card(EIGHT, replace(SETTINGS["qlora"], mode="lora"), 48).sequence < qlora.sequence


def test_host_memory() -> None:
    """30 inputs, as many results of attention and their statistics."""
    assert host_bytes(EIGHT, SETTINGS["qlora"], 65_536) == 30 * (2**29 + 2**29 + 2**23)
    assert host_bytes(EIGHT, SETTINGS["qlora"], 4_096) == 30 * 2**25, "attention is computed again"


@pytest.mark.parametrize(
    ("settings", "card", "message"),
    [
        ({"mode": "full"}, 24, r"weights alone, unquantised: 15.0 GiB.* Use --mode lora \(16.\d GiB\) or --mode qlora"),
        ({"mode": "lora"}, 12, r"and 11 GiB are left .* Use --mode qlora \(6.\d GiB\)\.$"),
        ({"mode": "qlora"}, 4, r"does not fit 4 GB: .* Use a card of 7 GB\.$"),
    ],
)
def test_too_small(settings: Any, card: float, message: str) -> None:
    with pytest.raises(fastpack.DoesNotFitError, match=message):
        fastpack.fit(make_config("llama8b"), card, **settings)


def test_the_function_takes_a_config_and_a_folder(tmp_path: Any) -> None:
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    assert fastpack.fit(config, 8).to_dict() == fastpack.fit(str(tmp_path), 8).to_dict()
    assert fastpack.fit(config, 8).sequence < fastpack.fit(config, 12).sequence, "control"
