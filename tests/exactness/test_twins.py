"""Twins do not depend on the state around them, and every setting of their configs has an effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, GraniteConfig, Qwen3MoeConfig
from transformers.initialization import no_init_weights
from transformers.models.granite.modeling_granite import GraniteModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts, Step3p7TextModel

from fastpack.exactness.inputs import LENGTHS
from fastpack.exactness.twins import apart, build_twin, distinct_sequences


def twin(**kwargs: Any) -> Any:
    with apart():
        return build_twin(GraniteModel, GraniteConfig(attention_bias=True, num_key_value_heads=8), **kwargs)


def test_a_twin_is_always_the_same() -> None:
    """Neither its classes' initialisation nor its precision changes it."""
    first = twin().state_dict()
    torch.manual_seed(7)
    with no_init_weights():
        second = twin().state_dict()
    half = twin(dtype=torch.bfloat16).state_dict()
    assert first.keys() == second.keys() == half.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.equal(value, half[name].float())


def test_no_parameter_is_as_it_begins() -> None:
    for name, parameter in twin().named_parameters():
        assert parameter.std() > 0.1, name
        if name.endswith("norm.weight"):
            assert 0.8 < parameter.mean() < 1.2, name


def test_epsilons_and_dropouts_act() -> None:
    model = twin(dropout=0.5)
    assert model.layers[0].input_layernorm.variance_epsilon == 0.05
    assert model.layers[0].self_attn.attention_dropout == 0.5
    assert model.training
    assert twin().layers[0].self_attn.attention_dropout == 0.0


def test_limits_of_single_layers_act() -> None:
    """Step 3.7 clamps in two of its layers, at a value that a twin's activations never reach."""
    limits = [0.0] * 43 + [7.0] * 2
    config = AutoConfig.for_model("step3p7", text_config={"num_hidden_layers": 45, "swiglu_limits": limits})
    with apart():
        model = build_twin(Step3p7TextModel, config.text_config)
    found = [module.limit for module in model.modules() if isinstance(module, Step3p7Experts)]
    assert {*found} == {float("inf"), 0.5}
    assert config.text_config.swiglu_limits == limits


def test_every_kind_of_layer_is_there() -> None:
    config = Qwen3MoeConfig(num_hidden_layers=48, mlp_only_layers=[0, 1, 5], num_experts=128)
    with apart():
        model = build_twin(Qwen3MoeModel, config)
    assert {type(layer.mlp).__name__ for layer in model.layers} == {"Qwen3MoeMLP", "Qwen3MoeSparseMoeBlock"}
    assert len(model.layers) <= 4
    assert config.num_hidden_layers == 48


def test_no_token_comes_twice() -> None:
    """The embeddings' gradient then holds the gradient of each input."""
    sequences = distinct_sequences()
    assert tuple(map(len, sequences)) == LENGTHS
    assert len(torch.cat(sequences).unique()) == sum(LENGTHS)


def test_an_error_inside_restores_everything() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ZeroDivisionError), apart():
            1 / torch.zeros(1, dtype=torch.int64).item()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
