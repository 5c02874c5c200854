"""Hybrids are recorded too: the chunks of a batch are made on the device, with room for every batch of the bucket."""

from __future__ import annotations

import pytest
import torch
from adapter_cases import with_lora
from oracle import FLOAT32_BOUND, compare
from recording import LARGE, SMALL, graphed, runner, step
from tiny import tiny_model

import fastpack
from fastpack.cuda_graphs.step import StaticSeqLens
from fastpack.families.registry import FAMILIES
from fastpack.ops.chunks import Chunks

pytestmark = pytest.mark.usefixtures("varlen")
OTHER = (8, 2, 18, 20, 30)
"""Other lengths than SMALL, in the same bucket."""
HYBRIDS = [family.model_type for family in FAMILIES.values() if family.packs_mixers]
BY_DEFAULT = ("qwen3_5_text", "kimi_linear", "bamba", "lfm2")


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in HYBRIDS]
)
def test_families(model_type: str) -> None:
    plain, model = fastpack.patch(tiny_model(model_type)), graphed(tiny_model(model_type))
    for lengths in (SMALL, OTHER, LARGE):
        error = compare(step(model, lengths), step(plain, lengths))
        assert error.worst <= FLOAT32_BOUND, error
    stats = runner(model).stats
    assert (stats.recordings, stats.replays, dict(stats.eager)) == (2, 3, {})


@pytest.mark.parametrize("model_type", BY_DEFAULT)
def test_checkpointed_with_lora(model_type: str) -> None:
    plain, model = (with_lora(tiny_model(model_type)) for _ in range(2))
    for each in (plain, model):
        each.gradient_checkpointing_enable({"use_reentrant": False})
        each.enable_input_require_grads()
    fastpack.patch(plain)
    graphed(model)
    for lengths in (SMALL, OTHER, LARGE):
        error = compare(step(model, lengths), step(plain, lengths))
        assert error.worst <= FLOAT32_BOUND, error
    assert runner(model).stats.replays == 3


def test_chunks_of_another_batch_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = fastpack.patch(tiny_model("qwen3_5_text")), graphed(tiny_model("qwen3_5_text"))
    made: dict[int, Chunks] = {}
    chunks = StaticSeqLens.chunks
    monkeypatch.setattr(StaticSeqLens, "chunks", lambda self, size: made.setdefault(size, chunks(self, size)))
    step(model)
    assert compare(step(model, OTHER), step(plain, OTHER)).worst > 1e-3


def test_there_is_room_for_every_batch() -> None:
    """One chunk for each token more than a multiple, and none for a sequence without tokens."""
    offsets, positions = torch.tensor([0, 1, 2, 130, 130], dtype=torch.int32), torch.zeros(1, 130, dtype=torch.long)
    chunks = StaticSeqLens((), offsets, positions, 128).chunks(64)
    assert chunks.begin.tolist() == [0, 1, 2, 66, 130, 130]
    assert chunks.end.tolist() == [1, 2, 66, 130, 130, 130]
