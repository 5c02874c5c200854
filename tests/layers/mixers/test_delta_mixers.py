"""Mixers with a delta rule run packed on every device, with no package installed: here on a CPU, in float32."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from op_checks import count_calls
from oracle import compare, make_sequences, run_alone, run_batch

import fastpack
from fastpack.exactness.tiny import build_tiny, model_types
from fastpack.families.registry import FAMILIES
from fastpack.layers.mixers import kernels as mixer_kernels
from fastpack.ops import delta_rule
from fastpack.packing.seqlens import PackedSeqLens

LENGTHS = (7, 1, 130, 64, 65, 3)
BOUND = 1e-4
RULES = {
    family.model_type: mixer.scan
    for family in FAMILIES.values()
    for mixer in family.mixers.values()
    if mixer.scan in ("gated_delta", "kda") and family.model_type in model_types()
}
NAMED = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear")
for _name in RULES:  # transformers looks for kernels when it imports these
    importlib.import_module(FAMILIES[_name].module)


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches: Any = (mixer_kernels._absent, mixer_kernels._function)
    for name in ("fla", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, None)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_the_families() -> None:
    assert {*NAMED} <= RULES.keys()
    assert RULES["kimi_linear"] == "kda"


@pytest.mark.parametrize("model_type", RULES)
def test_packed_on_a_cpu(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build_tiny(model_type).train()
    sequences = make_sequences(model.config.get_text_config().vocab_size, LENGTHS)
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    report = fastpack.report(model)
    layers = sum(type(m).__name__ in FAMILIES[model_type].mixers for m in model.modules())
    assert (report.tier, report.unpadded, report.swapped["packed mixer"]) == ("varlen", 1, layers)
    assert "mixers: fastpack on packed tokens" in report.notes

    calls = count_calls(monkeypatch, delta_rule, "_definition")
    error = compare(run_batch(model, sequences, "packed_seq_lens"), alone)
    assert len(calls) == layers
    assert all(len(call[0]) == sum(LENGTHS) for call in calls), "no padding"
    assert max(error.logits, error.loss, error.grads) <= BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", NAMED)
def test_packed_on_a_gpu(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, which no other package computes exactly."""
    model: Any = build_tiny(model_type).train().cuda()
    sequences = make_sequences(model.config.get_text_config().vocab_size, LENGTHS)
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    kernels = importlib.import_module("fastpack.ops.kernels.delta_rule")
    calls = count_calls(monkeypatch, kernels, "forward")
    error = compare(run_batch(model, sequences, "packed_seq_lens"), alone)
    assert calls
    assert max(error.logits, error.loss, error.grads) <= 5 * BOUND, "the tiny model's own error is near 1e-4"


@pytest.mark.parametrize("model_type", NAMED)
def test_a_dropped_boundary_is_caught(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build_tiny(model_type).train()
    sequences = make_sequences(model.config.get_text_config().vocab_size, LENGTHS)
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    leaky = PackedSeqLens.from_lengths([sum(LENGTHS)])
    monkeypatch.setattr(PackedSeqLens, "chunks", lambda self, size: _chunks(leaky, size))
    error = compare(run_batch(model, sequences, "packed_seq_lens"), alone)
    assert min(error.logits, error.grads) > 100 * BOUND
    with pytest.raises(fastpack.ContaminationError):
        fastpack.verify(model)


_chunks = PackedSeqLens.chunks
