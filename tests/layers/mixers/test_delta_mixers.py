"""Mixers with a delta rule run packed on every device, with no package installed: here on a CPU, in float32."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from adapter_cases import with_lora
from op_checks import count_calls
from oracle import Error, compare, make_sequences, run_alone, run_batch

import fastpack
from fastpack.exactness.tiny import build_tiny, model_types
from fastpack.families.registry import FAMILIES
from fastpack.layers import decoder, project
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


pytestmark = pytest.mark.usefixtures("nothing_installed")


class Patched:
    """A tiny model, patched in training mode, and what its sequences gave alone before."""

    def __init__(self, model: Any) -> None:
        self.model = model.train()
        vocab = model.config.get_text_config().vocab_size
        self.sequences = make_sequences(vocab, LENGTHS)
        self._alone = run_alone(model, self.sequences)
        fastpack.patch(model)

    def error(self) -> Error:
        """Return the error of the sequences packed."""
        return compare(run_batch(self.model, self.sequences, "packed_seq_lens"), self._alone)


def test_the_families() -> None:
    assert {*NAMED} <= RULES.keys()
    assert RULES["kimi_linear"] == "kda"


@pytest.mark.parametrize("model_type", RULES)
def test_packed_on_a_cpu(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Patched(build_tiny(model_type))
    report = fastpack.report(case.model)
    layers = sum(type(m).__name__ in FAMILIES[model_type].mixers for m in case.model.modules())
    tier = FAMILIES[model_type].tier
    assert (report.tier, report.unpadded, report.swapped["packed mixer"]) == (tier, 1, layers)
    assert (tier == "fast") is (model_type in NAMED or model_type == "qwen3_5_moe_text")
    assert "mixers: fastpack on packed tokens" in report.notes

    calls = count_calls(monkeypatch, delta_rule, "_definition")
    assert case.error().worst <= BOUND
    assert len(calls) == layers
    assert all(len(call[0]) == sum(LENGTHS) for call in calls), "no padding"


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", NAMED)
def test_packed_on_a_gpu(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, which no other package computes exactly."""
    case = Patched(build_tiny(model_type).cuda())
    kernels = importlib.import_module("fastpack.ops.kernels.delta_rule")
    calls = count_calls(monkeypatch, kernels, "forward")
    assert case.error().worst <= 5 * BOUND, "the tiny model's own error is near 1e-4"
    assert calls


@pytest.mark.parametrize("model_type", NAMED)
def test_a_dropped_boundary_is_caught(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Patched(build_tiny(model_type))
    leaky = PackedSeqLens.from_lengths([sum(LENGTHS)])
    monkeypatch.setattr(PackedSeqLens, "chunks", lambda self, size: _chunks(leaky, size))
    error = case.error()
    assert min(error.logits, error.grads) > 100 * BOUND
    with pytest.raises(fastpack.ContaminationError):
        fastpack.verify(case.model)


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
    case = Patched(with_lora(build_tiny(model_type), target_modules=LINEARS[model_type][0]))
    nets = [m for m in case.model.modules() if type(m).__name__ in FAMILIES[model_type].mixers]
    if reentrant is not None:
        case.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        case.model.enable_input_require_grads()
    groups = count_calls(monkeypatch, project, "project")
    stock = count_calls(monkeypatch, packed, "packed_forward")
    assert case.error().worst <= BOUND
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
    case = Patched(build_tiny(model_type))
    mixer, norm, out = NORMED[model_type]
    layer = next(m for m in case.model.modules() if hasattr(m, mixer))
    groups = count_calls(monkeypatch, project, "project")
    assert case.error().worst <= BOUND
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
    case = Patched(build_tiny(model_type))
    case.model.gradient_checkpointing_enable({"use_reentrant": False})
    asked: list[tuple[bool, bool]] = []
    block = decoder.mlp_block

    def seen(*args: Any, **options: Any) -> Any:
        asked.append((options["need_output"], options["tile_bytes"] is not None))
        return block(*args, **options)

    monkeypatch.setattr(decoder, "mlp_block", seen)
    assert case.error().worst <= BOUND
    layers = len(case.model.model.layers)
    assert sorted(asked) == [(False, True)] * layers + [(True, True)] * layers
