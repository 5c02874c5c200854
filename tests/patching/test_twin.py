"""A twin tells right rows from wrong ones; the caller's state neither changes its verdict nor is changed by it."""

from __future__ import annotations

import copy
import functools
import sys
import time
import typing
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from text_models import text_model
from torch import nn
from transformers import Qwen2Config
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from twin_rows import CONFIGS, WRONG, Wrong

import fastpack
from fastpack.errors import FastpackWarning
from fastpack.exactness.inputs import INPUT_KINDS, LENGTHS, make_sequences
from fastpack.exactness.oracle import run_alone, run_batch
from fastpack.exactness.rule import FULL_BOUND, compare
from fastpack.exactness.tiny import build_tiny, model_class, model_types
from fastpack.exactness.twins import apart, build_twin, distinct_sequences
from fastpack.families import lock
from fastpack.families.registry import FAMILIES
from fastpack.families.shared_specs import LLAMA_MLP
from fastpack.families.spec import (
    AnyAttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    Family,
    GatedNormSpec,
    HeadSpec,
    MlpSpec,
    NormSpec,
    Spec,
)
from fastpack.model.unwrap import find_parts
from fastpack.patching import experts as plan_of_experts
from fastpack.patching import plan
from fastpack.patching.support import covered_family
from fastpack.patching.twin import match_by_twin
from fastpack.patching.twin import patched as patched_by

BY_DEFAULT = (
    "llama Attention window=num_key_value_groups",
    "llama Attention rope_in_float32=True",
    "llama Attention dropout=None",
    "llama RMSNorm rounding=after",
    "llama MLP activation=None",
    "llama DecoderLayer pre_mlp=input_layernorm",
    "llama ForCausalLM softcap=config.num_hidden_layers",
    "gemma2 Attention softcap=None",
    "gemma2 Attention window=None",
    "olmo2 RMSNorm rounding=before",
    "phi3 DecoderLayer dropouts=None",
    "granite DecoderLayer residual_scale=None",
    "phimoe family mask_window=None",
    "mixtral Experts columns=interleaved",
    "gpt_oss Experts limit=None",
    "step3p5 Experts clamps_after=False",
)
RIGHT_BY_DEFAULT = ("llama", "qwen3", "cohere2", "deepseek_v3", "gpt_oss", "phimoe", "diffllama", "gemma4_text")


NOT_ON_META = (
    *("cohere_compass_text", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe", "ministral"),
    "qwen4_exp_text",
)
"""Their defaults contradict each other, or they read numbers that the meta device doesn't hold."""


def rows(model: Any) -> tuple[nn.Module, Family, dict[str, Spec]]:
    """Return a model's backbone, its family and the specs of its known classes."""
    parts = find_parts(model)
    family = covered_family(parts)
    classes = {type(module).__name__ for module in parts.backbone.modules()} | {type(parts.head).__name__}
    return parts.backbone, family, {name: spec for name, spec in family.fast.items() if name in classes}


@functools.cache
def user_model(model_type: str) -> Any:
    if model_type not in model_types():
        return text_model(model_type)
    return build_tiny(model_type, **CONFIGS.get(model_type, {}))


def llama(**settings: Any) -> tuple[nn.Module, Family, dict[str, Spec]]:
    return rows(build_tiny("llama", **settings).model)


def unmatched(result: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for name, reason in result.items() if reason}


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(f.model_type, marks=() if f.model_type in RIGHT_BY_DEFAULT else pytest.mark.slow)
        for f in FAMILIES.values()
        if f.fast
    ],
)
def test_right_rows_match(model_type: str) -> None:
    backbone, family, specs = rows(user_model(model_type))
    assert specs
    assert unmatched(match_by_twin(backbone, family, specs)) == {}


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(f.model_type, marks=() if f.model_type in ("gemma3_text", "granite") else pytest.mark.slow)
        for f in FAMILIES.values()
        if f.fast and f.model_type in model_types() and f.model_type not in NOT_ON_META
    ],
)
def test_right_rows_match_from_a_config_of_real_size(model_type: str) -> None:
    cls = model_class(model_type)
    with torch.device("meta"):
        backbone, family, specs = rows(cls(cls.config_class()))
    assert specs
    assert unmatched(match_by_twin(backbone, family, specs)) == {}


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(w, id=w.name, marks=() if w.name in BY_DEFAULT else pytest.mark.slow) for w in WRONG],
)
def test_wrong_rows(wrong: Wrong) -> None:
    """The check that a wrong row names detects it, or a verdict says why it can't be detected."""
    backbone, family, specs = rows(user_model(wrong.family))
    candidates = specs
    if wrong.cls:
        name = next(name for name in specs if name.endswith(wrong.cls))
        candidates = {name: replace(specs[name], **wrong.changed)}
    else:
        family = replace(family, **wrong.changed)
    reasons = unmatched(match_by_twin(backbone, family, candidates))
    if wrong.verdict in ("rounding", "no effect"):
        assert reasons == {}
        assert same_results(backbone, family, specs, {**specs, **candidates}, torch.float32)
        same = same_results(backbone, family, specs, {**specs, **candidates}, torch.bfloat16)
        assert same is (wrong.verdict == "no effect")
        return
    reason = next(iter(reasons.values()))
    signs = {
        "float32": "in float32",
        "dropout": "with dropout",
        "bfloat16": "in bfloat16",
        "windows": "layers were moved",
    }
    assert signs.get(wrong.verdict, "") in reason
    assert (wrong.verdict in ("windows", "fails")) == reason.startswith(("fails in its twin", "can't be shrunk"))


