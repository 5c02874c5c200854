"""The report on linear layers that aren't torch's, on experts' LoRA, and on batches that are not isolated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import check, quantised, with_lora
from oracle import FLOAT32_BOUND, compare, make_sequences, run_alone, run_batch
from peft import LoraConfig, VeloraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from tiny import VOCAB, tiny_model
from torch import Tensor, nn
from transformers.integrations.bitnet import BitLinear
from transformers.integrations.eetq import EetqLinear
from transformers.integrations.higgs import HiggsLinear

import fastpack
from fastpack.exactness.rule import errors_of, largest
from fastpack.exactness.tiny import build_tiny
from fastpack.layers.read_projection import linear_sizes


class HQQLinear(nn.Module):
    """A stand-in for hqq's layer, which the tests don't install: it has sizes but no ``weight``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.W_q = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.W_q * self.scale, self.bias)


MAKE: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "HQQLinear": HQQLinear,
    "EetqLinear": lambda linear: EetqLinear(linear.in_features, linear.out_features),
    "HiggsLinear": lambda linear: HiggsLinear(linear.in_features, linear.out_features, 4, group_size=16),
    "BitLinear": lambda linear: BitLinear(linear.in_features, linear.out_features, bias=False),
}
"""If only a GPU or a missing kernel can run a layer, its entry is transformers' own class, which is not run."""


def with_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in name:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, make(module))
    return model


def wide(model_type: str = "llama") -> Any:
    return tiny_model(model_type, hidden_size=64, intermediate_size=128, head_dim=16)


@pytest.mark.parametrize("name", MAKE)
def test_linear_layers_of_other_libraries_are_listed(name: str) -> None:
    model = fastpack.patch(with_linears(wide(), MAKE[name]))
    report = fastpack.report(model)
    assert report.projections == {name: 14}
    assert report.as_modules == {f"a {name}": 14}
    assert linear_sizes(model.get_submodule("model.layers.0.mlp.up_proj")) == (64, 128)
    plain = fastpack.report(fastpack.patch(wide()))
    assert (plain.projections, plain.as_modules) == ({"linear": 14}, {}), "the control"


@pytest.mark.parametrize("adapted", [False, True])
def test_they_are_called_and_exact(adapted: bool) -> None:
    """This holds under LoRA too, whose update is added to their results."""
    model = with_linears(wide(), HQQLinear)
    if adapted:
        config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        config._register_custom_module({HQQLinear: Linear})
        model = get_peft_model(model, config).train()
    alone = run_alone(model, make_sequences(VOCAB))
    check(fastpack.patch(model), alone)
    report = fastpack.report(model)
    assert report.projections == ({"HQQLinear": 10, "HQQLinear + lora": 4} if adapted else {"HQQLinear": 14})
    assert sum(report.as_modules.values()) == 14
    assert report.as_modules.get("under LoRA, a HQQLinear", 0) == 4 * adapted


@pytest.mark.parametrize("model_type", ["mamba", "qwen3_next", "gpt2"])
@pytest.mark.parametrize("name", ["HQQLinear", "EetqLinear", "BitLinear"])
def test_they_count_in_the_share_without_padding(model_type: str, name: str) -> None:
    plain, other = build_tiny(model_type), with_linears(build_tiny(model_type), MAKE[name])
    share = fastpack.report(fastpack.patch(plain)).unpadded
    assert share is not None
    assert (share == 1) == (model_type == "gpt2")
    assert fastpack.report(fastpack.patch(other)).unpadded == pytest.approx(share, rel=1e-6)


