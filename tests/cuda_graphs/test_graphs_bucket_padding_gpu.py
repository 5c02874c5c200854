"""On a GPU in bf16: recordings that leave bucket padding out are as close to float32 as plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from adapter_cases import with_lora
from gpu_cases import LENGTHS, build, check, oracle_and_plain
from graphs_on_gpu import LARGE, graphed
from oracle import compare, make_sequences, run_batch
from recording import recorded, runner
from tiny import EXPERTS, FAST, VOCAB

import fastpack
from fastpack.cuda_graphs.step import RecordedStep
from fastpack.ops.linear import row_limited_mm as row_limited

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="NEEDS HOPPER"
    ),
]


@pytest.fixture(autouse=True)
def _small_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_limited, "NARROWEST", 0)
    monkeypatch.setattr(row_limited, "FEWEST_TILES", 0)


IN_PART = ("cohere", "cohere2", "starcoder2")
"""Families whose MLPs are called by transformers' own layers, which don't pass a row count on."""


@pytest.mark.parametrize("model_type", [name for name in FAST if name not in EXPERTS])
def test_families_in_bf16(model_type: str) -> None:
    """A recording of 1,024 tokens or more serves batches of 784."""
    wide, plain = oracle_and_plain(model_type)
    model = graphed(build(model_type, torch.bfloat16), first_steps=1, record_after=4.0)
    sequences = make_sequences(VOCAB, LENGTHS)
    for kind in ("padded left", "several packed rows"):
        check(compare(run_batch(model, sequences, kind), wide, half=True), plain)
    if not runner(model).stats.replays:
        pytest.skip(f"not recorded: {runner(model).describe(torch.device('cuda'))}")
    recording = recorded(model)[0]
    assert recording.bucket.tokens - sum(LENGTHS) > 128
    assert recording._row_count.launches
    assert recording.leaves_out_bucket_padding == (model_type not in IN_PART)


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [("llama", "auto"), ("qwen2", "auto"), ("llama", "triton_packed"), ("gemma2", "triton_packed")],
)
def test_lora(model_type: str, attention: str) -> None:
    """LoRA updates are terms of the matmuls; one recording serves both batches, whatever the other left behind."""
    plain = with_lora(build(model_type, torch.bfloat16), r=8)
    wide = fastpack.patch(copy.deepcopy(plain).float(), kernels="torch")
    model = graphed(copy.deepcopy(plain), attention, first_steps=1, record_after=4.0, max_oversize_left_out=4.0)
    plain = fastpack.patch(plain, kernels="torch")
    for lengths in (LARGE, LENGTHS, LARGE):
        sequences = make_sequences(VOCAB, lengths)
        want = run_batch(wide, sequences, "padded right")
        theirs = compare(run_batch(plain, sequences, "padded right"), want, half=True)
        check(compare(run_batch(model, sequences, "padded right"), want, half=True), theirs)
    assert runner(model).stats.replays == 3
    assert all(step.leaves_out_bucket_padding for step in recorded(model))


def test_a_wrong_count_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    write = RecordedStep._write_inputs

    def too_few(self: RecordedStep, *args: Any) -> None:
        write(self, *args)
        self._row_count.rows.fill_(600)

    monkeypatch.setattr(RecordedStep, "_write_inputs", too_few)
    wide, plain = oracle_and_plain("llama")
    error = compare(
        run_batch(graphed(build("llama", torch.bfloat16)), make_sequences(VOCAB, LENGTHS), "padded left"), wide
    )
    with pytest.raises(AssertionError):
        check(error, plain)
