"""Every family of transformers' causal-LM mapping is exact on its tier: nothing leaks, nothing crashes."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

import fastpack
from fastpack.cli.families import family_rows
from fastpack.cli.smoke import MOST_USED
from fastpack.errors import UnsupportedModelError
from fastpack.exactness.family_settings import NOT_BUILT
from fastpack.exactness.image_text import image_text_types
from fastpack.exactness.inputs import INPUT_KINDS, LENGTHS, make_sequences
from fastpack.exactness.oracle import Oracle, checkpointings
from fastpack.exactness.rule import FULL_BOUND, Error
from fastpack.exactness.tiny import model_types
from fastpack.exactness.verification import Verification
from fastpack.families.fast import FAST_FAMILIES
from fastpack.families.mixers import MIXER_FAMILIES
from fastpack.families.refused import REFUSED
from fastpack.families.registry import FAMILIES
from fastpack.families.repadded import REPADDED_FAMILIES
from fastpack.families.spec import Family
from fastpack.families.varlen import VARLEN_FAMILIES
from fastpack.testing.record import Setting
from fastpack.testing.worker import oracle_of

UNTRIED = {**NOT_BUILT, **REFUSED}
TINY = Setting()

TIERS = {row["model_type"]: row["tier"] for row in family_rows()}
HERE = [name for name in model_types() if name not in UNTRIED]
DROPPING = [f for f in VARLEN_FAMILIES if f.drops_packing]
ALL = (*FAST_FAMILIES, *DROPPING, *MIXER_FAMILIES, *REPADDED_FAMILIES)
EACH = [f for f in ALL if f.model_type in model_types()]


@pytest.mark.sample(30)
@pytest.mark.parametrize("model_type", HERE)
def test_exact(model_type: str) -> None:
    """Each kind of input is exact, at ``use_cache``'s default, and with both kinds of checkpointing.

    The control is not.
    """
    model = fastpack.patch(TINY.build(model_type))
    tier = fastpack.report(model).tier
    result = oracle_of(model_type, TINY).prove(model)
    assert result.problem is None
    assert result.nearest.bound <= 20 * FULL_BOUND, "stock is nearly as exact as float32 allows"
    assert tier != "stock"
    assert len(result.checks) == len(INPUT_KINDS) + len(checkpointings(model)) + 1
    assert tier == TIERS.get(model_type, tier), "fastpack families says another one"


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mamba2"])
def test_a_leak_is_seen(model_type: str) -> None:
    """The stock model takes every kind of input too, and does not separate the sequences of some."""
    result = oracle_of(model_type, TINY).prove(TINY.build(model_type))
    assert (result.problem or "").startswith("not exact")
    assert {check.what: check.error for check in result.checks}["packed_seq_lens"] > 0.1


def test_what_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is too large or no number, or the control could not have seen a leak."""
    errors = {"padded right": 1e-6, "padded left": 1e-5}
    oracle = Oracle([], [], FULL_BOUND, torch.float32)

    def result(errors: dict[str, float], control: float) -> Verification:
        off = Error(logits=control, loss=0.0, grads=0.0, embeddings=0.0)
        monkeypatch.setattr(Oracle, "error", lambda *_: off)
        return oracle.judge(torch.nn.Linear(1, 1), errors)

    assert result(errors, 0.9).problem is None
    for error in (2e-4, float("inf")):
        problem = result({**errors, "packed_seq_lens": error}, 0.9).problem
        assert (problem or "").startswith("not exact: packed_seq_lens")
    for control in (1e-3, float("nan"), float("inf")):
        assert (result(errors, control).problem or "").startswith("can't tell: control")


@pytest.mark.parametrize("family", EACH, ids=[f.model_type for f in EACH])
def test_the_tier_that_was_promised_ran(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-padded mixers get rows, and classes with a spec run their fast forward, as often as there are modules."""
    model, sequences = TINY.build(family.model_type), make_sequences()
    fastpack.patch(model)
    report = fastpack.report(model)
    mixers = [m for m in model.modules() if type(m).__name__ in family.mixers]
    packed = [m for m in mixers if family.mixers[type(m).__name__].scan is not None]
    assert report.tier == family.tier
    assert report.swapped.get("packed mixer", 0) == len(packed)
    assert report.swapped.get("re-padded mixer", 0) == len(mixers) - len(packed)
    attentions = [type(m).__name__ for m in model.modules() if type(m).__name__ in family.attention]
    fast = [name for name in attentions if name in family.fast]
    assert report.swapped.get("attention", 0) == len(fast)
    assert report.swapped.get("attention (interface)", 0) == len(attentions) - len(fast)
    assert bool(mixers) == bool(family.mixers)
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    served = [m for m in experts if hasattr(m, getattr(family.fast.get(type(m).__name__), "inner", ""))]
    assert report.swapped.get("experts", 0) == len(served)
    assert {what for what, _ in report.skipped} == {type(m).__name__ for m in experts if m not in served}
    if packed or family.tier == "fast":
        return
    rows: list[int] = []
    for mixer in mixers:
        monkeypatch.setattr(type(mixer), "forward", counted(type(mixer).forward, rows))
    with torch.no_grad():
        model(input_ids=torch.cat(sequences)[None], packed_seq_lens=list(LENGTHS))
    assert len(rows) >= 2 * len(mixers), "more than one group of similar lengths"
    assert all(tokens < sum(LENGTHS) for tokens in rows)


def counted(forward: Any, rows: list[int]) -> Any:
    """Wrap a forward so that it notes its longest second dimension, the tokens of a row."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.ndim >= 2]
        rows.append(max([t.shape[1] for t in tensors], default=0))
        return forward(self, *args, **kwargs)

    run.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("model_type", sorted(set(REFUSED) - set(NOT_BUILT)))
def test_refused(model_type: str) -> None:
    if model_type not in {*model_types(), *image_text_types()}:
        pytest.skip("not in this transformers")
    with pytest.raises(UnsupportedModelError, match="is refused"):
        fastpack.patch(TINY.build(model_type))


def test_the_whole_mapping_is_accounted_for() -> None:
    """A new release can't be missed: a new family fails here by its name, or in test_exact."""
    assert len(UNTRIED.keys() & {*model_types()}) <= 11
    assert len(REFUSED.keys() & {*image_text_types()}) <= 10
    assert len(REPADDED_FAMILIES) <= 25
    assert not {family.model_type for family in REPADDED_FAMILIES} & {*MOST_USED}
    assert len(MOST_USED) >= 60
    names = [family.model_type for family in EACH]
    assert len(names) == len(set(names))
    for family in EACH:
        module = importlib.import_module(family.module)
        for name in (family.backbone, *family.attention, *family.mixers):
            assert hasattr(module, name), (family.model_type, name)
    assert len(FAMILIES) == len(set(FAMILIES))


GENERATED = ("mamba", "bamba", "bloom", "falcon", "opt", "qwen3_next", "recurrent_gemma", "roberta", "rwkv", "zaya")


@pytest.mark.parametrize("model_type", GENERATED)
def test_generate_is_stock(model_type: str) -> None:
    model = TINY.build(model_type).eval()
    prompt = make_sequences()[2][None]
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    stock = model.generate(prompt, **settings)
    fastpack.patch(model)
    assert torch.equal(model.generate(prompt, **settings), stock)
