"""Mixers with a delta rule run packed on every device, with no package installed: here on a CPU, in float32."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from adapter_cases import with_lora
from op_checks import count_calls
from oracle import compare, make_sequences, run_alone, run_batch

import fastpack
from fastpack.exactness.tiny import build_tiny, model_types
from fastpack.families.registry import FAMILIES
from fastpack.layers import decoder, project
from fastpack.layers.mixers import kernels as mixer_kernels
from fastpack.layers.mixers import packed
from fastpack.ops import delta_rule
from fastpack.ops.linear.operands import Norm
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
    tier = FAMILIES[model_type].tier
    assert (report.tier, report.unpadded, report.swapped["packed mixer"]) == (tier, 1, layers)
    assert (tier == "fast") is (model_type in NAMED or model_type == "qwen3_5_moe_text")
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


LINEARS: dict[str, tuple[list[str], list[int]]] = {
    "qwen3_5_text": (["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"], [4, 1]),
    "qwen3_next": (["in_proj_qkvz", "in_proj_ba", "out_proj"], [2, 1]),
    "olmo_hybrid": (["g_proj", "b_proj", "a_proj"], [3]),
    "kimi_linear": (["b_proj", "g_a_proj", "g_b_proj"], [2, 1]),
    "bamba": (["in_proj", "out_proj"], [1, 1]),
    "falcon_h1": (["in_proj"], [1]),
    "lfm2": (["in_proj"], [1]),
}
"""Adapted projections that only mixers have, and how many of those run as one op."""


@pytest.mark.parametrize("reentrant", [None, False], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("model_type", LINEARS)
def test_projections_with_lora_are_fused(
    model_type: str, reentrant: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that share an input are one op; the stock forward of the module does not run."""
    model: Any = with_lora(build_tiny(model_type), target_modules=LINEARS[model_type][0])
    sequences = make_sequences(model.config.get_text_config().vocab_size, LENGTHS)
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    nets = [m for m in model.modules() if type(m).__name__ in FAMILIES[model_type].mixers]
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    groups = count_calls(monkeypatch, project, "project")
    stock = count_calls(monkeypatch, packed, "packed_forward")
    error = compare(run_batch(model, sequences, "packed_seq_lens"), alone)
    assert max(error.logits, error.loss, error.grads) <= BOUND
    runs = len(nets) * (1 if reentrant is None else 2)
    sizes = [sum(each.lora is not None for each in group) for _, group, *_ in groups]
    assert sorted(size for size in sizes if size) == sorted(LINEARS[model_type][1] * runs)
    assert not stock


NORMED = {
    "qwen3_5_text": ("linear_attn", "input_layernorm", "out_proj"),
    "qwen3_next": ("linear_attn", "input_layernorm", "out_proj"),
    "olmo_hybrid": ("linear_attn", "input_layernorm", "o_proj"),
    "lfm2": ("conv", "operator_norm", "out_proj"),
}


@pytest.mark.parametrize("model_type", NORMED)
def test_a_layer_fuses_its_norms(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm before the mixer, and the residual addition after it, are parts of projections."""
    model: Any = build_tiny(model_type).train()
    sequences = make_sequences(model.config.get_text_config().vocab_size, LENGTHS)
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    mixer, norm, out = NORMED[model_type]
    layer = next(m for m in model.modules() if hasattr(m, mixer))
    groups = count_calls(monkeypatch, project, "project")
    error = compare(run_batch(model, sequences, "packed_seq_lens"), alone)
    assert max(error.logits, error.loss, error.grads) <= BOUND
    weights = {getattr(layer, norm).weight.data_ptr(), getattr(getattr(layer, mixer), out).weight.data_ptr()}
    normed = {each.weight.data_ptr() for call in groups for each in call if isinstance(each, Norm)}
    added = {group[0].weight.data_ptr() for _, group, _, residual, *_ in groups if residual is not None}
    assert weights <= normed | added


@pytest.mark.parametrize("model_type", ["kimi_linear", "olmo_hybrid", "qwen3_next", "lfm2_moe"])
def test_every_layer_is_fast(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict patches take it, and no stock forward of a layer runs."""
    model: Any = build_tiny(model_type).train()
    fastpack.patch(model, strict=True)
    layers = count_calls(monkeypatch, decoder, "_run")
    run_batch(model, make_sequences(model.config.vocab_size, LENGTHS), "packed_seq_lens")
    assert len(layers) == len(model.model.layers)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2"])
def test_checkpointed_layers_run_as_in_other_families(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLPs may run in tiles, and the recomputation leaves out the last projection's result, which nobody reads."""
    model: Any = build_tiny(model_type).train()
    sequences = make_sequences(model.config.vocab_size, LENGTHS)
    alone = run_alone(model, sequences)
    fastpack.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    asked: list[tuple[bool, bool]] = []
    block = decoder.mlp_block

    def seen(*args: Any, **options: Any) -> Any:
        asked.append((options["need_output"], options["tile_bytes"] is not None))
        return block(*args, **options)

    monkeypatch.setattr(decoder, "mlp_block", seen)
    error = compare(run_batch(model, sequences, "packed_seq_lens"), alone)
    assert max(error.logits, error.loss, error.grads) <= BOUND
    layers = len(model.model.layers)
    assert sorted(asked) == [(False, True)] * layers + [(True, True)] * layers
