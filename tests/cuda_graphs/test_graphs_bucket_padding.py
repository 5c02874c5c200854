"""Recordings whose matmuls leave bucket padding out: their results, and which batches they serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import nf4, with_lora
from oracle import FLOAT32_BOUND, compare
from recording import LARGE, SMALL, check, graphed, hidden, recorded, runner, step, without_epsilon
from tiny import tiny_model

import fastpack
from fastpack.cuda_graphs import step as step_module
from fastpack.cuda_graphs.step import RecordedStep
from fastpack.packing.buckets import Bucket

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("varlen", "unwritten_memory_is_not_finite"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="Triton's interpreter; test_graphs_bucket_padding_gpu.py is native"
    ),
]


def whole_tiles(step: RecordedStep, lengths: Sequence[int]) -> int:
    """Return the number of 128-row tiles behind the last real token."""
    return step.bucket.tokens // 128 - -(-sum(lengths) // 128)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lora"), [("llama", True), ("qwen2", False), ("gemma2", True)])
def test_results_are_those_of_the_real_tokens(family: str, lora: bool) -> None:
    """One recording serves batches of several sizes; also with biases, and with norms behind products."""
    models = [tiny_model(family) for _ in range(2)]
    if lora:
        models = [with_lora(model) for model in models]
    plain, model = fastpack.patch(models[0]), graphed(models[1], kernels="triton", first_steps=1, record_after=4.0)
    for lengths in (LARGE, SMALL):
        check(step(model, lengths), step(plain, lengths))
    stats = runner(model).stats
    assert (stats.recordings, stats.replays, dict(stats.eager)) == (1, 2, {})
    (recording,) = recorded(model)
    assert recording.leaves_out_bucket_padding
    assert whole_tiles(recording, SMALL) == 1


@pytest.mark.slow
def test_with_4_bit_weights_and_checkpointing(tmp_path: Path) -> None:
    """Only one dense copy of a group's weights exists at a time: each matmul adds to the sum of earlier ones."""

    def build() -> Any:
        model = with_lora(nf4(tmp_path))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        return model

    plain, model = fastpack.patch(build()), graphed(build(), kernels="triton", first_steps=1, record_after=4.0)
    for lengths in (LARGE, SMALL):
        check(step(model, lengths), step(plain, lengths))
    (recording,) = recorded(model)
    assert recording.leaves_out_bucket_padding
    assert whole_tiles(recording, SMALL) == 1


@pytest.mark.slow
def test_a_wrong_count_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    write = RecordedStep._write_inputs

    def too_few(self: Any, *args: Any) -> None:
        write(self, *args)
        self._row_count.rows.fill_(1)  # a tile of 128 is computed all the same

    monkeypatch.setattr(RecordedStep, "_write_inputs", too_few)
    plain, model = fastpack.patch(tiny_model("llama")), graphed(tiny_model("llama"), kernels="triton")
    assert compare(step(model, LARGE), step(plain, LARGE)).worst > 100 * FLOAT32_BOUND


@pytest.mark.slow
def test_bucket_padding_stays_finite() -> None:
    """Weight gradients sum over all rows, and meet zeros and finite numbers in the padding."""
    model = graphed(tiny_model("qwen2"), kernels="triton", first_steps=1, record_after=4.0)
    hidden(model, lengths=LARGE).sum().backward()
    out = hidden(model)
    (recording,) = recorded(model)
    assert out.shape[1] == sum(SMALL)
    assert whole_tiles(recording, SMALL) == 1
    assert recording._captured.outputs[0].isfinite().all()


@pytest.mark.slow
def test_nothing_is_left_out_where_zeros_do_harm() -> None:
    models = [without_epsilon(tiny_model("llama")) for _ in range(2)]
    plain, model = fastpack.patch(models[0]), graphed(models[1], kernels="triton")
    check(step(model, LARGE), step(plain, LARGE))
    assert [s.leaves_out_bucket_padding for s in recorded(model)] == [False]


def test_experts_leave_bucket_padding_out() -> None:
    """They do most of the work. If they run stock, leaving padding out of attention's projections does not count."""
    for chosen in (None, "batched_mm"):
        model = graphed(tiny_model("mixtral", experts_implementation=chosen), kernels="triton")
        step(model)
        (recording,) = recorded(model)
        assert recording._row_count.launches
        assert recording.leaves_out_bucket_padding == (chosen is None)


def test_plain_torch_leaves_nothing_out() -> None:
    model = graphed(tiny_model("llama"))
    step(model)
    assert [s.leaves_out_bucket_padding for s in recorded(model)] == [False]


@pytest.mark.parametrize(("leaves_out", "counts"), [(False, [1] + [2] * 8), (True, [1] * 7 + [2] * 2)])
def test_they_serve_smaller_batches_and_longer(
    leaves_out: bool, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They serve down to half of their tokens, not two thirds, and until they have wasted four times a batch's tokens.

    In seven batches they waste 192 each of 320.
    """
    large, small = (500,), (280,)
    assert [Bucket.of(x).tokens for x in (large, small)] == [512, 320]
    monkeypatch.setattr(step_module, "MIN_WORK_LEFT_OUT", -1.0 if leaves_out else 0.5)
    model = graphed(tiny_model("llama", num_hidden_layers=1), record_after=4.0)
    recorded_so_far = []
    for lengths in (large, *[small] * 8):
        step(model, lengths)
        recorded_so_far.append(runner(model).stats.recordings)
    assert recorded_so_far == counts
