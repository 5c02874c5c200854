"""The cache of reference log-probabilities on disk: its reference, damaged files, and interrupted writes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import lora_config, with_lora
from references import Kill, policy, tokenised
from tiny import tiny_model

from fastpack.trainers.reference import ReferenceCacheError, with_reference_log_probs
from fastpack.trainers.reference.cache import FILE, ReferenceCache, identify

VALUES = {f"{i:032x}": -i / 3 for i in range(6)}
MORE = {f"{9:032x}": -9.0}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model() -> Any:
    return policy()


@pytest.fixture
def cache(model: Any, tmp_path: Path) -> ReferenceCache:
    """Return a cache of six values that were added in two calls."""
    built = ReferenceCache(tmp_path / "cache", identify(model, None))
    for some in (list(VALUES)[:4], list(VALUES)[4:]):
        built.add({one: VALUES[one] for one in some})
    return built


def test_what_was_put_in_comes_out(cache: ReferenceCache, model: Any, tmp_path: Path) -> None:
    assert ReferenceCache(cache.folder, identify(policy(), None)).load() == VALUES, "to the last bit"
    assert ReferenceCache(tmp_path / "another", identify(model, None)).load() == {}
    assert not (tmp_path / "another").exists()


# ---- whose it is


def changed(change: Callable[[Any], Any]) -> dict[str, str]:
    model = policy()
    with torch.no_grad():
        change(model)
    return identify(model, None)


def one_bit(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.view(torch.int32)[3, 5] ^= 1


def swapped_rows(model: Any) -> None:
    weight = model.lm_head.weight
    weight[[4, 9]] = weight[[9, 4]]


def swapped_layers(model: Any) -> None:
    first, second = (layer.input_layernorm.weight for layer in model.model.layers)
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


OTHERS: dict[str, tuple[Callable[[], dict[str, str]], str]] = {
    "one bit": (lambda: changed(one_bit), "weights: "),
    "rows": (lambda: changed(swapped_rows), "weights: "),
    "layers": (lambda: changed(swapped_layers), "weights: "),
    "dtype": (lambda: changed(lambda m: m.bfloat16()), "weights: "),
    "config": (
        lambda: changed(lambda m: setattr(m.config, "rms_norm_eps", 1e-5)),
        r"config.rms_norm_eps: 1e-06 there, 1e-05 here\. Pass another folder",
    ),
    "another class": (
        lambda: identify(tiny_model("mistral"), None),
        "class: LlamaForCausalLM there, MistralForCausalLM here",
    ),
    "adapter": (lambda: identify(with_lora(policy()), "default"), "adapter.r: None there, "),
    "format": (lambda: {**identify(policy(), None), "format": "0"}, "format: 2 there, 0 here"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_reference(name: str, cache: ReferenceCache) -> None:
    build, text = OTHERS[name]
    other = ReferenceCache(cache.folder, build())
    before = files(cache.folder)
    for call in (other.load, lambda: other.add(MORE)):
        with pytest.raises(ReferenceCacheError, match=text):
            call()
    assert files(cache.folder) == before, "nothing lost"


def test_autocast_is_another(cache: ReferenceCache, model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        other = ReferenceCache(cache.folder, identify(model, None))
    with pytest.raises(ReferenceCacheError, match=r": autocast: None there, torch.bfloat16 here\."):
        other.load()


def test_what_does_not_matter(cache: ReferenceCache) -> None:
    """Names, settings of trainers, the attention implementation and adapters that are off don't matter."""
    model = policy()
    model.config.use_cache = False
    model.config.pad_token_id = 5
    model.config._name_or_path = "elsewhere"
    model.config.architectures = ["LlamaForCausalLM"]
    model.set_attn_implementation("eager")
    model.eval().requires_grad_(False)
    assert identify(model, None) == cache.reference
    tokens = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]}
    tied = tiny_model("llama", tie_word_embeddings=True)
    assert identify(with_lora(copy.deepcopy(tied), **tokens), None) == identify(tied, None)
    for settings in ({}, {"target_modules": ["q_proj", "lm_head"]}, tokens, {"modules_to_save": ["lm_head"]}):
        tuned = with_lora(policy(), **settings)
        assert identify(tuned, None) == cache.reference
    with torch.no_grad():
        tuned.base_model.model.lm_head.modules_to_save["default"].weight += 1
    assert identify(tuned, None) == cache.reference
    on = identify(tuned, "default")
    with torch.no_grad():
        tuned.base_model.model.lm_head.modules_to_save["default"].weight += 1
    assert identify(tuned, "default") != on