def test_gpt2_has_linear_layers_of_its_own() -> None:
    report = fastpack.report(fastpack.patch(build_tiny("gpt2")))
    assert report.projections == {"Conv1D": 8}


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_lora_on_experts_is_listed(model_type: str) -> None:
    def build(**targets: Any) -> Any:
        torch.manual_seed(1)
        config = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **targets)
        return get_peft_model(tiny_model(model_type), config).train()

    sequences = make_sequences(VOCAB)
    targets = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    alone = run_alone(build(**targets), sequences)
    model = fastpack.patch(build(**targets))
    check(model, alone)
    report = fastpack.report(model)
    experts = type(next(m for m in tiny_model(model_type).modules() if type(m).__name__.endswith("Experts"))).__name__
    count = sum(type(m).__name__ == experts for m in model.modules())
    assert count
    assert report.projections[f"{experts} + lora"] == count, "once for its two parameters"
    assert report.swapped["experts"] == count, "their fast forward reads the adapters"
    assert not report.as_modules
    without = fastpack.report(fastpack.patch(build(target_modules=["q_proj"])))
    assert not any("xperts" in kind for kind in (*without.projections, *without.as_modules)), "the control"


def test_lora_on_the_weight_of_a_linear_layer_is_fused() -> None:
    def build() -> Any:
        torch.manual_seed(1)
        config = LoraConfig(
            r=2, target_modules=[], target_parameters=["q_proj.weight", "up_proj.weight"], init_lora_weights=False
        )
        return get_peft_model(tiny_model("llama"), config).train()

    alone = run_alone(build(), make_sequences(VOCAB))
    model = fastpack.patch(build())
    check(model, alone)
    report = fastpack.report(model)
    assert report.projections == {"linear": 10, "linear + lora": 4}
    assert report.as_modules == {}


@pytest.mark.sample(1)
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_llm_int8_is_isolated_without_outliers(threshold: float, tmp_path: Path) -> None:
    model = fastpack.patch(quantised(tmp_path, load_in_8bit=True, llm_int8_threshold=threshold))
    report = fastpack.report(model)
    assert report.projections == {"8-bit": 14}
    assert report.as_modules == {"LLM.int8 has a matmul of its own": 14}
    assert any("not isolated" in note for note in report.notes) == (threshold > 0)
    if threshold > 0:
        with pytest.raises(
            fastpack.ContaminationError, match=r"can't be exact when patched: LLM\.int8 picks outlier columns"
        ):
            fastpack.verify(model)
    else:
        fastpack.verify(model)


@pytest.mark.parametrize("order", ["patched, then wrapped", "wrapped, then patched"])
@pytest.mark.parametrize("init_type", ["batch_average", "batch_average_once", "random"])
def test_velora_is_isolated_or_reported(init_type: Any, order: str) -> None:
    """Its gradients of A mix all tokens of a batch; the stock model's padded batches are off by as much."""
    sequences = make_sequences(VOCAB)

    def build(patch: bool) -> Any:
        model = tiny_model("llama")
        if patch and order == "patched, then wrapped":
            fastpack.patch(model)
        torch.manual_seed(3)
        model = with_lora(model, velora_config=VeloraConfig(num_groups=4, init_type=init_type))
        return fastpack.patch(model) if patch else model

    def said() -> list[str]:
        return [note for note in fastpack.report(model).notes if "VeLoRA" in note]

    stock, model = build(patch=False), build(patch=True)
    assert len(said()) == (init_type != "random")
    assert all("not isolated" in note and "init_type='random'" in note for note in said())
    if init_type == "batch_average_once":  # it is fixed after the first batch
        for each in (stock, model):
            run_alone(each, sequences[:1])
        assert not said()
    alone = run_alone(stock, sequences)
    result = run_batch(model, sequences, "packed_seq_lens")
    error = compare(result, alone)
    assert max(error.logits, error.loss) <= FLOAT32_BOUND
    if init_type == "batch_average":
        assert error.grads > 0.5, "what the report says is so"
        errors = errors_of(result.grads, alone.grads, size=largest, least=1e-3)
        assert "lora_A" in max(errors, key=lambda name: errors[name])
        assert compare(run_batch(stock, sequences, "padded right"), alone).grads > 0.5, "and stock is no better"
    else:
        assert error.grads <= FLOAT32_BOUND
    with model.disable_adapter():
        assert not said()
