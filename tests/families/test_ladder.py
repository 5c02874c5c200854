"""Every family of transformers' causal-LM mapping, on whichever rung it is exact: nothing leaks, nothing crashes."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import ladder
import pytest
import torch
from oracle import INPUT_KINDS

import fastpack
from fastpack.errors import UnsupportedModelError
from fastpack.families import FAMILIES, MIXER_FAMILIES, REFUSED, REPADDED_FAMILIES, SCOPED_FAMILIES, Family
from fastpack.smoke.special import NOT_BUILT
from fastpack.smoke.tiny import model_types

UNTRIED = {**NOT_BUILT, **REFUSED}
SHARED_STATES = ("gemma3n_text", "gemma4_text")
"""Their layers share keys and values through keywords, which reentrant checkpointing loses, stock too."""
LEAKS = 1e-2

HERE = [name for name in model_types() if name not in UNTRIED]
FURTHER = [f for f in (*SCOPED_FAMILIES, *MIXER_FAMILIES, *REPADDED_FAMILIES) if f.model_type in model_types()]


@pytest.mark.parametrize("model_type", HERE)
def test_exact(model_type: str) -> None:
    """Each kind of input, at ``use_cache``'s default, and both kinds of checkpointing."""
    model, sequences = ladder.build(model_type), ladder.make_sequences()
    alone = ladder.run_alone(model, sequences)
    fastpack.patch(model)
    assert fastpack.report(model).rung != "stock"
    errors = {kind: ladder.error(ladder.run(model, make(sequences)), alone) for kind, make in INPUT_KINDS.items()}
    for reentrant in (False, True):
        if not model.supports_gradient_checkpointing or (reentrant and model_type in SHARED_STATES):
            continue
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        found = ladder.run(model, INPUT_KINDS["restarting positions"](sequences))
        errors["reentrant checkpointing" if reentrant else "checkpointing"] = ladder.error(found, alone)
    assert max(errors.values()) <= ladder.BOUND, errors


@pytest.mark.parametrize("model_type", [f.model_type for f in FURTHER])
def test_negative_control(model_type: str) -> None:
    """As one sequence the same tokens give something else: the check above can tell."""
    model, sequences = ladder.build(model_type), ladder.make_sequences()
    alone = ladder.run_alone(model, sequences)
    fastpack.patch(model)
    ids = torch.cat(sequences)[None]
    with torch.no_grad():
        logits = model(input_ids=ids, packed_seq_lens=[ids.shape[1]]).logits[0].split(ladder.LENGTHS)
    assert max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(logits, alone.logits, strict=True)) > LEAKS


@pytest.mark.parametrize("family", FURTHER, ids=[f.model_type for f in FURTHER])
def test_the_rung_that_was_promised_ran(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-padded mixers were given rows, packed attention all tokens, and nothing else ran on rows."""
    model, sequences = ladder.build(family.model_type), ladder.make_sequences()
    fastpack.patch(model)
    report = fastpack.report(model)
    assert report.rung == family.rung
    mixers = [m for m in model.modules() if type(m).__name__ in family.mixers]
    assert report.swapped.get("re-padded mixer", 0) == len(mixers)
    attentions = [m for m in model.modules() if type(m).__name__ in family.attention]
    assert report.swapped.get("attention (interface)", 0) == len(attentions)
    assert bool(mixers) == bool(family.mixers)
    rows: list[int] = []
    for mixer in mixers:
        monkeypatch.setattr(type(mixer), "forward", counted(type(mixer).forward, rows))
    with torch.no_grad():
        model(input_ids=torch.cat(sequences)[None], packed_seq_lens=list(ladder.LENGTHS))
    assert len(rows) >= 2 * len(mixers), "more than one group of similar lengths"
    assert all(tokens < sum(ladder.LENGTHS) for tokens in rows)


def counted(forward: Any, rows: list[int]) -> Any:
    """The forward, which notes the longest second dimension that it is given: the tokens of a row."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.ndim >= 2]
        rows.append(max([t.shape[1] for t in tensors], default=0))
        return forward(self, *args, **kwargs)

    run.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("model_type", sorted(set(REFUSED) - set(NOT_BUILT)))
def test_refused(model_type: str) -> None:
    if model_type not in model_types():
        pytest.skip("not in this transformers")
    with pytest.raises(UnsupportedModelError, match="is refused"):
        fastpack.patch(ladder.build(model_type))


def test_the_whole_mapping_is_accounted_for() -> None:
    """A new release can't slip through: what is new fails here by its name, or in test_exact."""
    assert len(UNTRIED) <= 11
    assert len(REPADDED_FAMILIES) <= 25
    names = [family.model_type for family in FURTHER]
    assert len(names) == len(set(names))
    for family in FURTHER:
        module = importlib.import_module(family.module)
        for name in (family.backbone, *family.attention, *family.mixers):
            assert hasattr(module, name), (family.model_type, name)
    assert len(FAMILIES) == len(set(FAMILIES))


GENERATED = ("mamba", "bamba", "bloom", "falcon", "opt", "qwen3_next", "recurrent_gemma", "roberta", "rwkv", "zaya")


@pytest.mark.parametrize("model_type", GENERATED)
def test_generate_is_stock(model_type: str) -> None:
    model = ladder.build(model_type).eval()
    prompt = ladder.make_sequences()[2][None]
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    stock = model.generate(prompt, **settings)
    fastpack.patch(model)
    assert torch.equal(model.generate(prompt, **settings), stock)