def test_adapters_are_told_by_weights_and_config() -> None:
    result = {}
    for name, settings in {"a": {}, "b": {"lora_alpha": 4}, "c": {"r": 2, "lora_alpha": 4}}.items():
        tuned = with_lora(policy(), **settings)
        result[name] = identify(tuned, "default")
    assert result["a"]["weights"] == result["b"]["weights"] != result["c"]["weights"]
    assert (result["a"]["adapter.lora_alpha"], result["b"]["adapter.lora_alpha"]) == ("8", "4")
    # whatever it is called
    tuned = with_lora(policy())
    tuned.add_adapter("ref", lora_config())
    for name, parameter in tuned.named_parameters():
        if ".default." in name:
            tuned.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)
    assert identify(tuned, "ref") == result["a"]


@pytest.mark.gpu
def test_the_same_on_a_gpu() -> None:
    model = tiny_model("llama", vocab_size=200_000).bfloat16()
    assert identify(model, None) == identify(model.cuda(), None)


# ---- damage


def cut_short(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def of_others(path: Path) -> None:
    path.write_text('{"format": "else"}')


def a_list(path: Path) -> None:
    path.write_text("[1, 2]")


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def a_folder(path: Path) -> None:
    path.unlink()
    (path / "in it").mkdir(parents=True)


@pytest.mark.parametrize("damage", [cut_short, of_others, a_list, no_text, a_folder], ids=lambda one: one.__name__)
def test_damage(damage: Callable[[Path], None], model: Any, tmp_path: Path) -> None:
    data, folder = tokenised(), tmp_path / "cache"
    with_reference_log_probs(data, model, folder=folder)
    damage(folder / FILE)
    before = {path: path.is_dir() or path.read_bytes() for path in folder.rglob("*")}
    with pytest.raises(ReferenceCacheError, match=r"log_probs.json can't be read .*pass a new folder"):
        with_reference_log_probs(data, model, folder=folder)
    assert {path: path.is_dir() or path.read_bytes() for path in folder.rglob("*")} == before, "nothing overwritten"


def test_a_folder_of_something_else(model: Any, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("all of it")
    with pytest.raises(ReferenceCacheError, match="can't be read"):
        with_reference_log_probs(tokenised(), model, folder=thesis)
    with_reference_log_probs(tokenised(), model, folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {thesis.name, FILE}
    assert thesis.read_text() == "all of it"


# ---- never half of it


def test_killed_while_it_writes(cache: ReferenceCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file is intact, and the unfinished file does no harm."""

    def ending(self: Path, target: Any) -> Path:
        raise Kill

    before = files(cache.folder)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", ending)
        with pytest.raises(Kill):
            cache.add(MORE)
    after = files(cache.folder)
    assert {name: after[name] for name in before} == before
    assert cache.load() == VALUES
    cache.add(MORE)
    assert cache.load() == VALUES | MORE
    assert json.loads((cache.folder / FILE).read_text())["log_probs"] == VALUES | MORE, "anyone can read it"


def test_two_runs_at_once_keep_what_both_found(cache: ReferenceCache) -> None:
    other = ReferenceCache(cache.folder, cache.reference)
    more = {f"{i:032x}": -float(i) for i in range(10, 14)}
    for i, (one, value) in enumerate(more.items()):
        (cache, other)[i % 2].add({one: value})
    assert cache.load() == VALUES | more