def same_results(
    backbone: Any, family: Family, right: Mapping[str, Spec], wrong: Mapping[str, Spec], dtype: torch.dtype
) -> bool:
    """Return whether a twin gives the same bits when patched by either."""
    result = []
    with apart(), torch.no_grad():
        model = build_twin(type(backbone), backbone.config, dtype)
        ids = torch.cat(distinct_sequences())[None]
        for specs in (right, wrong):
            with patched_by(model, family, specs):
                result.append(model(input_ids=ids, packed_seq_lens=LENGTHS).last_hidden_state)
    return torch.equal(*result)


def test_every_field_of_every_spec_is_tried() -> None:
    tried: dict[type, set[str]] = {}
    for wrong in WRONG:
        specs = FAMILIES[wrong.family].fast
        spec = next((spec for name, spec in specs.items() if wrong.cls and name.endswith(wrong.cls)), None)
        tried.setdefault(type(spec), set()).update(wrong.changed)
    kinds = (*typing.get_args(AnyAttentionSpec), NormSpec, GatedNormSpec, MlpSpec, ExpertsSpec, DecoderSpec, HeadSpec)
    assert {kind: {each.name for each in fields(kind)} - tried.get(kind, set()) for kind in kinds} == {
        kind: set() for kind in kinds
    }


def test_every_row_by_default_is_in_the_table() -> None:
    assert {*BY_DEFAULT} <= {wrong.name for wrong in WRONG}
    assert len({wrong.name for wrong in WRONG}) == len(WRONG)


def test_a_limit_that_few_values_reach_is_seen() -> None:
    """GLM 5.3's MLP is like Llama's but for a limit of 10."""
    backbone = text_model("glm5_next_text")
    backbone.config.swiglu_limit = 10.0
    (reason,) = match_by_twin(backbone, FAMILIES["glm5_next_text"], {"Glm5NextTextMLP": LLAMA_MLP}).values()
    assert reason


def test_the_wrong_class_is_named_and_the_others_match() -> None:
    backbone, family, specs = llama()
    specs["LlamaMLP"] = replace(specs["LlamaMLP"], gate_up=("up_proj", "gate_proj"))
    assert list(unmatched(match_by_twin(backbone, family, specs))) == ["LlamaMLP"]


def test_a_layer_whose_attention_does_not_match_stays() -> None:
    backbone, family, specs = llama()
    specs["LlamaAttention"] = replace(specs["LlamaAttention"], rope_layout="interleaved")
    result = unmatched(match_by_twin(backbone, family, specs))
    assert [*result] == ["LlamaAttention", "LlamaDecoderLayer"]
    assert "keeps the stock forward" in result["LlamaDecoderLayer"]


def swapped_mlp(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def rewritten_mlp(self: Any, x: torch.Tensor) -> Any:
    gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(up * self.act_fn(gate))


def norm_with_eps_behind_the_root(self: Any, hidden_states: torch.Tensor) -> Any:
    x = hidden_states.float()
    x = x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
    return self.weight * x.to(hidden_states.dtype)


def norm_rounded_behind_its_weight(self: Any, hidden_states: torch.Tensor) -> Any:
    x = hidden_states.float()
    x = x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    return (self.weight * x).to(hidden_states.dtype)


def rewritten_norm(self: Any, hidden_states: torch.Tensor) -> Any:
    x = nn.functional.rms_norm(hidden_states.float(), hidden_states.shape[-1:], None, self.variance_epsilon)
    return self.weight * x.to(hidden_states.dtype)


def parallel_layer(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))


