"""Every family of the varlen tier equals each sequence alone, through our attention, layer by layer."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import (
    FLOAT32_BOUND,
    INPUT_KINDS,
    LENGTHS,
    Result,
    compare,
    flat,
    make_sequences,
    relative,
    run_alone,
    run_batch,
)
from tiny import VOCAB, WINDOW, tiny_model
from torch import Tensor, nn

import fastpack
from fastpack.attention_dispatch import BACKENDS
from fastpack.backends.call import AttentionCall
from fastpack.exactness.tiny import model_types
from fastpack.families.fast import FAST_FAMILIES
from fastpack.families.spec import Family
from fastpack.families.varlen import VARLEN_FAMILIES

NAIVE_BOUND = 1e-2
CALLS_PER_MODULE = {"diffllama": 2, "dory": 2}
"""How often a module calls the interface in one forward, where that is not once."""
IN_FLOAT64 = ("biogpt", "ctrl")
"""The gradient of a key bias is zero where positions are added to the embeddings; float32 leaves rounding alone."""
GENERATED = ("beam", "deepseek_v3", "gpt2", "gpt_oss", "granitemoe", "modernbert-decoder")

HERE = [family for family in VARLEN_FAMILIES if family.model_type in model_types() and not family.drops_packing]
"""Those that the installed transformers has."""
each_family = pytest.mark.parametrize("family", HERE, ids=[f.model_type for f in HERE])


@dataclass(frozen=True)
class Case:
    """A family, a tiny stock model of it, and its results for each sequence alone."""

    family: Family
    model: nn.Module
    sequences: list[Tensor]
    alone: Result

    @property
    def calls(self) -> int:
        modules = [m for m in self.model.modules() if type(m).__name__ in self.family.attention]
        return len(modules) * CALLS_PER_MODULE.get(self.family.model_type, 1)


def build(model_type: str) -> nn.Module:
    model = tiny_model(model_type)
    return model.double() if model_type in IN_FLOAT64 else model


@pytest.fixture(scope="module", params=HERE, ids=[f.model_type for f in HERE])
def case(request: pytest.FixtureRequest) -> Case:
    model = build(request.param.model_type)
    sequences = make_sequences(VOCAB)
    return Case(request.param, model, sequences, run_alone(model, sequences))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[AttentionCall]:
    """Record every call that reaches a backend."""
    built: list[AttentionCall] = []

    def recorded(run: Callable[[AttentionCall], Tensor]) -> Callable[[AttentionCall], Tensor]:
        def record(call: AttentionCall) -> Tensor:
            built.append(call)
            return run(call)

        return record

    for backend in BACKENDS.values():
        monkeypatch.setattr(backend, "run", recorded(backend.run))
    return built


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_every_kind_of_input(case: Case, kind: str, calls: list[AttentionCall]) -> None:
    with fastpack.patched(case.model):
        assert fastpack.report(case.model).tier == "varlen"
        error = compare(run_batch(case.model, case.sequences, kind), case.alone)
    assert error.worst <= FLOAT32_BOUND, error
    assert [call.q.shape[0] for call in calls] == [sum(LENGTHS)] * case.calls, "each module, the real tokens alone"
    if windowed(case.family):
        assert WINDOW in [call.window for call in calls], "no call had a window, which the sequences outgrow"


def test_negative_control(case: Case) -> None:
    """The same check fails on naive concatenation, so that it can tell a leak from rounding."""
    ids = flat(case.sequences)["input_ids"]
    with torch.no_grad():
        logits = case.model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits
    naive = logits[0].split([len(s) for s in case.sequences])
    assert max(relative(a, b) for a, b in zip(naive, case.alone.logits, strict=True)) > NAIVE_BOUND


@pytest.mark.parametrize("model_type", GENERATED)
def test_generate_is_stock(model_type: str) -> None:
    model = build(model_type).eval()
    prompt = make_sequences(VOCAB)[2][None]
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    stock = model.generate(prompt, **settings)
    fastpack.patch(model)
    assert torch.equal(model.generate(prompt, **settings), stock)


@pytest.mark.parametrize("duplicate", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox"])
def test_another_stock_attention_after_patching(model_type: str, duplicate: Callable[[Any], Any]) -> None:
    """The stock path attends as the config says now, with masks made for that; sdpa's causal masks are None."""
    stock: Any = tiny_model(model_type).eval()
    model = duplicate(fastpack.patch(copy.deepcopy(stock)))
    sequences = make_sequences(VOCAB)
    alone = run_alone(stock, sequences)
    prompt = sequences[2][None]
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for name in ("sdpa", "eager", "sdpa"):
        stock.set_attn_implementation(name)
        model.set_attn_implementation(name)
        expected, result = (m(prompt, use_cache=True) for m in (stock, model))
        assert torch.equal(result.logits, expected.logits)
        expected, result = (
            m(prompt[:, :3], past_key_values=past.past_key_values, use_cache=True)
            for m, past in ((stock, expected), (model, result))
        )
        assert torch.equal(result.logits, expected.logits)
        assert torch.equal(model.generate(prompt, **settings), stock.generate(prompt, **settings))
        assert compare(run_batch(model, sequences, "padded left"), alone).worst <= FLOAT32_BOUND
    fastpack.unpatch(model)
    assert all(m.config._attn_implementation == "sdpa" for m in model.modules() if hasattr(m, "config"))


def test_the_table() -> None:
    """The table is alphabetical, without duplicates, and apart from the fast families."""
    names = [family.model_type for family in VARLEN_FAMILIES if not family.drops_packing]
    assert names == sorted(set(names))
    assert not {*names} & {family.model_type for family in FAST_FAMILIES}
    assert all(family.tier == "varlen" for family in VARLEN_FAMILIES)
    assert all(family.tier == "fast" for family in FAST_FAMILIES)


@each_family
def test_upstream(family: Family) -> None:
    """The classes exist, call the attention interface, and pass it the window that the backbone's masks have."""
    module = importlib.import_module(family.module)
    for name in family.attention:
        source = inspect.getsource(getattr(module, name).forward)
        assert "ALL_ATTENTION_FUNCTIONS" in source
        assert "sliding_window=" in source or not windowed(family)
    assert "create_chunked_causal_mask" not in backbone_source(family)
    assert "block_sequence_ids" not in backbone_source(family)


def backbone_source(family: Family) -> str:
    backbone = getattr(importlib.import_module(family.module), family.backbone)
    return inspect.getsource(inspect.unwrap(backbone.forward))


def windowed(family: Family) -> bool:
    """Return whether the backbone builds windowed masks."""
    return "create_sliding_window_causal_mask" in backbone_source(family)
