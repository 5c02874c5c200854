"""Moved layers: the stock model goes by their places, packed attention by what each layer was built for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import make_sequences, run_alone
from patch_checks import check_exact, fingerprint
from peft import LoraConfig, get_peft_model
from tiny import VOCAB
from torch import nn

import fastpack
from fastpack.errors import PatchError
from fastpack.exactness.tiny import build_tiny, model_types

WINDOWED = ["gemma2", "gemma3", "qwen2_moe", "modernbert-decoder"]


def owner_of(model: Any) -> Any:
    return getattr(model.base_model, "language_model", model.base_model)


def cut(model: Any) -> Any:
    """Remove the first layer, as pruning does."""
    owner = owner_of(model)
    owner.layers = nn.ModuleList(list(owner.layers)[1:])
    model.config.get_text_config().num_hidden_layers -= 1
    return model


def replicate(model: Any) -> Any:
    adapter = LoraConfig(r=2, target_modules=["q_proj"], layer_replication=[(0, 2), (0, 2)], init_lora_weights=False)
    return get_peft_model(model, adapter)


@pytest.mark.parametrize(
    ("model_type", "move"), [*((name, cut) for name in WINDOWED), ("gemma3_text", replicate), ("afmoe", replicate)]
)
def test_a_patch_refuses_layers_with_other_windows(model_type: str, move: Any) -> None:
    model = move(build_tiny(model_type))
    before = fingerprint(model)
    with pytest.raises(PatchError, match=r"layers\.\d.*was built for .* config.layer_types\[\d\].* set config.layer_"):
        fastpack.patch(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("model_type", WINDOWED)
def test_a_config_that_says_what_the_layers_are(model_type: str) -> None:
    model = cut(build_tiny(model_type)).train()
    config = model.config.get_text_config()
    config.layer_types = config.layer_types[1:]
    for place, layer in enumerate(owner_of(model).layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
    alone = run_alone(model, make_sequences(VOCAB))
    check_exact(fastpack.patch(model), alone)


@pytest.mark.parametrize(("model_type", "move"), [("llama", cut), ("llama", replicate), ("gemma2", replicate)])
def test_moved_layers_with_the_windows_of_their_places(model_type: str, move: Any) -> None:
    stock = build_tiny(model_type).train()
    model = move(fastpack.patch(copy.deepcopy(stock)))
    assert not fastpack.report(model).skipped
    moved = fastpack.unpatch(copy.deepcopy(model))
    alone = run_alone(moved, make_sequences(VOCAB))
    check_exact(model, alone)
    check_exact(fastpack.patch(moved), alone)


@pytest.mark.parametrize(
    ("model_type", "move"), [*((name, cut) for name in WINDOWED), ("gemma3_text", replicate), ("afmoe", replicate)]
)
def test_what_was_moved_since_is_refused(model_type: str, move: Any) -> None:
    model = move(fastpack.patch(build_tiny(model_type)))
    for _ in range(2):
        with pytest.raises(
            PatchError, match=r"layers were moved, .* after the patch: .*layers\.\d.* set config.layer_ty"
        ):
            model(input_ids=torch.full((1, 9), 5))


def other_window(config: Any) -> None:
    config.sliding_window -= 1


def other_types(config: Any) -> None:
    config.layer_types = ["full_attention" for _ in config.layer_types]


def other_types_in_place(config: Any) -> None:
    config.layer_types[config.layer_types.index("sliding_attention")] = "full_attention"


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3", "qwen3", "gemma4", "afmoe", "lara_mini"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            other_window,
            r"layers\.\d.* was built for a window of 8, but config.sliding_window, .* says 7.* set config.* to 8",
        ),
        (other_types, r"layers\.\d.* was built for sliding_attention, but config.layer_types"),
        (other_types_in_place, r"layers\.\d.* was built for sliding_attention, but config.layer_types"),
    ],
)
def test_a_config_that_was_changed(model_type: str, change: Any, message: str) -> None:
    """The stock model masks by its config, so a change raises an error, before the patch or after it."""
    if model_type not in model_types():
        pytest.skip(f"this transformers has no {model_type}")
    changed = build_tiny(model_type)
    change(changed.config.get_text_config(decoder=True))
    with pytest.raises(PatchError, match=message):
        fastpack.patch(changed)
    model = fastpack.patch(build_tiny(model_type))
    ids = torch.full((1, 9), 5)
    model(input_ids=ids)
    change(model.config.get_text_config(decoder=True))
    for _ in range(2):
        with pytest.raises(
            PatchError, match=f"layers were moved, or their config changed, after the patch: .*{message}"
        ):
            model(input_ids=ids)


@pytest.mark.parametrize("model_type", ["mistral", "phimoe", "qwen2_moe"])
def test_a_window_that_layers_read_from_the_config(model_type: str) -> None:
    """The patched model follows the changed window, as the stock model does."""
    stock = build_tiny(model_type).train()
    model = fastpack.patch(copy.deepcopy(stock))
    before = model(input_ids=torch.arange(9)[None]).logits
    for each in (stock, model):
        each.config.sliding_window = 3
    assert not torch.equal(model(input_ids=torch.arange(9)[None]).logits, before)
    check_exact(model, run_alone(stock, make_sequences(VOCAB)))


def test_windows_of_layers_that_the_config_calls_full() -> None:
    """MiniMax masks such layers by a window, beside layers of linear attention. No layer is misplaced."""
    stock = build_tiny("minimax", sliding_window=6).train()
    model = fastpack.patch(copy.deepcopy(stock))
    check_exact(model, run_alone(stock, make_sequences(VOCAB)))
    for each in (stock, model):
        each.config.sliding_window = 3
    check_exact(model, run_alone(stock, make_sequences(VOCAB)))
    assert not fastpack.report(model).skipped


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
@pytest.mark.parametrize("where", ["of the wrapper", "of the layers"])
def test_another_config_behind_a_wrapper(model_type: str, where: str) -> None:
    """The wrapper makes masks by its own config, and the language model picks among them by its own."""

    def change(model: Any) -> None:
        if where == "of the wrapper":
            model.config.text_config = copy.deepcopy(model.config.text_config)
            model.config.text_config.sliding_window = 3
        else:
            model.model.language_model.config = copy.deepcopy(model.model.language_model.config)
            other_types(model.model.language_model.config)

    changed = build_tiny(model_type)
    change(changed)
    with pytest.raises(PatchError, match=r"layers were moved, or their config changed: .*layers\.\d"):
        fastpack.patch(changed)
    model = fastpack.patch(build_tiny(model_type))
    model(input_ids=torch.full((1, 9), 5))
    change(model)
    with pytest.raises(PatchError, match=r"layers were moved, or their config changed, after the patch: .*layers\.\d"):
        model(input_ids=torch.full((1, 9), 5))


@pytest.mark.parametrize("path", ["packed", "stock"])
@pytest.mark.parametrize("model_type", ["olmo", "ministral3"])
def test_settings_that_kept_forwards_read(model_type: str, path: str) -> None:
    """Attention with upstream's forward reads a private config, which follows the model's config."""

    def change(model: Any) -> None:
        if model_type == "olmo":
            model.config.clip_qkv = 0.01
        else:
            model.config.rope_parameters = {**model.config.rope_parameters, "llama_4_scaling_beta": 4.0}

    stock = build_tiny(model_type).train()
    model = copy.deepcopy(fastpack.patch(copy.deepcopy(stock)))
    ids = torch.arange(30)[None]
    before = model(input_ids=ids).logits
    change(stock)
    change(model)
    if path == "stock":  # first, so that no other forward has looked
        torch.testing.assert_close(model(input_ids=ids, use_cache=True).logits, stock(input_ids=ids).logits)
    assert not torch.allclose(model(input_ids=ids).logits, before, rtol=1e-3)
    check_exact(model, run_alone(stock, make_sequences(VOCAB)))
    assert fastpack.unpatch(model).config.to_dict() == stock.config.to_dict()


def test_a_setting_of_the_config_that_attention_has_stays() -> None:
    """A user may set it through the modules, whose config is the private one; the value stays."""
    stock = build_tiny("olmo").train()
    model = fastpack.patch(copy.deepcopy(stock))
    for each in (stock, model):
        for layer in each.model.layers:
            layer.self_attn.config.clip_qkv = 0.01
    check_exact(model, run_alone(stock, make_sequences(VOCAB)))


HYBRIDS = {
    "bamba": ([(0, 2), (1, 2)], "attn_layer_indices", [1, 2]),
    "qwen3_next": ([(1, 3)], "layer_types", ["linear_attention", "full_attention"]),
    "lfm2": ([(0, 2), (1, 2)], "layer_types", ["conv", "full_attention", "full_attention"]),
}
"""Layers that PEFT is to replicate, so that attention comes to stand where the config has a recurrent layer; and what
to set in the config."""


def replicate_as(layers: list[tuple[int, int]], model: Any) -> Any:
    targets = ["in_proj", "in_proj_qkvz"]
    adapter = LoraConfig(r=2, target_modules=targets, layer_replication=layers, init_lora_weights=False)
    return get_peft_model(model, adapter)


def sees_later_tokens(model: Any) -> bool:
    ids = torch.arange(5, 14)[None]
    other = torch.cat([ids[:, :-1], ids[:, -1:] + 20], dim=1)
    with torch.no_grad():
        logits, moved = (model(input_ids=each, use_cache=False).logits[:, :-1] for each in (ids, other))
    return bool((logits - moved).abs().max() > 1e-3)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_attention_in_the_place_of_a_recurrent_layer(model_type: str) -> None:
    """The stock model masks by places in its config, so a replicated attention layer sees later tokens."""
    layers, setting, kinds = HYBRIDS[model_type]
    stock = build_tiny(model_type)
    stock.set_attn_implementation("eager")
    assert not sees_later_tokens(stock)
    refused = "was built for full_attention, but .* says .*, whose mask lets attention see later tokens"
    later = replicate_as(layers, fastpack.patch(copy.deepcopy(stock)))
    with pytest.raises(PatchError, match=refused):
        later(input_ids=torch.full((1, 9), 5))

    model = replicate_as(layers, stock).train()
    assert sees_later_tokens(model)
    with pytest.raises(PatchError, match=refused):
        fastpack.patch(model)
    assert not fastpack.is_patched(model)
    setattr(model.config, setting, kinds)
    assert not sees_later_tokens(model), "as the error says"
    alone = run_alone(model, make_sequences(VOCAB))
    check_exact(fastpack.patch(model), alone)


def test_recurrent_layers_in_their_places() -> None:
    """Control: places with the same kinds of layers, and a family whose layers know their own kinds."""
    for model_type, layers in (("jamba", [(0, 2), (0, 2)]), ("nemotron_h", [(0, 3), (2, 3)])):
        model = replicate_as(layers, build_tiny(model_type)).train()
        model.base_model.model.set_attn_implementation("eager")
        assert not sees_later_tokens(model)
        alone = run_alone(model, make_sequences(VOCAB))
        check_exact(fastpack.patch(model), alone)


@pytest.mark.parametrize("misplaced", [False, True])
def test_the_words_of_earlier_releases(misplaced: bool) -> None:
    """Granite's hybrids called their layers mamba and attention in earlier releases."""
    model: Any = build_tiny("granitemoehybrid")
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    kinds = [words[kind] for kind in model.config.layer_types]
    model.config.layer_types = kinds[::-1] if misplaced else kinds
    if misplaced:
        with pytest.raises(PatchError, match="layers were moved"):
            fastpack.patch(model)
    else:
        fastpack.patch(model)
