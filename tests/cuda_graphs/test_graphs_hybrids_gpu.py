"""Replayed steps of hybrids against eager ones, on a GPU: recurrences and convolutions of our own, recorded."""

from __future__ import annotations

import pytest
import torch
from adapter_cases import with_lora
from graphs_on_gpu import LARGE, SMALL, close, graphed, step
from oracle import compare, make_sequences, run_batch
from recording import runner
from tiny import VOCAB, tiny_model

import fastpack

pytestmark = pytest.mark.gpu
HYBRIDS = ("qwen3_5_text", "qwen3_next", "kimi_linear", "bamba", "nemotron_h", "lfm2")
BOUND = 2e-4
"""Recurrences round to float32 from chunk to chunk, and a bucket has others."""
HALF_BOUND = 0.1
"""By norms. Both runs round to bfloat16, and a few tokens may go to other experts."""


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_replays(model_type: str, checkpointed: bool) -> None:
    """In float32, so that rounding hides no error; buckets alternate."""
    plain, model = (with_lora(tiny_model(model_type)).cuda().train() for _ in range(2))
    if checkpointed:
        for each in (plain, model):
            each.gradient_checkpointing_enable({"use_reentrant": False})
            each.enable_input_require_grads()
    fastpack.patch(plain)
    graphed(model)
    for lengths in (SMALL, LARGE, SMALL, LARGE):
        close(step(model, lengths), step(plain, lengths), BOUND)
    stats = runner(model).stats
    assert (stats.recordings, stats.replays, sum(stats.eager.values())) == (2, 4, 0), stats
    other = run_batch(plain, make_sequences(VOCAB, SMALL, seed=1), "padded right")
    assert compare(step(model, SMALL), other).worst > 10 * BOUND


def test_experts_between_recurrences_in_bf16() -> None:
    plain, model = (tiny_model("qwen3_5_moe_text").to(torch.bfloat16).cuda().train() for _ in range(2))
    fastpack.patch(plain)
    graphed(model)
    for lengths in (SMALL, LARGE, SMALL):
        error = compare(step(model, lengths), step(plain, lengths), half=True)
        assert max(error.logits, error.grads) <= HALF_BOUND, error
    stats = runner(model).stats
    assert (stats.replays, sum(stats.eager.values())) == (3, 0), stats
    other = run_batch(plain, make_sequences(VOCAB, SMALL, seed=1), "padded right")
    assert compare(step(model, SMALL), other, half=True).worst > 3 * HALF_BOUND
