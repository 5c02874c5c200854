"""The lock file has every class of the installed transformers, and is what the command writes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm

from fastpack.cli.families import sources_of
from fastpack.exactness.tiny import model_types
from fastpack.families import lock
from fastpack.families.registry import FAMILIES
from fastpack.families.shared_specs import LLAMA_MLP, LLAMA_NORM, OLMO2_NORM
from fastpack.families.source import source_hash
from fastpack.families.spec import Family

HERE = [family for family in FAMILIES.values() if family.model_type in {*model_types(), *CONFIG_MAPPING}]

SCANNING = [name for family in FAMILIES.values() for name, spec in family.mixers.items() if spec.scan]


def classes_of(family: Family) -> Iterator[tuple[str, Any]]:
    module = importlib.import_module(family.module)
    for name in (*family.fast, *lock.stock_mixing(family)):
        if hasattr(module, name):
            yield name, getattr(module, name)


@pytest.mark.parametrize("family", HERE, ids=[family.model_type for family in HERE])
def test_every_class_is_proved_on_the_installed_transformers(family: Family) -> None:
    """If this fails, upstream changed: run `gists/smoke.sh --all --json RUN.json`, then `fastpack families --lock`."""
    for name, cls in classes_of(family):
        known = proved_as(cls, family)
        assert transformers.__version__ in known, f"{name}: {known}"


def proved_as(cls: Any, family: Family) -> list[str]:
    source = lock.hash_of(cls, family)
    names = (cls.__name__, f"{cls.__name__} (earlier)", f"{cls.__name__} ({family.model_type})")
    return [release for name in names for release in lock.proved().get(name, {}).get(source, [])]


def test_a_name_is_one_class() -> None:
    modules: dict[str, set[str]] = {}
    for family in FAMILIES.values():
        for name in (*(name for name, _, _ in lock.specs_of(family)), *lock.stock_mixing(family)):
            modules.setdefault(name, set()).add(family.module)
    assert [name for name, defining in modules.items() if len(defining) > 1] == []


@pytest.mark.parametrize("name", SCANNING)
def test_every_mixer_that_may_run_packed_was_read(name: str) -> None:
    """This is about the installed transformers. If it fails, read the forward first."""
    (family,) = (family for family in FAMILIES.values() if name in family.mixers)
    cls = getattr(importlib.import_module(family.module), name, None)
    assert cls is None or lock.is_proved(lock.packed_name(name), lock.hash_of(cls, family))


def test_nothing_else_is_in_it() -> None:
    named = {name for family in FAMILIES.values() for name, _, _ in lock.specs_of(family)}
    named |= {name for family in FAMILIES.values() for name in lock.stock_mixing(family)}
    named |= {lock.packed_name(name) for name in SCANNING}
    assert lock.proved().keys() - named == set()


def test_it_is_as_the_command_writes_it() -> None:
    assert lock.LOCK.read_text() == lock.as_text(lock.proved())


def test_a_release_is_entered_and_entered_anew() -> None:
    before: lock.Proved = {"A": {"1": ["5.6.0", "5.24.0"]}, "B": {"2": ["5.24.0"]}}
    sources = {"A": "3", "C": "4"}
    after = lock.with_release(before, sources, "5.24.0")
    assert after == {"A": {"1": ["5.6.0"], "3": ["5.24.0"]}, "B": {"2": ["5.24.0"]}, "C": {"4": ["5.24.0"]}}
    assert before["A"]["1"] == ["5.6.0", "5.24.0"]
    later = lock.with_release(after, {"A": "1"}, "5.9.0")["A"]["1"]
    assert '["5.6.0", "5.9.0"]' in lock.as_text({"A": {"1": later}})


def test_a_spec_is_that_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that computed something else in earlier releases has two specs, each with its own hashes."""
    assert lock.proved_spec(LlamaMLP, FAMILIES["llama"]) == LLAMA_MLP
    source = source_hash(NemotronHRMSNorm)
    for name, expected in (("NemotronHRMSNorm", OLMO2_NORM), ("NemotronHRMSNorm (earlier)", LLAMA_NORM)):
        monkeypatch.setattr(lock, "proved", lambda name=name: {name: {source: ["5.24.0"]}})
        assert lock.proved_spec(NemotronHRMSNorm, FAMILIES["nemotron_h"]) == expected
        assert lock.proved_spec(LlamaMLP, FAMILIES["llama"]) is None


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "lfm2", "nemotron_h", "gemma4"])
def test_a_run_enters_what_is_there(model_type: str) -> None:
    for name, source in sources_of(model_type).items():
        assert transformers.__version__ in lock.proved()[name][source]


def test_a_run_enters_what_is_proved_or_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = sources_of("llama")
    assert sources.keys() == FAMILIES["llama"].fast.keys()
    monkeypatch.delitem(lock.proved(), "LlamaRMSNorm")
    assert sources_of("llama") == sources, "its twin matches"
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    assert sources_of("llama").keys() == sources.keys() - {"LlamaMLP"}


def test_a_run_does_not_say_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"Lfm2ShortConv", "Lfm2ShortConv (packed)"} <= sources_of("lfm2").keys()
    monkeypatch.delitem(lock.proved(), "Lfm2ShortConv (packed)")
    assert "Lfm2ShortConv (packed)" not in sources_of("lfm2")
    assert "Lfm2ShortConv" in sources_of("lfm2")
