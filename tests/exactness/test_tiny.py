"""Every family of transformers' causal-LM mapping has a tiny model, in which a leak would show."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from known_families import KNOWN, MOST_USED, OTHERS
from tiny_measures import LEAST_INFLUENCE, LENGTH, ROWS, Measures, influence, measure, share_with_gradient
from torch import nn

from fastpack.exactness import tiny
from fastpack.exactness.family_settings import NEEDS, TRAITS
from fastpack.families.registry import FAMILIES

MANY_PARAMETERS = 1_000_000


def check(model_type: str) -> None:
    result: Measures = measure(model_type)
    assert result.shape == (ROWS, LENGTH, tiny.VOCAB)
    assert result.finite
    assert result.parameters < MANY_PARAMETERS
    assert result.influence > LEAST_INFLUENCE
    assert result.share_with_gradient > 0.5
    assert result.repeats


@pytest.mark.parametrize("model_type", MOST_USED)
def test_a_tiny_model_of_the_most_used_families_runs_and_would_show_a_leak(model_type: str) -> None:
    if model_type not in tiny.model_types():
        pytest.skip("not in this release of transformers")
    check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in OTHERS if name not in tiny.NOT_BUILT])
def test_a_tiny_model_of_the_other_families_runs_and_would_show_a_leak(model_type: str) -> None:
    if model_type not in tiny.model_types():
        pytest.skip("not in this release of transformers")
    check(model_type)


def test_no_family_of_the_mapping_is_new() -> None:
    new = sorted(set(tiny.model_types()) - set(KNOWN))
    assert not new, f"new in transformers' causal-LM mapping: {new}; give each a tiny model, then a place in the list"


def test_every_family_has_a_tiny_config_or_a_reason() -> None:
    failed = {}
    for model_type in set(tiny.model_types()) - tiny.NOT_BUILT.keys():
        try:
            tiny.tiny_config(model_type)
        except Exception as error:  # noqa: BLE001 - one failure must not hide the others
            failed[model_type] = error
    assert not failed


def test_the_tables_name_only_known_families() -> None:
    assert len(set(KNOWN)) == len(KNOWN)
    assert TRAITS.keys() <= {*KNOWN, *FAMILIES}
    assert tiny.NOT_BUILT.keys() <= set(OTHERS)
    assert not TRAITS.keys() & tiny.NOT_BUILT.keys()
    configs = {tiny.model_class(name).config_class.model_type for name in tiny.model_types()}
    assert NEEDS.keys() <= configs | {*KNOWN, *FAMILIES}


def test_what_is_not_built_still_has_its_reason() -> None:
    for model_type, reason in tiny.NOT_BUILT.items():
        with pytest.raises(ValueError, match=reason[:20]):
            tiny.build_tiny(model_type)
        if "timm" in reason:
            assert importlib.util.find_spec("timm") is None, f"{model_type} could be built now"
        else:
            assert "shared_kv_states" in inspect.signature(tiny.model_class(model_type).forward).parameters


def test_every_kind_of_layer_of_the_default_config_occurs() -> None:
    seen = 0
    for model_type in set(tiny.model_types()) - tiny.NOT_BUILT.keys():
        default = tiny.model_class(model_type).config_class()
        for name in ("layer_types", "mlp_layer_types", "indexer_types"):
            kinds = set(getattr(default, name, None) or ())
            small = getattr(tiny.tiny_config(model_type), name, None) or ()
            assert kinds <= set(small), (model_type, name)
            seen += len(kinds) > 1
    assert seen > 30


def test_a_window_ends_what_the_first_token_reaches() -> None:
    """The measure is 0 if no leak can show: two windows of 8 tokens reach 14 tokens further."""
    model = tiny.build_tiny("mistral")
    assert influence(model, length=15) > LEAST_INFLUENCE
    assert influence(model, length=16) == 0.0


def test_a_parameter_without_gradient_counts_as_such() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(3, 3), "vision": nn.Linear(3, 3)})
    model["used"](torch.ones(1, 3)).sum().backward()
    assert share_with_gradient(model) == 0.5


@pytest.mark.parametrize("model_type", ["llama", "mamba2", "qwen3_next"])
def test_a_seed_gives_the_same_weights_and_leaves_the_global_state_alone(model_type: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (tiny.build_tiny(model_type, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
        assert a.dtype == torch.float32
    assert not first.training


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "bloom"])
def test_norms_are_neither_all_equal_nor_far_from_where_they_start(model_type: str) -> None:
    from transformers import AutoModelForCausalLM

    stock = dict(AutoModelForCausalLM.from_config(tiny.tiny_config(model_type)).named_parameters())
    norms = [
        (p, stock[name])
        for name, p in tiny.build_tiny(model_type).named_parameters()
        if p.ndim == 1 and ("norm" in name or "ln_" in name)
    ]
    assert norms
    for norm_H, started_H in norms:
        assert 0.05 < (norm_H - started_H).std() < 0.2


def test_overrides_win_and_are_known_by_either_name() -> None:
    config: Any = tiny.tiny_config("gpt2", hidden_size=32, n_layer=3)
    assert (config.n_embd, config.num_hidden_layers) == (32, 3)
    config = tiny.tiny_config("qwen3_next", num_hidden_layers=8)
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    config = tiny.tiny_config("mpt", attn_config={"alibi": False})
    assert (config.attn_config.alibi, config.hidden_size) == (False, tiny.HIDDEN)
    config = tiny.tiny_config("gemma3", text_config={"num_attention_heads": 2}).text_config
    assert (config.num_attention_heads, config.query_pre_attn_scalar) == (2, 16)
    assert tiny.build_tiny("llama", attn_implementation="eager").config._attn_implementation == "eager"


def test_a_name_that_the_mapping_does_not_have_is_refused() -> None:
    with pytest.raises(KeyError):
        tiny.tiny_config("no_such_family")


@pytest.mark.parametrize(
    ("own", "kinds"), [("mamba", ["mamba", "attention"]), ("conv", ["linear_attention", "full_attention"])]
)
def test_kinds_of_layers_are_in_the_words_of_the_release(own: str, kinds: list[str]) -> None:
    """Granite's and Nemotron's hybrids used other names before transformers 5.13."""
    assert tiny._in_the_words_of([own, own], ["linear_attention", "full_attention"]) == kinds
    assert tiny._in_the_words_of([own, own], 5) == 5
    assert tiny._in_the_words_of([[1], [2]], [[3]]) == [[3]]