def rewritten_layer(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def experts_in_a_loop(self: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
    result = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        gate, up = (hidden_states @ self.gate_up_proj[expert].t()).chunk(2, dim=-1)
        y = (self.act_fn(gate) * up) @ self.down_proj[expert].t()
        result = result + y * (weights * (index == expert)).sum(1, keepdim=True).to(y.dtype)
    return result


def experts_of_weighted_inputs(
    self: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> Any:
    result = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        x = hidden_states * (weights * (index == expert)).sum(1, keepdim=True).to(hidden_states.dtype)
        gate, up = (x @ self.gate_up_proj[expert].t()).chunk(2, dim=-1)
        result = result + (self.act_fn(gate) * up) @ self.down_proj[expert].t()
    return result


def as_in_its_file(forward: Any, file: Any = modeling_llama) -> Any:
    """Return a forward as if upstream's file had been edited: its globals are that file's."""
    return type(forward)(forward.__code__, vars(file), "forward")


EDITED: tuple[tuple[str, Any, str], ...] = (
    ("LlamaMLP", swapped_mlp, "in float32"),
    ("LlamaMLP", rewritten_mlp, ""),
    ("LlamaRMSNorm", norm_with_eps_behind_the_root, "in float32"),
    ("LlamaRMSNorm", norm_rounded_behind_its_weight, "in bfloat16"),
    ("LlamaRMSNorm", rewritten_norm, ""),
    ("LlamaDecoderLayer", parallel_layer, "in float32"),
    ("LlamaDecoderLayer", rewritten_layer, ""),
)
"""Forwards of classes edited by hand: those that compute the same, and others with the check that detects them."""


@pytest.mark.parametrize(("name", "forward", "seen_by"), EDITED)
def test_a_hand_edited_class(name: str, forward: Any, seen_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getattr(modeling_llama, name), "forward", as_in_its_file(forward))
    backbone, family, _ = llama()
    result = match_by_twin(backbone, family, {name: family.fast[name]})[name]
    assert (result == "") is (seen_by == "")
    assert seen_by in result


@pytest.mark.parametrize(("forward", "seen_by"), [(experts_in_a_loop, ""), (experts_of_weighted_inputs, "in float32")])
def test_hand_edited_experts(forward: Any, seen_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_mixtral.MixtralExperts, "forward", as_in_its_file(forward, modeling_mixtral))
    backbone, family, specs = rows(build_tiny("mixtral"))
    result = match_by_twin(backbone, family, {"MixtralExperts": specs["MixtralExperts"]})["MixtralExperts"]
    assert (result == "") is (seen_by == "")
    assert seen_by in result


@pytest.mark.parametrize("changed", [{}, {"columns": "interleaved"}])
def test_experts_that_the_user_chose_by_name_are_tried(changed: dict[str, Any]) -> None:
    """The user's own model keeps the implementation that was chosen."""
    model = build_tiny("mixtral")
    model.set_experts_implementation("eager")
    backbone, family, specs = rows(model)
    wrong = replace(specs["MixtralExperts"], **changed)
    result = match_by_twin(backbone, family, {"MixtralExperts": wrong})["MixtralExperts"]
    assert (result == "") is (changed == {})
    assert model.config._experts_implementation == "eager"
    report = fastpack.report(fastpack.patch(model))
    assert "experts" not in report.swapped
    assert ("MixtralExperts", "experts_implementation='eager' was chosen by name, and runs") in report.skipped


@pytest.mark.parametrize(
    ("name", "function", "planner"),
    [
        ("LlamaAttention", "attention_forward", plan),
        ("LlamaDecoderLayer", "decoder_forward", plan),
        ("MixtralExperts", "experts_forward", plan_of_experts),
    ],
)
def test_what_is_far_from_float32_in_bfloat16_alone(
    name: str, function: str, planner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the rule: results with five bits, where bfloat16 has eight, are rejected."""
    ours = getattr(planner, function)

    def coarse(*args: Any, **kwargs: Any) -> Any:
        result = ours(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        if out.dtype == torch.bfloat16:
            out = (out + 16 * out) - 16 * out
        return (out, None) if isinstance(result, tuple) else out

    forwards = tuple((spec, coarse if forward is ours else forward) for spec, forward in plan.FAST)
    monkeypatch.setattr(plan, "FAST", forwards)
    monkeypatch.setattr(planner, function, coarse)
    backbone, family, specs = rows(build_tiny("mixtral" if name.startswith("Mixtral") else "llama"))
    assert "in bfloat16" in match_by_twin(backbone, family, {name: specs[name]})[name]


@pytest.fixture
def nothing_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no source be proved, as in a release whose sources are all new."""
    for name in FAMILIES["llama"].fast:
        monkeypatch.delitem(lock.proved(), name)


@pytest.mark.usefixtures("nothing_proved")
def test_a_release_that_nobody_has_proved_is_matched_whole() -> None:
    model = build_tiny("llama").train()
    alone = run_alone(model, make_sequences())
    report = fastpack.report(fastpack.patch(model, loss="fused"))  # a warning is an error here
    assert {*report.matched} == {*FAMILIES["llama"].fast}
    assert (report.tier, report.skipped) == ("fast", ())
    result = run_batch(model, INPUT_KINDS["padded left"](make_sequences()), make_sequences())
    assert compare(result, alone).of_tensors <= FULL_BOUND


@pytest.mark.usefixtures("nothing_proved")
def test_one_of_its_classes_that_computes_otherwise_keeps_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", as_in_its_file(swapped_mlp))
    model = build_tiny("llama").train()
    alone = run_alone(model, make_sequences())
    with pytest.warns(FastpackWarning, match="LlamaMLP of transformers .* does not match: off by"):
        fastpack.patch(model)
    report = fastpack.report(model)
    assert [name for name, _ in report.skipped] == ["LlamaMLP"]
    assert "layer" in report.swapped
    result = run_batch(model, INPUT_KINDS["padded left"](make_sequences()), make_sequences())
    assert compare(result, alone).of_tensors <= FULL_BOUND


def test_a_foreign_forward_is_not_proved_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, family, specs = llama()

    def theirs(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", theirs)
    result = match_by_twin(backbone, family, specs)
    assert "not transformers'" in result["LlamaMLP"]
    assert [*unmatched(result)] == ["LlamaMLP"]


def test_what_cannot_be_built_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, family, specs = llama()

    def init(self: Any, config: Any) -> None:
        raise ValueError("only 7B")

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", init)
    assert set(match_by_twin(backbone, family, specs).values()) == {"can't be shrunk: ValueError: only 7B"}


def test_thresholds_of_a_real_config_are_crossed() -> None:
    """A window of 4,096 tokens in every other layer becomes a small one, and a wrong window is detected."""
    kinds = ["full_attention", "sliding_attention"] * 12
    window = {"use_sliding_window": True, "sliding_window": 4096, "layer_types": kinds, "num_hidden_layers": 24}
    with torch.device("meta"):
        backbone = Qwen2Model(Qwen2Config(max_position_embeddings=32768, **window))
    _, family, right = rows(backbone)
    assert unmatched(match_by_twin(backbone, family, right)) == {}
    wrong = replace(right["Qwen2Attention"], window=None)  # type: ignore[call-arg]
    assert match_by_twin(backbone, family, {"Qwen2Attention": wrong})["Qwen2Attention"]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _params_on_meta() -> Iterator[None]:
    from accelerate import init_empty_weights

    with init_empty_weights():
        yield


@contextmanager
def _no_init() -> Iterator[None]:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield


class _Zero:
    """The change that DeepSpeed's ``zero.Init`` makes to classes; ``deepspeed.initialize`` suspends it for a while."""

    def __init__(self) -> None:
        self.original = nn.Linear.__init__

    def shutdown_init_context(self) -> None:
        nn.Linear.__init__ = self.original  # type: ignore[method-assign]

    def restore_init_context(self) -> None:
        original = self.original

        def partition_after(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            module.weight.data = torch.empty(0)

        nn.Linear.__init__ = partition_after  # type: ignore[method-assign]


def _zero3_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute DeepSpeed's permanent ``torch.nn.functional.linear``, which adds the bias after the rounding."""
    out = x.matmul(weight.t())
    return out if bias is None else out + bias


@contextmanager
def _zero_init() -> Iterator[None]:
    """Return a context like ``zero.Init``, with ZeRO-3 on in transformers."""
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    class Config:
        def is_zero3(self) -> bool:
            return True

    zero, config = _Zero(), Config()
    with pytest.MonkeyPatch.context() as patched, ExitStack() as later:
        patched.setitem(sys.modules, "deepspeed.runtime.zero.partition_parameters", zero)
        patched.setattr(torch.nn.functional, "linear", _zero3_linear)
        set_hf_deepspeed_config(config)
        later.callback(unset_hf_deepspeed_config)
        zero.restore_init_context()
        later.callback(zero.shutdown_init_context)
        yield
        assert nn.Linear.__init__ is not zero.original


CALLERS: dict[str, Any] = {
    "default dtype": lambda: _default_dtype(torch.bfloat16),
    "device context": lambda: torch.device("meta"),
    "default device": lambda: _default_device("meta"),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "parameters on meta": _params_on_meta,
    "no initialisation": _no_init,
    "zero.Init": _zero_init,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("caller", CALLERS)
def test_the_callers_state_does_not_matter(caller: str) -> None:
    """Nor is the state changed. A wrong row is still detected, so the check did run."""
    backbone, family, specs = llama(attention_bias=True, mlp_bias=True)
    wrong = {"LlamaMLP": replace(specs["LlamaMLP"], gate_up=("up_proj", "gate_proj"))}
    expected = match_by_twin(backbone, family, wrong)
    assert "in float32" in expected["LlamaMLP"]
    with CALLERS[caller]():
        before = torch.get_default_dtype(), torch.empty(0).device, torch.is_grad_enabled()
        assert match_by_twin(backbone, family, wrong) == expected
        assert unmatched(match_by_twin(backbone, family, specs)) == {}
        assert (torch.get_default_dtype(), torch.empty(0).device, torch.is_grad_enabled()) == before


def test_random_numbers_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the GPUs': nothing seeds every device."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeds every device"))
    before = torch.get_rng_state()
    match_by_twin(*llama())
    assert torch.equal(torch.get_rng_state(), before)


def test_verdicts_do_not_depend_on_the_random_state_or_on_weights() -> None:
    backbone, family, specs = llama()
    specs["LlamaRMSNorm"] = replace(specs["LlamaRMSNorm"], rounding="after")
    first = match_by_twin(backbone, family, specs)
    torch.rand(7)
    assert match_by_twin(backbone.to("meta"), family, specs) == first


def test_the_users_model_and_config_stay() -> None:
    backbone, family, specs = llama()
    backbone.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    before, weights = copy.deepcopy(backbone.config.to_dict()), copy.deepcopy(backbone.state_dict())
    attributes = {name: set(vars(module)) for name, module in backbone.named_modules()}
    assert unmatched(match_by_twin(backbone, family, specs)) == {}
    assert backbone.config.to_dict() == before
    assert all(torch.equal(value, weights[name]) for name, value in backbone.state_dict().items())
    assert {name: set(vars(module)) for name, module in backbone.named_modules()} == attributes


def test_nothing_is_fetched_or_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import builtins
    import socket

    opened = builtins.open

    def reading(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        assert not {*mode} & {*"wax+"}, f"{file} is written"
        return opened(file, mode, *args, **kwargs)

    backbone, family, specs = llama()
    backbone.config._attn_implementation_internal = "kernels-community/flash-attn"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "open", reading)
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("asks the network"))
    assert unmatched(match_by_twin(backbone, family, specs)) == {}
    assert list(tmp_path.iterdir()) == []


def test_adapters_and_checkpointing_do_not_matter() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_tiny("llama"), LoraConfig(target_modules="all-linear"))
    model.gradient_checkpointing_enable()
    assert unmatched(match_by_twin(*rows(model))) == {}


def test_what_its_twin_does_not_have_is_not_matched() -> None:
    """A layer was changed by hand, which no config shows."""
    backbone, family, specs = llama()
    backbone.layers[1].self_attn.is_causal = False  # type: ignore[index, union-attr]
    backbone.layers[0].mlp.up_proj = None  # type: ignore[index, union-attr]
    result = unmatched(match_by_twin(backbone, family, specs))
    assert result["LlamaAttention"] == "its twin has no LlamaAttention with the same is_causal"
    assert result["LlamaMLP"] == "its twin has no LlamaMLP with the same up_proj"
    assert {*result} == {"LlamaAttention", "LlamaDecoderLayer", "LlamaMLP"}


def test_it_takes_no_time() -> None:
    """It takes less than a second for a family like Llama; the limit allows for a slow machine."""
    match_by_twin(*llama())
    start = time.perf_counter()
    match_by_twin(*llama())
    assert time.perf_counter() - start < 5.0
